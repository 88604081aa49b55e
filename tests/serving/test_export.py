"""llama.cpp's converter and transformers read what `save_pretrained` of an enabled model and `merge` write.

    OTHER_TRANSFORMERS=DIR python -m pytest --all tests/serving/test_export.py

also exchanges models with another version of transformers, which `pip install --target DIR` wrote to a folder.
"""

import copy
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from moe_layers.checkpoint.adapters.merge import merge_adapter
from moe_layers.serving import iter_weights

from ..processes import ROOT
from ..tiers import slow

transformers = pytest.importorskip("transformers", minversion="5.7", reason="transformers 5.7 or later is needed")

from moe_layers.integrations.transformers import enable  # noqa: E402

from ..integrations.models import build  # noqa: E402
from ..integrations.peft_models import WARNINGS, adapt, lora  # noqa: E402
from .llama_cpp import read_gguf, write_gguf  # noqa: E402

pytestmark = WARNINGS
OTHER = os.environ.get("OTHER_TRANSFORMERS")
MODELS = {"qwen3_moe": "QWEN3MOE", "gpt_oss": "GPT_OSS"}
READ = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
torch.save((transformers.__version__, model.state_dict()), sys.argv[2])
model.save_pretrained(sys.argv[3])
"""


def write_exports(model_type, tmp_path):
    """Write an enabled model with adapters to folders: base, adapters, their `merge`, and what PEFT merges.

    Returns:
        the model, and PEFT's merged model.
    """
    model = adapt(build(model_type), lora(target_modules=["q_proj"]))
    enable(model, implementation="reference")
    model.save_pretrained(tmp_path / "adapter")
    copy.deepcopy(model).unload().save_pretrained(tmp_path / "base")
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    final = copy.deepcopy(model).merge_and_unload()
    final.save_pretrained(tmp_path / "saved")
    return model, final


@pytest.mark.parametrize("model_type", MODELS)
def test_llama_cpp_reads_what_is_written(model_type, tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    model, final = write_exports(model_type, tmp_path)
    layers = final.model.layers
    exports = {name: load_file(tmp_path / name / "model.safetensors") for name in ("merged", "saved")}
    for name, tensors in {**exports, "iter_weights": dict(iter_weights(model))}.items():
        path = tmp_path / f"{name}.gguf"
        architecture = getattr(gguf.MODEL_ARCH, MODELS[model_type])
        write_gguf(gguf, path, tensors, architecture, len(layers), layers[0].mlp.experts.num_experts)
        found = read_gguf(gguf, path)
        for number, layer in enumerate(layers):
            experts = layer.mlp.experts
            if model_type == "gpt_oss":
                gate_up, down = experts.gate_up_proj.mT, experts.down_proj.mT
                gate, up = gate_up[:, 0::2], gate_up[:, 1::2]
                biases = experts.gate_up_proj_bias
                assert torch.equal(found[f"blk.{number}.ffn_gate_exps.bias"], biases[:, 0::2])
                assert torch.equal(found[f"blk.{number}.ffn_up_exps.bias"], biases[:, 1::2])
                assert torch.equal(found[f"blk.{number}.ffn_down_exps.bias"], experts.down_proj_bias)
                assert torch.equal(found[f"blk.{number}.attn_sinks.weight"], layer.self_attn.sinks)
                router = layer.mlp.router.weight
            else:
                (gate, up), down, router = experts.gate_up_proj.chunk(2, 1), experts.down_proj, layer.mlp.gate.weight
            expected = {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down, "ffn_gate_inp": router}
            expected["attn_q"] = layer.self_attn.q_proj.weight
            for part, tensor in expected.items():
                torch.testing.assert_close(found[f"blk.{number}.{part}.weight"], tensor, rtol=1e-6, atol=1e-6, msg=part)


assert_same = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)


def read(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.mark.parametrize("model_type", MODELS)
def test_transformers_reads_what_is_written(model_type, tmp_path):
    _, final = write_exports(model_type, tmp_path)
    for name in ("merged", "saved"):
        assert_same(read(tmp_path / name), final.state_dict())


@slow
@pytest.mark.skipif(OTHER is None, reason="OTHER_TRANSFORMERS names no folder")
@pytest.mark.parametrize("model_type", MODELS)
def test_another_transformers_reads_what_is_written(model_type, tmp_path):
    expected = write_exports(model_type, tmp_path)[1].state_dict()
    environment = {**os.environ, "PYTHONPATH": f"{OTHER}:{ROOT}"}
    for name in ("merged", "saved"):
        arguments = [tmp_path / name, tmp_path / "state.pt", tmp_path / f"{name}_again"]
        subprocess.run([sys.executable, "-c", READ, *map(str, arguments)], env=environment, check=True)
        version, state = torch.load(tmp_path / "state.pt")
        assert version != transformers.__version__
        assert_same(state, expected)
        assert_same(read(arguments[2]), expected)
