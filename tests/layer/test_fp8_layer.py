"""Layers with `precision="fp8"`: settings, kept forms of the weights, and every way in which weights change."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from moe_layers import LoRA, MoEConfig, MoEFeedForward
from moe_layers.experts import kept_fp8
from moe_layers.experts.quantization import quantize_experts_

from .. import layers
from ..gpu import assert_never_waits, captured
from ..tiers import default_tier

SIZES = (48, 16, 3, 2)


def make_layer(device, implementation="triton", seed=0, dtype=torch.float32, precision="fp8", **options):
    torch.manual_seed(seed)
    kind = {"implementation": implementation, "device": device, "dtype": dtype}
    return layers.moe_layer(*SIZES, init_std=0.3, precision=precision, **options, **kind)


def make_x(device, dtype=torch.float32, num_tokens=9):
    return layers.make_x(device, (num_tokens, 48), dtype=dtype).requires_grad_()


def step(layer, x, run=None):
    """Return the output and all gradients of one step of the layer, which `run`, if given, calls."""
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    out = (layer if run is None else run)(x)
    out.float().square().sum().backward()
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": x.grad, **gradients}


assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)


def fresh(layer):
    """Return a layer with the same weights and without kept forms."""
    other = make_layer(layer.experts.w_up.device, layer.experts.implementation, 1, layer.experts.w_up.dtype)
    other.load_state_dict(layer.state_dict())
    return other


@pytest.fixture
def launches(monkeypatch):
    """Count the launches that quantise a weight to keep its e4m3 forms, and those that look for changes of a weight."""
    counts = {"quantize": 0, "look": 0}

    def counted(name, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    quantize, look = kept_fp8.launch_quantize_weight, kept_fp8.launch_requantize
    monkeypatch.setattr(kept_fp8, "launch_quantize_weight", counted("quantize", quantize))
    monkeypatch.setattr(kept_fp8, "launch_requantize", counted("look", look))
    return counts


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_differs_from_the_layer_without_it_by_the_rounding_of_e4m3(implementation, device):
    layer, plain = make_layer(device, implementation), make_layer(device, implementation, precision=None)
    actual, expected = step(layer, make_x(device)), step(plain, make_x(device))
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert 0.001 < (actual[name] - tensor).norm() / tensor.norm() < 0.15, name


def test_forms_are_kept_while_weights_stay(launches, device):
    layer, x = make_layer(device), make_x(device)
    first = step(layer, x)
    assert launches == {"quantize": 2, "look": 0}
    assert_same(step(layer, x), first)
    with torch.no_grad():
        assert torch.equal(layer(x), first["out"])
    assert launches == {"quantize": 2, "look": 4}


def test_without_gradients_one_orientation_is_made(launches, device):
    layer, x = make_layer(device), make_x(device)
    with torch.no_grad():
        out = layer(x)
    assert all(kept.forms.turned is None for kept in layer.experts.kept_forms._kept.values())
    assert torch.equal(step(layer, x)["out"], out) and launches == {"quantize": 4, "look": 0}


def swap_data(layer, other):
    for mine, theirs in zip(layer.parameters(), other.parameters(), strict=True):
        mine.data, theirs.data = theirs.data, mine.data


def average(layer, other):
    averaged = AveragedModel(layer)
    averaged.update_parameters(other)
    averaged.update_parameters(layer)
    layer.load_state_dict(averaged.module.state_dict())


def in_inference_mode(layer, other):
    with torch.inference_mode():
        layer.experts.w_up.mul_(0.5)


def reset(layer, other):
    torch.manual_seed(7)
    layer.reset_parameters()


def other_dtype_and_back(layer, other):
    layer.half().float()
    with torch.no_grad():
        layer.experts.w_up.mul_(3.0)


def each(change):
    """Return a change of each parameter, given the other layer's."""

    def change_all(layer, other):
        for mine, theirs in zip(layer.parameters(), other.parameters(), strict=True):
            change(mine, theirs)

    return change_all


without_gradients = torch.no_grad()
CHANGES = {
    "sgd": lambda layer, other: torch.optim.SGD(layer.parameters(), 0.1).step(),
    "adamw": lambda layer, other: torch.optim.AdamW(layer.parameters(), 0.1, fused=True).step(),
    "load": lambda layer, other: layer.load_state_dict(other.state_dict()),
    "load_and_assign": lambda layer, other: layer.load_state_dict(other.state_dict(), assign=True),
    "copy_weights": without_gradients(each(lambda mine, theirs: mine.copy_(theirs))),
    "swap_data": swap_data,
    "swap_data_in_place": each(lambda mine, theirs: mine.data.copy_(theirs.data)),
    "average": average,
    "train_by_hand": each(lambda mine, theirs: mine.data.add_(mine.grad, alpha=-0.01)),
    "write_through_the_state_dict": lambda layer, other: [
        tensor.copy_(other.state_dict()[name]) for name, tensor in layer.state_dict().items()
    ],
    "foreach": without_gradients(lambda layer, other: torch._foreach_mul_(list(layer.parameters()), 1.5)),
    "vector": lambda layer, other: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(other.parameters()).detach(), layer.parameters()
    ),
    "replace_parameters": lambda layer, other: setattr(
        layer.experts, "w_up", nn.Parameter(layer.experts.w_up.data * 2)
    ),
    "one_expert": lambda layer, other: layer.experts.w_down.data[1].zero_(),
    "one_row": lambda layer, other: layer.experts.w_down.data[:, 3].zero_(),
    "one_element": lambda layer, other: layer.experts.w_up.data[0, 5, 7].add_(3.0),
    "raw_storage": lambda layer, other: layer.experts.w_up.untyped_storage().copy_(
        other.experts.w_up.untyped_storage()
    ),
    "set_storage": without_gradients(lambda layer, other: layer.experts.w_up.set_(other.experts.w_up.detach().clone())),
    "through_an_alias": lambda layer, other: layer.experts.w_up.detach().view(-1).mul_(-1.0),
    "in_inference_mode": in_inference_mode,
    "reset": reset,
    "other_dtype_and_back": other_dtype_and_back,
}
OFTEN = {"sgd", "load", "average", "raw_storage", "one_row", "one_element"}


@pytest.mark.parametrize("change", default_tier(CHANGES, OFTEN))
def test_forms_are_those_of_the_weights_after_every_change(change, device):
    """A step equals that of a layer that never kept a form."""
    layer, other, x = make_layer(device), make_layer(device, seed=1), make_x(device)
    before = step(layer, x)
    CHANGES[change](layer, other)
    after = step(layer, x)
    assert not torch.equal(after["out"], before["out"])
    assert_same(after, step(fresh(layer), x))


def test_a_storage_that_returns_is_no_kept_one(device):
    """Other weights get the memory address of the quantised weights and the same version counter."""
    layer, x = make_layer(device), make_x(device)
    step(layer, x)
    address, shape = layer.experts.w_up.data_ptr(), layer.experts.w_up.shape
    layer.experts.w_up.data = torch.empty(0, device=device)
    for _ in range(50):  # the allocator most often gives the block again
        again = torch.full(shape, 0.25, device=device)
        if again.data_ptr() == address:
            break
    layer.experts.w_up.data = again
    assert_same(step(layer, x), step(fresh(layer), x))


def test_weights_swapped_for_one_call(device):
    layer, other, x = make_layer(device), make_layer(device, seed=1), make_x(device)
    expected, expected_other = layer(x), other(x)
    assert torch.equal(torch.func.functional_call(layer, dict(other.named_parameters()), (x,)), expected_other)
    assert torch.equal(layer(x), expected)


def test_a_pending_backward_keeps_its_forms(device):
    """A change of the weights between forward and backward is an error of autograd, as without FP8."""
    layer, x = make_layer(device), make_x(device)
    pending = layer(x)
    layer.load_state_dict(make_layer(device, seed=1).state_dict())
    layer(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pending.sum().backward()


def test_copies_and_state_hold_no_forms(device):
    layer, x = make_layer(device), make_x(device)
    expected = step(layer, x)
    for other in (copy.deepcopy(layer), layers.pickled(layer)):
        assert not other.experts.kept_forms._kept
        assert_same(step(other, x), expected)
    assert layer.state_dict().keys() == make_layer(device, precision=None).state_dict().keys()
    layer.to(device)
    assert not layer.experts.kept_forms._kept


def test_precision_may_change_at_any_time(device):
    layer, x = make_layer(device), make_x(device)
    with_it = step(layer, x)
    layer.experts.precision = None
    assert layer.config.precision is None
    assert_same(step(layer, x), step(make_layer(device, precision=None), x))
    layer.experts.precision = "fp8"
    assert_same(step(layer, x), with_it)
    assert "precision=fp8" in repr(layer)


def test_autocast_quantises_what_it_casts(device, launches):
    layer, x, dtype = make_layer(device), make_x(device), torch.float16
    plain = make_layer(device, dtype=dtype)
    plain.load_state_dict(layer.state_dict())
    with torch.autocast(torch.device(device).type, dtype):
        assert layer(x).dtype == layer(x).dtype == dtype
    assert launches["quantize"] == 2
    choice = {"topk_experts": layer.router(x).topk_experts}
    with torch.autocast(torch.device(device).type, dtype):
        out = layer(x, **choice)
    torch.testing.assert_close(out, plain(x.to(dtype), **choice), rtol=0.02, atol=0.02)


OPTIONS = [{"recompute": "up"}, {"batch_invariant": True}, {"bias": True}]


@pytest.mark.parametrize("options", default_tier(OPTIONS, [{"bias": True}]), ids=str)
def test_options(options, device):
    layer, x = make_layer(device, **options), make_x(device)
    kept = step(layer, x)
    layer.experts.kept_forms.of = lambda *args: None  # the op quantises the weights itself
    assert_same(step(layer, x), kept)


def test_checkpointed(device):
    layer, x = make_layer(device), make_x(device)
    expected = step(layer, x)
    assert_same(step(layer, x, partial(checkpoint, layer, use_reentrant=False)), expected)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_compiled(implementation, device):
    layer, x = make_layer(device, implementation), make_x(device)
    expected = step(layer, x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(layer, x, compiled), expected)


def test_saved_bytes_are_those_of_the_layer_without_it(device):
    layer, plain = make_layer(device), make_layer(device, precision=None)
    assert layer.saved_bytes(64) == plain.saved_bytes(64)


@pytest.mark.gpu
def test_graphs_quantise_what_the_weights_are_at_each_replay():
    layer, x = make_layer("cuda", dtype=torch.bfloat16), make_x("cuda", torch.bfloat16, 64)
    parameters = [x, *layer.parameters()]

    def run():
        out = layer(x)
        return out.detach(), *torch.autograd.grad(out.float().square().sum(), parameters)

    assert_never_waits(run)
    replay, results = captured(run)
    for factor in (1.0, -0.5, 1.5):
        with torch.no_grad():
            layer.experts.w_up.mul_(factor)
        layer.experts.w_down.data.mul_(factor)
        replay()
        expected = run()
        assert all(map(torch.equal, results, expected))


def test_bad_input(device):
    with pytest.raises(ValueError, match="MoEFeedForward: precision must be one of"):
        MoEFeedForward(*SIZES, precision="int8")
    with pytest.raises(ValueError, match=r"MoEFeedForward: precision='fp8' needs multiples of 16, got .* d_ff=8"):
        MoEFeedForward(48, 8, 3, 2, precision="fp8")
    with pytest.raises(ValueError, match="needs multiples of 16, got d_model=24 and d_ff=16"):
        MoEConfig(48, 16, 3, 2, latent_dim=24, precision="fp8")
    layer, x = make_layer(device), make_x(device)
    layer.add_lora(LoRA(2, 4))
    with pytest.raises(NotImplementedError, match="precision='fp8' takes no adapters; merge them"):
        layer(x)
    layer.merge_lora()
    layer(x)
    quantize_experts_(layer, "fp8")
    with pytest.raises(ValueError, match="quantises weights that are trained, got stored fp8"):
        layer(x)
