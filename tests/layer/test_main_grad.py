"""Gradients of expert weights that the kernel adds to `main_grad`."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_kernels.runtime import replay
from moe_layers import LoRA, MoEFeedForward
from moe_layers.experts.grouped import ExpertRows

from ..layers import moe_layer
from ..markdown import blocks_of
from ..processes import ROOT

WEIGHTS = ("w_up", "w_down")


def make_layer(device, dtype=torch.float16, **options):
    torch.manual_seed(0)
    options = {"init_std": 0.3, "implementation": "triton", "device": device, "dtype": dtype, **options}
    return moe_layer(16, 16, 4, 2, **options)


def pair(device, **options):
    """Return two equal layers, the second one with `main_grad`."""
    layers = make_layer(device, **options), make_layer(device, **options)
    layers[1].experts.adds_to_main_grad = True
    for weight in weights_of(layers[1]):
        weight.main_grad = torch.zeros(weight.shape, device=device)
    return layers


def weights_of(layer):
    return [getattr(layer.experts, name) for name in WEIGHTS]


def step(layer, seed, run=None):
    weight = layer.router.weight
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 16, generator=generator).to(weight.device, weight.dtype).requires_grad_()
    (layer if run is None else run)(x).sin().sum().backward()
    return x.grad


def test_the_lines_of_the_guide_run(device):
    """The page itself runs these lines on a GPU only, because the reference never adds to `main_grad`."""
    names = {"torch": torch, "device": device, "dtype": torch.float16, "MoEFeedForward": MoEFeedForward}
    blocks = blocks_of(ROOT / "docs" / "guides" / "train.md")
    exec(next(block.text for block in blocks if "adds_to_main_grad" in block.text), names)


def with_routing(layer):
    return lambda x: layer(x, return_routing=True)[0]


FORMS = {
    "one op": ({}, None),
    "parts": ({}, with_routing),
    "bias and weights on the input": ({"bias": True}, None),
    "recompute": ({"recompute": "up"}, with_routing),
    "fp8": ({"precision": "fp8"}, None),
}


@pytest.mark.parametrize("form", FORMS)
def test_main_grad_has_more_bits_than_grad(form, device):
    """Rounded to float16, `main_grad` has the bits of `grad`. All other gradients are equal."""
    options, wrap = FORMS[form]
    plain, ours = pair(device, **options)
    inputs = [step(layer, 1, None if wrap is None else wrap(layer)) for layer in (plain, ours)]
    assert torch.equal(*inputs)
    for name, parameter in plain.named_parameters():
        other = ours.get_parameter(name)
        if name.removeprefix("experts.") in WEIGHTS:
            assert other.grad is None and not torch.equal(other.main_grad, other.main_grad.half().float())
            assert torch.equal(other.main_grad.half(), parameter.grad), name
        else:
            assert torch.equal(other.grad, parameter.grad), name


@pytest.fixture
def replays(poisoned_memory, monkeypatch):
    """Switch replays on, which poisoned memory switches off, and record the second call."""
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(replay, "CALLS_BEFORE_RECORD", 1)
    replay.clear_records()
    yield
    replay.clear_records()


@pytest.mark.parametrize("is_transposed", [False, True])
def test_it_accumulates_in_float32(is_transposed, device, replays):
    """Add the gradients of passes that are launched, recorded and replayed. A sum in float16 would lose them."""
    single, ours = (pair(device)[1] for _ in range(2))
    for layer in (single, ours) if is_transposed else ():
        for name in WEIGHTS:
            weight = getattr(layer.experts, name)
            transposed = nn.Parameter(weight.detach().mT.contiguous().mT)
            transposed.main_grad = weight.main_grad
            setattr(layer.experts, name, transposed)
    sums = [torch.zeros_like(weight, dtype=torch.float64) for weight in weights_of(single)]
    for weight in weights_of(ours):
        weight.main_grad.fill_(4096)
    for seed in range(5):
        step(ours, seed)
        step(single, seed)
        for weight, total in zip(weights_of(single), sums, strict=True):
            total += weight.main_grad
            weight.main_grad.zero_()
    assert "replayed" in replay._all[[each.name for each in replay._all].index("fused_experts_gradients")].states()
    for weight, total in zip(weights_of(ours), sums, strict=True):
        assert total.abs().max() > 0.5
        added = weight.main_grad.double() - 4096
        torch.testing.assert_close(added, total, rtol=0, atol=5 * 2**-12)  # half an ulp of 4096 for each pass


def test_checkpointed_layers_add_once(device):
    """Hooks of saved tensors return parameters without their attributes."""
    plain, ours = pair(device)
    for seed in range(2):
        for layer in (plain, ours):
            step(layer, seed, lambda x, layer=layer: checkpoint(layer, x, use_reentrant=False))
    for actual, expected in zip(weights_of(ours), weights_of(plain), strict=True):
        torch.testing.assert_close(actual.main_grad.half(), expected.grad, rtol=2e-3, atol=2e-3)


def test_frozen_weights_need_none(device):
    layer = make_layer(device)
    layer.experts.adds_to_main_grad = True
    layer.add_lora(LoRA(2, 4))
    assert step(layer, 1).any() and layer.experts.w_up.grad is None
    plain, ours = pair(device)
    ours.experts.w_up.requires_grad_(False)
    step(plain, 1)
    step(ours, 1)
    assert not ours.experts.w_up.main_grad.any()
    assert torch.equal(ours.experts.w_down.main_grad.half(), plain.experts.w_down.grad)


def test_a_backward_for_other_tensors_adds_nothing(device, replays):
    _, ours = pair(device)
    for _ in range(3):  # launched, recorded and replayed
        x = torch.ones(3, 16, device=device, dtype=torch.float16, requires_grad=True)
        torch.autograd.grad(ours(x).sum(), x)
        ours(x).sum().backward(inputs=[x, ours.router.weight])
        assert not any(weight.main_grad.any() for weight in weights_of(ours))
    ours(x).sum().backward(inputs=[ours.experts.w_up])
    assert ours.experts.w_up.main_grad.any() and not ours.experts.w_down.main_grad.any()
    with pytest.raises(ValueError, match=r"torch\.autograd\.grad must not ask for w_up, .* call backward"):
        torch.autograd.grad(ours(x).sum(), ours.experts.w_up)


@pytest.mark.parametrize("zeros", [False, True])
def test_hooks_of_megatron_ignore_what_is_added(zeros, device):
    """Megatron's DistributedDataParallel sets these attributes, adds any other `grad` itself, and needs some `grad`."""
    _, ours = pair(device)
    for weight in weights_of(ours):
        weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, zeros
    step(ours, 1)
    for weight in weights_of(ours):
        assert weight.grad_added_to_main_grad and weight.grad is not None and weight.main_grad.any()
        assert not (zeros and weight.grad.any())


@pytest.mark.parametrize(
    ("main_grad", "got"),
    [
        (None, "got None"),
        (torch.zeros(4, 32, 16, dtype=torch.float16), r"got torch.float16 \[4, 32, 16\] on cpu"),
        (torch.zeros(32, 16), r"got torch.float32 \[32, 16\] on cpu"),
    ],
    ids=["none", "float16", "shape"],
)
def test_main_grad_must_fit_its_weight(main_grad, got, device):
    _, ours = pair(device)
    ours.experts.w_up.main_grad = main_grad
    with pytest.raises(ValueError, match=rf"main_grad of w_up must be float32 \[4, 32, 16\] on \w+.*, {got}; set it"):
        step(ours, 1)


def test_main_grad_must_not_overlap_itself(device):
    _, ours = pair(device)
    ours.experts.w_up.main_grad = torch.zeros(32, 16, device=device).expand(4, 32, 16)
    with pytest.raises(ValueError, match=r"main_grad of w_up must not overlap itself, got strides \(0, 16, 1\)"):
        step(ours, 1)


def test_where_the_kernel_cannot_add_is_refused(device):
    layer = make_layer(device, torch.float32)
    layer.experts.adds_to_main_grad = True
    with (
        torch.autocast(torch.device(device).type, torch.float16),
        pytest.raises(ValueError, match=r"w_up must be a parameter itself.*omit autocast"),
    ):
        step(layer, 1)
    layer.experts.local_share = lambda name, weight: weight * 1
    with pytest.raises(ValueError, match=r"w_up must be a parameter itself.*expert parallelism by DTensors"):
        step(layer, 1)
    layer.experts.local_share = None
    with pytest.raises(NotImplementedError, match="must be off with the overlapped dispatcher"):
        layer.experts(ExpertRows(torch.randn(3, 16, device=device), torch.ones(3, 2, device=device), None, plan=print))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"adds_to_main_grad works without torch\.compile"):
        step(layer, 1, torch.compile(layer, backend="eager", fullgraph=True))
    layer.add_lora(LoRA(2, 4, dropout=0.5))
    with pytest.raises(NotImplementedError, match="must be off with dropout of adapters in training"):
        step(layer, 1)
    layer = make_layer(device, implementation="reference")
    layer.experts.adds_to_main_grad = True
    with pytest.raises(NotImplementedError, match="needs the Triton kernels, got implementation 'reference'"):
        step(layer, 1)
