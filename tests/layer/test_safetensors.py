import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_layers import MoEFeedForward


def make_layer(seed=0, **options):
    torch.manual_seed(seed)
    return MoEFeedForward(**{"d_model": 8, "d_ff": 4, "num_experts": 3, "top_k": 2, "shared_d_ff": 4, **options})


def state(layer):
    return {name: tensor.clone() for name, tensor in layer.state_dict().items()}


def test_round_trip(tmp_path):
    layer, other = make_layer(0), make_layer(1)
    layer.save_safetensors(tmp_path / "layer.safetensors")
    other.load_safetensors(tmp_path / "layer.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), other.parameters(), strict=True))
    assert set(load_file(tmp_path / "layer.safetensors")) == set(layer.state_dict())


def test_converts_to_the_dtype_of_the_layer(tmp_path):
    layer, half = make_layer(0), make_layer(1, dtype=torch.bfloat16)
    layer.save_safetensors(tmp_path / "layer.safetensors")
    half.load_safetensors(tmp_path / "layer.safetensors")
    assert half.experts.w_up.dtype == torch.bfloat16
    assert torch.equal(half.experts.w_up, layer.experts.w_up.bfloat16())


def test_mismatch_lists_every_problem_and_changes_nothing(tmp_path):
    make_layer(0).save_safetensors(tmp_path / "layer.safetensors")
    tensors = load_file(tmp_path / "layer.safetensors")
    del tensors["router.weight"]
    tensors["experts.w_gate"] = torch.zeros(2, 2)
    tensors["experts.w_down"] = torch.zeros(3, 4, 8)
    save_file(tensors, tmp_path / "broken.safetensors")
    layer = make_layer(1)
    before = state(layer)
    with pytest.raises(ValueError, match="broken") as error:
        layer.load_safetensors(tmp_path / "broken.safetensors")
    message = str(error.value)
    assert "missing: router.weight (3, 8)" in message
    assert "unexpected: experts.w_gate (2, 2)" in message
    assert "wrong shape: experts.w_down is (3, 4, 8) in the file, must be (3, 8, 4)" in message
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(layer).items())


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        make_layer().load_safetensors(tmp_path / "none.safetensors")
