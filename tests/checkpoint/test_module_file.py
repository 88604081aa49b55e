"""Files of one module: `save_safetensors` and `load_safetensors`."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_layers import MoEFeedForward
from moe_layers.checkpoint import load_safetensors, save_safetensors

from .test_from_checkpoint import same_state
from .test_save import make_layer


@pytest.fixture
def path(tmp_path):
    make_layer().save_safetensors(tmp_path / "layer.safetensors")
    return tmp_path / "layer.safetensors"


def refuses(path, message):
    layer, before = make_layer(), make_layer()
    with pytest.raises(ValueError, match=message):
        layer.load_safetensors(path)
    assert same_state(layer, before)


def test_round_trip(path):
    layer = make_layer()
    layer.reset_parameters(1.0)
    layer.load_safetensors(path)
    assert same_state(layer, make_layer()) and load_file(path).keys() == layer.state_dict().keys()


def test_converts_to_the_dtype_of_the_layer(path):
    half = make_layer(dtype=torch.bfloat16)
    half.load_safetensors(path)
    assert half.experts.w_up.dtype == torch.bfloat16
    assert torch.equal(half.experts.w_up, make_layer().experts.w_up.bfloat16())


@pytest.mark.parametrize(
    "problem",
    [
        r"missing: router\.weight \(3, 8\)",
        r"unexpected: experts\.w_gate \(2, 2\)",
        r"wrong shape: experts\.w_down is \(3, 5, 8\) in the file, must be \(3, 8, 5\)",
    ],
)
def test_a_mismatch_lists_every_problem(problem, path):
    tensors = load_file(path)
    del tensors["router.weight"]
    save_file({**tensors, "experts.w_gate": torch.zeros(2, 2), "experts.w_down": torch.zeros(3, 5, 8)}, path)
    refuses(path, problem)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        make_layer().load_safetensors(tmp_path / "none.safetensors")


OTHER_DTYPES = [torch.int8, torch.uint8, torch.uint16, torch.int64, torch.bool, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)
def test_values_that_would_need_scales_are_refused(dtype, path):
    tensors = load_file(path)
    save_file({**tensors, "experts.w_up": tensors["experts.w_up"].to(dtype)}, path)
    refuses(path, rf"wrong dtype: experts\.w_up is {dtype} in the file, must be one of .*torch\.bfloat16")


def test_other_tensors_keep_their_dtype(tmp_path):
    module = torch.nn.Module()
    module.register_buffer("steps", torch.tensor([3]))
    module.register_buffer("codes", torch.ones(2).to(torch.float8_e4m3fn))
    save_safetensors(module, tmp_path / "module.safetensors")
    module.steps.zero_()
    load_safetensors(module, tmp_path / "module.safetensors")
    assert module.steps.tolist() == [3]
    save_file({"steps": torch.tensor([2.5]), "codes": torch.ones(2)}, tmp_path / "module.safetensors")
    with pytest.raises(ValueError, match=r"steps is torch\.float32 in the file, must be .*torch\.int64.*\n.*codes"):
        load_safetensors(module, tmp_path / "module.safetensors")


def test_a_layer_without_memory_is_refused(path):
    layer = MoEFeedForward(8, 5, 3, 2, device="meta")
    for call in (layer.load_safetensors, layer.save_safetensors):
        with pytest.raises(ValueError, match=r"must have memory, got router\.weight on meta"):
            call(path)


@pytest.mark.parametrize("kept", [0, 5, 100, -8])
def test_a_truncated_file_is_named(kept, path):
    path.write_bytes(path.read_bytes()[:kept])
    refuses(path, r"layer\.safetensors is damaged or truncated")


def test_a_directory_is_not_a_file(tmp_path):
    refuses(tmp_path, r"must be a file, got a directory")
