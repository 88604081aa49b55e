"""examples/train_language_model.py, on a model and a text small enough for seconds."""

import dataclasses
import itertools
import json
import math
import signal
from importlib import import_module
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from ..gpu import waiting_is_an_error
from . import examples

language_model, example = examples.language_model, import_module("train_language_model")

CHANGES = {"num_layers": 2, "d_ff": 32, "num_experts": 4, "steps": 8, "peak_learning_rate": 1e-2}
TINY = dataclasses.replace(example.PRESETS["cpu"], **examples.SIZES, **CHANGES, evaluate_every=3, held_out_windows=6)


@pytest.fixture
def text(device):
    return examples.small_text(device)


@pytest.fixture
def start(text, device):
    implementation = examples.implementation_of(device)
    return lambda **changes: example.start_run(dataclasses.replace(TINY, **changes), text, implementation)


@pytest.fixture
def call_main(monkeypatch, tmp_path, text, device):
    """Return a function that calls main on the tiny model, with files in tmp_path."""
    implementation = examples.implementation_of(device)
    preset = "gpu" if text.training.is_cuda else "cpu"
    monkeypatch.setitem(example.PRESETS, preset, TINY)
    monkeypatch.setattr(example, "load_text", lambda root, device: text)
    return lambda *options: example.main(["--output", str(tmp_path), "--implementation", implementation, *options])


def assert_same_training(actual, expected):
    assert actual.step == expected.step
    for name, tensor in example.checkpoint_tensors(expected).items():
        torch.testing.assert_close(
            example.checkpoint_tensors(actual)[name], tensor, rtol=0, atol=0, equal_nan=True, msg=name
        )


def test_text_is_split_by_file(tmp_path):
    for folder in ("", "email", "site-packages/torch", "email/dist-packages"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for i in range(60):
            (tmp_path / folder / f"{i}.py").write_bytes(f"{folder}/{i}\n".encode())
    text = language_model.load_text(tmp_path)
    files = [bytes(part.tolist()).split(language_model.END_OF_FILE) for part in text]
    assert [part.pop() for part in files] == [b"", b""]  # every file has its end marker
    training, held_out = (set(part) for part in files)
    assert training.isdisjoint(held_out)
    assert training | held_out == {f"{folder}/{i}\n".encode() for folder in ("", "email") for i in range(60)}
    assert 0 < len(held_out) < 20
    for part, again in zip(text, language_model.load_text(tmp_path), strict=True):
        assert torch.equal(part, again)


def test_a_byte_sees_only_what_precedes_it(start, text):
    model = start().model
    tokens = text.training[: TINY.context][None].long()
    changed = tokens.clone()
    changed[0, 20] += 1
    with torch.no_grad():
        before, after = (model(tokens)[0], model(changed)[0])
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20], after[:, 20])
    assert not torch.equal(before[:, -1], after[:, -1])


def test_rotation_depends_on_distance_alone():
    rotation = language_model.rotary_table(TINY)
    query, key = torch.randn(2, 1, 1, 1, TINY.width // TINY.num_heads)
    query, key = (
        language_model.rotate(x.expand(-1, -1, TINY.context, -1), rotation).squeeze((0, 1)) for x in (query, key)
    )
    scores = query @ key.T  # [S, S]
    torch.testing.assert_close(scores[5:, 5:], scores[:-5, :-5], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(scores[5:, :-5], scores[:-5, :-5], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("precision", ["fp8", "fp8_saved", "float32"])
def test_precision_of_products(precision, start, call_main, tmp_path, device):
    """FP8 changes the first loss a little. float32 changes it on a GPU alone."""
    changed, default = (start(precision=precision), start())
    windows = example.draw_batch(default.text, TINY, 0)[:, :-1]
    with torch.no_grad():
        errors = example.predict(changed.model, windows)[0] - example.predict(default.model, windows)[0]
    is_same = precision == "float32" and device == "cpu"
    assert (errors == 0).all() if is_same else 0 < errors.abs().max() < 0.2
    assert call_main("--steps", "2", "--precision", precision) == 0
    assert json.loads((tmp_path / "metrics.json").read_text())["settings"]["precision"] == precision
    with pytest.raises(ValueError, match="load_checkpoint: precision must be"):
        call_main("--steps", "2", "--resume")


def test_learning_rate():
    settings = dataclasses.replace(TINY, steps=100, warmup_steps=10, peak_learning_rate=1.0)
    rates = [example.learning_rate(settings, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx((1 + 0.05) / 2)
    assert rates[-1] == pytest.approx(0.05, abs=1e-3)
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[10:]))


def test_loss_falls(start, tmp_path):
    run = start(steps=60, log_every=10, evaluate_every=30)
    assert example.train(run, tmp_path / "checkpoint.safetensors")
    losses = run.history.training_loss
    assert losses[0].item() == pytest.approx(math.log(256), abs=0.5)
    assert losses[-5:].mean() < 3.3
    evaluated = run.history.held_out_loss.isfinite().nonzero().flatten().tolist()
    assert evaluated == [30, 60]
    assert run.history.held_out_loss[60] < run.history.held_out_loss[30] < 4.5
    slots = TINY.batch * TINY.context * TINY.top_k
    assert (run.history.tokens_per_expert.sum(-1) == slots).all()


@pytest.fixture
def interruptible():
    """Enable interrupts as in a terminal, because a shell's background jobs ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_second_interrupt_is_not_held_back(interruptible):
    with pytest.raises(KeyboardInterrupt), example.first_interrupt_as_event() as interrupted:
        signal.raise_signal(signal.SIGINT)
        assert interrupted.is_set()
        signal.raise_signal(signal.SIGINT)


def test_main_resumes_after_interrupt(call_main, start, tmp_path, capsys):
    clip, steps = torch.nn.utils.clip_grad_norm_, itertools.count(1)

    def clip_and_interrupt(*arguments):
        """Press Ctrl-C in step 4, between backward and the update of the weights."""
        if next(steps) == 4:
            signal.raise_signal(signal.SIGINT)
        return clip(*arguments)

    with mock.patch.object(torch.nn.utils, "clip_grad_norm_", clip_and_interrupt):
        assert call_main() == 130
    assert "saved step 4" in capsys.readouterr().out
    assert not (tmp_path / "metrics.json").exists()
    with mock.patch.object(example, "draw_batch", side_effect=example.draw_batch) as draw_batch:
        assert call_main("--resume") == 0
    assert [call.args[2] for call in draw_batch.call_args_list] == [4, 5, 6, 7]
    unbroken = start()
    example.train(unbroken, tmp_path / "unbroken.safetensors")
    resumed = start()
    example.load_checkpoint(resumed, tmp_path / "checkpoint.safetensors")
    assert_same_training(resumed, unbroken)


def test_main_writes_what_it_says(call_main, start, tmp_path, capsys):
    torch.set_num_threads(2)
    assert call_main("--steps", "5", "--seed", "3") == 0
    assert torch.cuda.is_available() or torch.get_num_threads() == 1  # several spin next to another busy program
    printed = capsys.readouterr().out
    names = {"checkpoint.safetensors", "model.safetensors", "training.png", "metrics.json", "sample.txt"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert all(f"wrote {tmp_path / name}" in printed for name in names)

    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["settings"] == dataclasses.asdict(TINY) | {"steps": 5, "seed": 3}
    assert 1 / TINY.num_experts <= metrics["busiest_expert_share"] <= 1 / TINY.top_k
    loss = metrics["held_out_nats_per_byte"]
    baseline = metrics["bigram_nats_per_byte"]
    assert f"held-out loss: {loss:.3f} nats per byte; {baseline:.3f} by counts of byte pairs" in printed
    assert 2 < baseline < 5

    run = start(steps=5, seed=3)
    run.model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert example.evaluate(run) == pytest.approx(loss, rel=1e-6)
    text = (tmp_path / "sample.txt").read_bytes()
    assert text == example.sample(run, example.PROMPT, num_bytes=400)
    assert text.decode(errors="replace") in printed

    png = (tmp_path / "training.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    pixels = pytest.importorskip("matplotlib.image").imread(tmp_path / "training.png")
    assert pixels.shape == (960, 1080, 4)
    assert len({tuple(pixel) for pixel in pixels[::4, ::4].reshape(-1, 4).tolist()}) > 20  # the page is not empty


def test_checkpoint_of_another_run_is_refused(start, tmp_path, text):
    checkpoint = tmp_path / "checkpoint.safetensors"
    run = start()
    example.train(run, checkpoint, stop_after=1)
    with pytest.raises(ValueError, match=r"load_checkpoint: steps must be 8, as in .*, got 9"):
        example.load_checkpoint(start(steps=9), checkpoint)
    run.text = text._replace(training=text.training[1:])
    with pytest.raises(ValueError, match=r"load_checkpoint: training_crc32 must be"):
        example.load_checkpoint(run, checkpoint)


def test_failed_write_keeps_the_old_checkpoint(start, tmp_path):
    checkpoint = tmp_path / "checkpoint.safetensors"
    run = start()
    example.train(run, checkpoint, stop_after=2)

    def fail_half_way(tensors, path, metadata):
        save_file(dict(list(tensors.items())[:3]), path, metadata)
        raise OSError("no space left on device")

    with mock.patch.object(example, "save_file", fail_half_way), pytest.raises(OSError, match="no space"):
        example.train(start(), checkpoint, stop_after=1)
    loaded = start()
    example.load_checkpoint(loaded, checkpoint)
    assert_same_training(loaded, run)


@pytest.mark.gpu
def test_a_step_does_not_wait_for_the_gpu(start):
    run = start()
    for _ in range(3):  # compiles the kernels
        example.train_step(run)
    with waiting_is_an_error():
        example.train_step(run)
