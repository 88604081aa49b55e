"""Replayed ops: a repeated form of operands gives the bits of the function, without its choices and checks."""

import gc
import itertools
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moe_kernels import RouterSpec
from moe_kernels.experts import fused_op, row_products
from moe_kernels.gemm import selection
from moe_kernels.gemm.arguments.grouped import GroupedGemmArguments
from moe_kernels.runtime import replay
from moe_kernels.runtime.launch_list import LaunchList
from moe_kernels.runtime.replay import clear_records
from moe_kernels.runtime.triton import HAS_TRITON, triton
from moe_layers import LoRA, MoEFeedForward
from moe_layers.experts.quantization import quantize_experts_

from ...processes import ROOT
from ...tiers import default_tier

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="there are no ops without Triton")

SMALL = (16, 16, 4, 2)


@pytest.fixture(autouse=True)
def replays(poisoned_memory, monkeypatch):
    """Poisoned memory switches replays off, so these tests run without it. The second call is recorded."""
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(replay, "CALLS_BEFORE_RECORD", 1)
    clear_records()
    yield
    clear_records()


def unrecorded(function, *args):
    """Call while every op runs its function."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return function(*args)
    finally:
        torch.use_deterministic_algorithms(False)


def states():
    """Return the states of all forms that were called more than once, by op."""
    known = {op.name: {state for state in op.states() if not state.startswith("called")} for op in replay._all}
    return {name: found for name, found in known.items() if found}


def make_layer(device, *, sizes=SMALL, adapters=False, format=None, seed=0, frozen=(), **options):
    torch.manual_seed(seed)
    layer = MoEFeedForward(*sizes, implementation="triton", device=device, **options)
    if format is not None:
        quantize_experts_(layer, format)
    if adapters:
        layer.add_lora(LoRA(2, 4.0))
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad:  # all but stored bytes
            torch.nn.init.normal_(parameter, std=0.3)
        parameter.requires_grad_(parameter.requires_grad and not any(part in name for part in frozen))
    return layer


def draw(device, num_tokens=3, d_model=16):
    return torch.randn(num_tokens, d_model, device=device)


def step(layer, tokens, *, frozen_tokens=False):
    """Return the output and all gradients."""
    tokens = tokens.clone().requires_grad_(not frozen_tokens)
    out = layer(tokens)
    leaves = [leaf for leaf in (tokens, *layer.parameters()) if leaf.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def inference(layer, tokens):
    with torch.inference_mode():
        return [layer(tokens)]


def assert_same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        assert a.stride() == b.stride()


GROUPS = RouterSpec(score="sigmoid", selection_bias="score", num_groups=2, topk_groups=1)
FORMS = {
    "softmax": {},
    "softmax in inference": {"mode": "inference"},
    "softmax, frozen tokens": {"mode": "tokens"},
    "weights not normalised, biases": {"router": RouterSpec(normalize=False), "bias": True},
    "sigmoid, recompute": {"router": GROUPS, "recompute": "up"},
    "sigmoid in inference": {"router": GROUPS, "mode": "inference", "bias": True},
    "sigmoid, frozen weights": {"router": GROUPS, "frozen": ("w_up", "w_down")},
    "gpt_oss, all frozen but biases": {"activation": "gpt_oss", "bias": True, "frozen": ("w_",)},
    "geglu, weights on the input": {"activation": "geglu", "router": RouterSpec(weight_on_input=True)},
    "relu, recompute": {"activation": "relu", "recompute": "up", "frozen": ("w_down",)},
    "adapters, recompute": {"adapters": True, "recompute": "up"},
    "adapters of biased experts in inference": {"adapters": True, "bias": True, "mode": "inference"},
    "nf4": {"format": "nf4", "sizes": (64, 32, 2, 1)},
    "adapters of mxfp4": {"format": "mxfp4", "adapters": True, "sizes": (64, 32, 2, 1), "mode": "tokens"},
    "fp8": {"precision": "fp8", "sizes": (48, 16, 3, 2)},
    "fp8_saved, recompute": {"precision": "fp8_saved", "sizes": (48, 16, 3, 2), "frozen": ("w_up",)},
    "no tokens, biases": {"bias": True, "num_tokens": 0},
    "no tokens, weights on the input": {"router": RouterSpec(weight_on_input=True), "num_tokens": 0},
    "one token": {"num_tokens": 1},
    "capacity": {"capacity": 2},
}


QUICK = {
    "softmax in inference",
    "sigmoid, recompute",
    "gpt_oss, all frozen but biases",
    "adapters, recompute",
    "nf4",
    "fp8",
    "no tokens, biases",
}


@pytest.mark.parametrize("form", default_tier(FORMS, QUICK))
def test_a_replay_gives_the_bits_of_the_function(form, device):
    """Each call has new operands, and the last call has another layer's weights."""
    options = dict(FORMS[form])
    mode, num_tokens = options.pop("mode", None), options.pop("num_tokens", 3)
    layer, other = make_layer(device, **options), make_layer(device, seed=1, **options)
    d_model = options.get("sizes", SMALL)[0]

    def run(layer, tokens):
        return inference(layer, tokens) if mode == "inference" else step(layer, tokens, frozen_tokens=mode == "tokens")

    for _ in range(2):
        run(layer, draw(device, num_tokens, d_model))
    known = states()
    assert known["fused_experts"] == {"replayed"}
    assert set().union(*known.values()) == {"replayed"}
    tokens = draw(device, num_tokens, d_model)
    want = unrecorded(run, other, tokens)
    assert_same(run(other, tokens), want)
    assert states() == known


def test_other_forms_in_between(device):
    layer = make_layer(device, bias=True)
    given = [draw(device, num_tokens) for num_tokens in (3, 2, 3, 1, 2, 3, 1, 3, 2)]
    for tokens in given:
        assert_same(inference(layer, tokens), unrecorded(inference, layer, tokens))
    assert states()["fused_experts"] == {"replayed"}


def test_two_passes_of_one_form_are_apart(device):
    """Both forwards run before both backwards, which run twice. No result shares memory with another."""
    layer = make_layer(device)
    for _ in range(2):
        step(layer, draw(device))
    given = [draw(device).requires_grad_() for _ in range(2)]
    want = [unrecorded(step, layer, tokens) for tokens in given]
    outs = [layer(tokens) for tokens in given]
    for _ in range(2):
        made = [
            torch.autograd.grad(out.square().sum(), [tokens, *layer.parameters()], retain_graph=True)
            for tokens, out in zip(given, outs, strict=True)
        ]
        for out, gradients, wanted in zip(outs, made, want, strict=True):
            assert_same([out.detach(), *gradients], wanted)
        tensors = [*outs, *made[0], *made[1]]
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
        for gradients in made:
            for gradient in gradients:
                gradient.zero_()


LAYOUTS = {
    "expanded": lambda device: draw(device, 1).expand(3, 16),
    "a number": lambda device: draw(device, 1, 1).expand(3, 16),
    "every second column": lambda device: draw(device, 3, 32)[:, ::2],
    "transposed": lambda device: draw(device, 16, 3).t(),
    "unaligned": lambda device: draw(device, 1, 64).view(-1)[3:51].view(3, 16),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_tokens_and_of_their_gradient(layout, device):
    layer, make = make_layer(device), LAYOUTS[layout]

    def run(tokens, dout):
        tokens = tokens.detach().requires_grad_()
        return torch.autograd.grad(layer(tokens), [tokens, *layer.parameters()], dout)

    for _ in range(3):
        given = make(device), make(device)
        got = run(*given)
    assert_same(got, unrecorded(run, *given))


def test_what_the_gradient_shares_with_the_tokens(device):
    layer = make_layer(device)

    def run(tokens):
        tokens = tokens.clone().requires_grad_()
        return torch.autograd.grad(layer(tokens), [tokens, *layer.parameters()], tokens.detach())

    for _ in range(2):
        step(layer, draw(device))
    for _ in range(3):
        tokens = draw(device)
        assert_same(run(tokens), unrecorded(run, tokens))


@pytest.mark.parametrize("router", [RouterSpec(), RouterSpec(score="sigmoid")], ids=["softmax", "sigmoid"])
def test_backward_under_autocast(router, device):
    """The function computes without autocast, so its replay does."""
    layer = make_layer(device, router=router)

    def run(tokens):
        tokens = tokens.clone().requires_grad_()
        loss = layer(tokens).square().sum()
        with torch.autocast(device, dtype=torch.bfloat16):
            return torch.autograd.grad(loss, [tokens, *layer.parameters()])

    for _ in range(3):
        tokens = draw(device)
        got = run(tokens)
    assert_same(got, unrecorded(run, tokens))


def test_threads_share_records(device, monkeypatch):
    lock, interpret = threading.Lock(), LaunchList._interpret  # the interpreter has global variables

    def one_by_one(launches, memory):
        with lock:
            interpret(launches, memory)

    monkeypatch.setattr(LaunchList, "_interpret", one_by_one)
    layer = make_layer(device)
    for _ in range(2):
        inference(layer, draw(device))
    given = [draw(device) for _ in range(4)]
    want = [unrecorded(inference, layer, tokens) for tokens in given]
    all_run = threading.Barrier(4)

    def infer(tokens):
        all_run.wait()
        return inference(layer, tokens)

    with ThreadPoolExecutor(4) as pool:
        got = pool.map(infer, given)
    for results, wanted in zip(got, want, strict=True):
        assert_same(results, wanted)


def test_records_keep_no_tensor(device):
    layer, tokens = make_layer(device), draw(device)
    for _ in range(3):
        step(layer, tokens)
    out = layer(tokens)
    known = [weakref.ref(tensor) for tensor in (layer, tokens, out, *layer.parameters())]
    del layer, tokens, out
    gc.collect()
    assert [kept() for kept in known if kept() is not None] == []


def test_the_number_of_forms_is_bounded(device, monkeypatch):
    monkeypatch.setattr(replay, "_MOST_FORMS", 2)
    layer = make_layer(device)
    for num_tokens in (1, 1, 1, 2, 3, 3, 1):
        tokens = draw(device, num_tokens)
        assert_same(inference(layer, tokens), unrecorded(inference, layer, tokens))
    assert max(len(op.states()) for op in replay._all) == 2


@pytest.mark.gpu
def test_more_forms_than_executable_graphs(device):
    """A new executable graph replaces the oldest, which may still run."""
    layer = make_layer(device)
    given = [draw(device, num_tokens) for num_tokens in range(1, 200)]
    want = [inference(layer, tokens) for tokens in given]
    for tokens in given:
        inference(layer, tokens)  # recorded
    streams = torch.cuda.current_stream(), torch.cuda.Stream()
    for _ in range(2):
        torch.cuda.synchronize()
        got = []
        for stream in streams:
            with torch.cuda.stream(stream):
                got += [inference(layer, tokens) for tokens in given]
        torch.cuda.synchronize()
        assert_same([out for (out,) in got], 2 * [out for (out,) in want])


def test_whatever_chooses_kernels_forgets_records(device):
    layer, tokens = make_layer(device), draw(device)
    w_up = layer.experts.w_up.detach()
    offsets = torch.tensor([1, 2, 3, 3], dtype=torch.int32, device=device)
    args = GroupedGemmArguments(tokens, w_up.mT, tokens.new_empty(3, 32), offsets=offsets)
    pins = (
        clear_records,
        lambda: selection.pin(args, selection.select(args)),
        lambda: selection.pin_copies(tokens, w_up, 16, 6, selection.choose_copies(tokens, w_up, 16, 6)),
    )
    for forget in pins:
        for _ in range(2):
            inference(layer, tokens)
        assert states()["fused_experts"] == {"replayed"}
        forget()
        assert not any(op.states() for op in replay._all)


def test_what_sees_single_launches_or_new_memory_runs_the_function(device, monkeypatch):
    layer, tokens = make_layer(device), draw(device)
    for _ in range(2):
        inference(layer, tokens)
    calls, place = [], fused_op._place_slots
    monkeypatch.setattr(fused_op, "_place_slots", lambda operands: calls.append(1) or place(operands))
    inference(layer, tokens)
    assert not calls
    unrecorded(inference, layer, tokens)
    assert len(calls) == 1
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(print)
    try:
        inference(layer, tokens)
    finally:
        hooks.remove(print)
    assert len(calls) == 2
    inference(layer, tokens)
    assert len(calls) == 2
    monkeypatch.setattr(replay, "_single_launches", [])
    replay.require_single_launches("a test")
    inference(layer, tokens)
    assert len(calls) == 3


@pytest.mark.parametrize("options", [{}, {"activation": "geglu", "recompute": "up"}], ids=str)
def test_a_replay_chooses_nothing_and_calls_little(options, device, monkeypatch):
    """Launches do nothing here, so the numbers are those of the host."""
    stubbed = []
    for name in ("run", "_interpret"):
        launch = getattr(LaunchList, name)
        monkeypatch.setattr(LaunchList, name, lambda *given, launch=launch: None if stubbed else launch(*given))
    layer, tokens = make_layer(device, **options), draw(device).requires_grad_()
    leaves = [tokens, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]

    def run():
        torch.autograd.grad([layer(tokens)], leaves, dout)

    dout = draw(device)
    for _ in range(3):
        run()
        inference(layer, tokens)
    stubbed.append(True)
    choices = []
    for module, name in ((selection, "find"), (selection, "choose_copies"), (row_products, "is_worth_aligning")):
        chosen = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, f=chosen: choices.append(f.__name__) or f(*args))
    forward = python_calls(lambda: layer(tokens))
    both = python_calls(run)
    assert choices == []
    assert len(forward) <= 60
    assert len(both) <= 118
    own = [file for file in forward if file.startswith(f"{ROOT}/moe_")]
    visits = [file for file, _ in itertools.groupby(own)]
    assert len(set(visits)) <= 16 and len(visits) <= 28, visits


def python_calls(function):
    """Return the file of each Python function that a call runs, except the called function. Comprehensions do not
    count, because they are no functions since Python 3.12."""
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code) if event == "call" else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    skipped = "<listcomp>", "<dictcomp>", "<setcomp>"
    return [code.co_filename for code in calls[1:] if code.co_name not in skipped]
