"""Every golden case: the same experts, output and gradients as the original modules of transformers."""

import pytest
import torch

from moe_layers import MoEFeedForward

from . import golden as cases
from .golden import CASES, GOLDEN, Golden, replace_by_grads
from .test_convert import read_model

DTYPES = [torch.float32] + ([torch.bfloat16] if torch.cuda.is_available() else [])


def assert_close(actual, expected, limit, dtype, name):
    """Apply the limits of the cases: absolute in float32, relative root mean square in bfloat16."""
    assert actual.shape == expected.shape, name
    if dtype == torch.float32:
        assert (actual.cpu() - expected).abs().max() < limit * max(1, expected.square().mean().sqrt()), name
    elif expected.any():
        error = (actual.float().cpu() - expected).square().mean().sqrt()
        assert error / expected.square().mean().sqrt() < 1.5e-2, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_output_and_choice(case, dtype, device):
    golden = Golden(case)
    expected = golden.tensors("golden")
    moe = MoEFeedForward.from_checkpoint(golden.directory, golden.layer, dtype=dtype, device=device)
    y, routing = moe(expected["x"].to(device, dtype), return_routing=True)
    assert_close(y, expected["y"], 2e-5, dtype, "y")
    if "router_logits" in expected:
        logits = expected["router_logits"].view(routing.logits.shape)
        assert_close(routing.logits, logits, 2e-5, dtype, "logits")
    ids, weights = sort_by_id(routing.topk_experts.cpu().long(), routing.topk_weights.cpu())
    expected_ids, expected_weights = sort_by_id(expected["topk_idx"], expected["topk_weight"].float())
    kept = expected_ids >= 0  # dropped tokens have id -1
    assert (~kept).sum() == (2 if case == "switch_transformers" else 0)
    assert torch.equal(ids[kept], expected_ids[kept])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(weights[kept], expected_weights[kept], rtol=tolerance, atol=tolerance)


def sort_by_id(ids, weights):
    """Sort the slots by id, because the order of the k slots is unspecified."""
    order = ids.argsort(-1)
    return ids.gather(-1, order), weights.gather(-1, order)


# Rounding parameters to bfloat16 moves values across the kinks of these activations (relu, clamps), where the gradient
# jumps. Their gradients are therefore compared with those of the rounded parameters in float64.
KINKED = ("gpt_oss", "switch_transformers")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case != "gpt_oss_mxfp4"])
def test_gradients(case, dtype, device, tmp_path):
    """Weight gradients are compared under their names and in their layout on disk."""
    golden = Golden(case)
    tensors = golden.tensors("golden")
    moe = MoEFeedForward.from_checkpoint(golden.directory, golden.layer, dtype=dtype, device=device)
    x, dy = tensors["x"].to(device, dtype), tensors["dy"].to(device, dtype)
    expected = {**golden.tensors("grads"), "x": tensors["grad_x"]}
    if dtype == torch.bfloat16 and case in KINKED:
        exact = MoEFeedForward.from_checkpoint(
            golden.directory, golden.layer, dtype=torch.float64, implementation="reference"
        )
        exact.load_state_dict({name: tensor.cpu().double() for name, tensor in moe.state_dict().items()})
        expected = gradients_on_disk(exact, x.cpu().double(), dy.cpu().double(), tmp_path / "exact")
    actual = gradients_on_disk(moe, x, dy, tmp_path / "actual")
    assert set(expected) <= set(actual)
    for name, gradient in expected.items():
        assert_close(actual[name], gradient.float(), 2e-4, dtype, name)


def gradients_on_disk(moe, x, dy, directory):
    """Return the gradients of sum(y * dy) as `save_checkpoint` would write the parameters, and that of x."""
    x = x.clone().requires_grad_()
    moe(x).backward(dy)
    replace_by_grads(moe)
    moe.save_checkpoint(directory)
    return {**read_model(directory), "x": x.grad}


def test_a_made_case_passes(tmp_path, device, monkeypatch):
    """The script that CONTRIBUTING names writes what the tests above read."""
    pytest.importorskip("transformers", minversion="5.7", reason="transformers 5.7 or later is not installed")
    from .make_golden import make

    blocks = "model.layers.1.mlp", "model.layers.1.block_sparse_moe"
    make(GOLDEN / "mixtral" / "config.json", tmp_path / "made", *blocks)
    monkeypatch.setattr(cases, "GOLDEN", tmp_path)
    test_output_and_choice("made", torch.float32, device)
    test_gradients("made", torch.float32, device, tmp_path)
