"""`repair` gives a checkpoint of the Trainer the names of the model's modules, and leaves nothing half done."""

import json
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from moe_layers.checkpoint.__main__ import main
from moe_layers.checkpoint.model import repair as repairing
from moe_layers.checkpoint.model.repair import repair

from ..tiers import default_tier
from .test_convert import read_model, write_model
from .tiny_models import save_model

transformers = pytest.importorskip("transformers", reason="transformers loads and writes the models")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about its own deprecations
# The Trainer of transformers 5.23 loses experts of these.
LOST = ["qwen3_moe", "mixtral", "granitemoe", "deepseek_v3", "ernie4_5_moe", "nemotron_h", "olmoe"]
TYPES = [*LOST, "gpt_oss"]


@pytest.fixture
def saved(tmp_path):
    """Return a function that saves a model as the Trainer does, in one file or in shards, and returns its state."""

    def save(model_type="qwen3_moe", *, in_shards=False):
        state = save_model(model_type, tmp_path).model[0].state_dict()
        if not in_shards:
            write_model(read_model(tmp_path), tmp_path)
        (tmp_path / "optimizer.pt").write_bytes(b"of the Trainer")
        return state

    return save


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("in_shards", [False, True], ids=["file", "shards"])
@pytest.mark.parametrize("model_type", TYPES)
def test_every_tensor_has_the_name_of_its_module(model_type, in_shards, saved, tmp_path):
    """The Trainer passes the files' tensors to `load_state_dict`, which must then find all."""
    state = saved(model_type, in_shards=in_shards)
    before = contents(tmp_path)
    assert bool(set(read_model(tmp_path)) - set(state)) == (model_type in LOST)
    assert bool(repair(tmp_path).renamed) == (model_type in LOST)
    after = read_model(tmp_path)
    assert state.keys() - after.keys() <= {"lm_head.weight"}  # tied to the embedding
    assert all(torch.equal(state[name], tensor) for name, tensor in after.items())
    assert (tmp_path / "model.safetensors.index.json").exists() == in_shards
    others = [name for name in contents(tmp_path) if not name.startswith("model")]
    assert others == [name for name in before if not name.startswith("model")]
    assert all(contents(tmp_path)[name] == before[name] for name in others)
    again = contents(tmp_path)
    assert repair(tmp_path).renamed == () and contents(tmp_path) == again


class Killed(Exception):
    pass


@pytest.mark.parametrize("in_shards", default_tier([False, True], [False]), ids=["file", "shards"])
def test_an_interrupted_repair_loses_nothing(in_shards, saved, tmp_path, monkeypatch):
    """Stop before each step on the directory. The next call restores the old files, and completes."""
    state = saved(in_shards=in_shards)
    original = tmp_path.with_name(f"{tmp_path.name}_original")
    shutil.copytree(tmp_path, original)
    for step in range(1000):
        remaining = step

        def stop(function, path, *arguments, **options):
            nonlocal remaining
            remaining -= 1
            if remaining < 0:
                raise Killed
            return function(path, *arguments, **options)

        shutil.rmtree(tmp_path)
        shutil.copytree(original, tmp_path)
        with monkeypatch.context() as patched:
            for module, name in ((os, "replace"), (os, "unlink"), (repairing.Path, "unlink")):
                function = getattr(module, name)
                patched.setattr(module, name, lambda *args, _f=function, **options: stop(_f, *args, **options))
            try:
                repair(tmp_path)
            except Killed:
                pass
            else:
                break
        repair(tmp_path)
        after = read_model(tmp_path)
        assert after.keys() == state.keys() and all(map(torch.equal, after.values(), map(state.get, after)))
        assert not [path for path in tmp_path.iterdir() if "backup" in path.name or "partial" in path.name]
    assert step > 4


def refuses(directory, message):
    before = contents(directory)
    with pytest.raises(ValueError, match=message):
        repair(directory)
    partial = directory / "repair.partial"
    if partial.exists():
        shutil.rmtree(partial)
    assert contents(directory) == before


def change_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


GATE, EXPERT = "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.0.up_proj.weight"


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda held: held.pop(GATE), rf"transformers cannot read .*\n  missing_keys: {re.escape(GATE)}"),
            (lambda held: held.update(other=torch.ones(3)), "unexpected_keys: other"),
            (
                lambda held: held.update({EXPERT: held[EXPERT].double()}),
                r"must keep the elements of .* by dtype, {'float32': \d+, 'float64': \d+}, got {'float32'",
            ),
        ],
        ids=["missing", "left over", "another dtype"],
    )
    def test_tensors_that_do_not_fit(self, change, message, saved, tmp_path):
        saved()
        tensors = load_file(tmp_path / "model.safetensors")
        change(tensors)
        write_model(tensors, tmp_path)
        refuses(tmp_path, message)

    @pytest.mark.parametrize("architectures", [None, [], ["SomeNewModel"], [3], "MixtralForCausalLM"], ids=str)
    def test_unknown_class(self, architectures, saved, tmp_path):
        saved()
        change_config(tmp_path, architectures=architectures)
        refuses(tmp_path, "architectures in .* must name a class of transformers")

    def test_quantised_model(self, saved, tmp_path):
        saved()
        change_config(tmp_path, quantization_config={"quant_method": "fp8"})
        refuses(tmp_path, "must not be quantised")

    def test_backup_of_another_program(self, saved, tmp_path):
        saved()
        (tmp_path / "model.safetensors.backup").touch()
        refuses(tmp_path, r"must hold no backup of another program, got model\.safetensors\.backup")

    def test_adapters_of_peft(self, tmp_path):
        (tmp_path / "adapter_model.safetensors").touch()
        refuses(tmp_path, r"must hold model\.safetensors or model\.safetensors\.index\.json, got neither")


def test_command(saved, tmp_path, capsys):
    saved()
    output = tmp_path.with_name(f"{tmp_path.name}_output")
    shutil.copytree(tmp_path, output / "checkpoint-2")
    assert main(["repair", str(output)]) == 0
    assert "checkpoint-2: repaired, " in capsys.readouterr().out
    assert main(["repair", str(output)]) == 0
    assert "nothing to repair" in capsys.readouterr().out
    change_config(output / "checkpoint-2", architectures=["SomeNewModel"])
    assert main(["repair", str(output)]) == 1
    assert "repair: architectures in " in capsys.readouterr().err
