"""Compare each registered op with its fake: tracers must see the shapes, strides, dtypes and devices of the results.

Code of Inductor, the default backend of torch.compile, raises where a result has other strides than its fake.
"""

from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from moe_kernels import (
    Activation,
    ExpertAdapters,
    RouterSpec,
    apply_activation,
    batched_gemm,
    combine,
    fused_experts,
    grouped_gemm,
    grouped_gemm_list,
    grouped_gemm_wgrad,
    jagged_gemm,
    permute,
    sort_by_expert,
    topk_routing,
)
from moe_kernels.gemm.batch_invariance import invariant_linear
from moe_kernels.quantization.ops import dequantize, pack_rows, quantize_rows, unpack_rows
from moe_kernels.quantization.quantize import quantize
from moe_layers import BalanceLosses, CapacityFactor, RoutingReplay, observe
from moe_layers.routing.activation_checkpointing import kept_choice

from ...layers import moe_layer
from ...tiers import default_tier

OURS = ("moe_kernels::", "moe_layers::")
OPS = sorted(filter(lambda name: name.startswith(OURS), torch._C._dispatch_get_all_op_names()))

E, D, F, K = 3, 32, 16, 2
EXPERTS = {
    "plain": {},
    "frozen experts": {"frozen": True},
    "biases": {"b_up": (E, 2 * F), "b_down": (E, D), "activation": Activation("gpt_oss", interleaved=True)},
    "weight on input": {"weight_on_input": True},
    "recompute": {"recompute": "up"},
    "by token": {"batch_invariant": True},
    "adapters": {"adapters": ((E, 4, D), (E, 2 * F, 4), (E, 4, F), (E, D, 4))},
    "shared adapters": {"adapters": ((1, 4, D), (E, 2 * F, 4), (E, 4, F), (1, D, 4)), "frozen": True},
    "adapters of w_down": {"adapters": (None, None, (E, 4, F), (E, D, 4)), "weight_on_input": True},
    "fp8": {"precision": "fp8"},
    "fp8 recompute": {"precision": "fp8", "recompute": "up", "weight_on_input": True},
    "fp8 saved": {"precision": "fp8_saved", "activation": Activation("relu")},
    "quantised": {"format": "fp8"},
    "nested": {"format": "nf4_nested", "b_down": (E, D)},
}
LAYOUTS = {
    "rows": lambda t: t,
    "columns": lambda t: t.mT.contiguous().mT,
    "slices": lambda t: torch.stack([t, t], -1)[..., 0],
    "repeated": lambda t: t[:1].expand(t.shape),
}
LAYERS = {
    "softmax": {},
    "all of softmax": {"router": RouterSpec.softmax(normalize=False), "batch_invariant": True},
    "scored": {"router": RouterSpec.deepseek_v3(1, 1), "balance_losses": BalanceLosses(switch=0.1, global_batch=0.1)},
    "capacity": {"capacity": CapacityFactor(0.5), "num_zero_experts": 1},
}


def leaf(layout, device, *shape, dtype=torch.float32):
    return LAYOUTS[layout](torch.randn(*shape, device=device, dtype=dtype)).requires_grad_()


def run_experts(form, implementation, device, layout="rows", num_tokens=5, d_ff=F):
    options, draw = dict(EXPERTS[form]), partial(leaf, layout, device)
    weights = draw(E, d_ff * (1 if form == "fp8 saved" else 2), D), draw(E, D, d_ff)
    if options.pop("frozen", False):
        weights = [weight.detach() for weight in weights]
    if stored := options.pop("format", None):
        weights = [quantize(weight.contiguous(), stored) for weight in weights]
    options |= {name: draw(*options[name]) for name in ("b_up", "b_down") if name in options}
    if factors := options.get("adapters"):
        options["adapters"] = ExpertAdapters(*(shape and draw(*shape) for shape in factors))
    experts = torch.randint(-1, E, (num_tokens, K), device=device, dtype=torch.int32)
    permutation = sort_by_expert(experts, E, max_rows=num_tokens + 1, implementation=implementation)
    tokens, topk_weights = draw(num_tokens, D), draw(num_tokens, K)
    out = fused_experts(tokens, topk_weights, permutation, *weights, **options, implementation=implementation)
    out.backward(draw(num_tokens, D))


def run_layer(form, implementation, device):
    layer = moe_layer(D, F, E, 1, **LAYERS[form], implementation=implementation, device=device)
    x, replay = leaf("rows", device, 2, 5, D), RoutingReplay()
    observe(layer)
    with replay.capture(layer):
        layer(x).sum().backward()
    with replay.replay(layer):
        layer(x).sum().backward()
    kept_choice(torch.zeros(2, 1, dtype=torch.int32, device=device))


def run_products(layout, implementation, device):
    draw, options = partial(leaf, layout, device), {"implementation": implementation}
    a, b, bias, scale = draw(9, D), draw(E, D, 2 * F), draw(E, 2 * F), torch.rand(9, device=device).requires_grad_()
    offsets = torch.tensor([2, 2, 7], dtype=torch.int32, device=device)
    outs = [
        grouped_gemm(a, b, offsets, **options),
        grouped_gemm(a, b, offsets, bias=bias, row_scale=scale, activation="swiglu", **options),
        grouped_gemm(a, b, offsets, bias=bias.detach(), row_scale=scale.detach(), **options),
        grouped_gemm_wgrad(a, draw(9, F), offsets, **options),
        batched_gemm(a, b, **options),
        batched_gemm(draw(E, 5, D), b, **options),
        *grouped_gemm_list([a, b[0].T], [b[0], a.T], **options),
        jagged_gemm(a, b[0], torch.tensor([1, 4, 8], device=device), **options),
        invariant_linear(a, b[0].T, **options),
        apply_activation(a, **options),
        topk_routing(a, 2, **options).topk_weights,
        topk_routing(a, 2, RouterSpec.softmax(scale=2.0), **options).topk_weights,
        topk_routing(a, 2, RouterSpec.llama4(), **options).topk_weights,
    ]
    sum(out.sum() for out in outs).backward()
    with torch.no_grad():
        grouped_gemm(a, b, offsets, activation="swiglu", out=a.new_empty(9, F), **options)
        grouped_gemm(a, b, offsets, out_dtype=torch.float32, **options)
        grouped_gemm_wgrad(a, a, offsets, out=a.new_empty(E, D, D), **options)


def run_rows(layout, implementation, device):
    draw, options = partial(leaf, layout, device), {"implementation": implementation}
    experts = torch.randint(-1, E, (5, K), device=device, dtype=torch.int32)
    for max_rows in (None, 4):
        permutation = sort_by_expert(experts, E, max_rows=max_rows, **options)
        rows = permute(draw(5, D), permutation, **options)
        combine(rows, draw(5, K), permutation.slot_to_row, **options).backward(draw(5, D))
    quantize_rows(draw(5, 144), **options)
    unpack_rows(pack_rows(draw(5, D).detach(), **options), D, **options)
    for format in ("fp8", "mxfp4", "nf4_nested", "int8"):
        dequantize(quantize(torch.randn(E, F, D, device=device), format), torch.float32, **options)


PROGRAMS = {
    **{name: partial(run_experts, name) for name in EXPERTS},
    **{
        f"{name} of {layout}": partial(run_experts, name, layout=layout)
        for layout in list(LAYOUTS)[1:]
        for name in ("plain", "biases", "adapters", "fp8")
    },
    "no token": partial(run_experts, "plain", num_tokens=0),
    "one token": partial(run_experts, "plain", num_tokens=1),
    "padded rows": partial(run_experts, "plain", d_ff=140),
    **{f"layer, {name}": partial(run_layer, name) for name in LAYERS},
    **{f"products of {layout}": partial(run_products, layout) for layout in LAYOUTS},
    **{f"rows of {layout}": partial(run_rows, layout) for layout in LAYOUTS},
}
# Together these call every op.
FEW = ["biases", "adapters", "fp8 saved", "layer, scored", "layer, capacity", "products of rows", "rows of rows"]


def form_of(tensor):
    """Return what a tracer knows of a tensor. Axes without a second element have no stride."""
    strides = [stride if size > 1 else None for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]
    return tensor.shape, strides if tensor.numel() else None, tensor.dtype, tensor.device, tensor.storage_offset()


@pytest.fixture
def called(monkeypatch):
    """Call each op on fake tensors before the real ones, and compare the results. Return the names of such ops."""
    call, names = OpOverload.__call__, set()

    def compare(op, /, *args, **options):
        if not op.name().startswith(OURS) or any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(args)):
            return call(op, *args, **options)
        mode = FakeTensorMode()
        fakes = tree_map_only(Tensor, lambda tensor: mode.from_tensor(tensor.detach()), args)
        with mode:
            promised = call(op, *fakes)
        results = call(op, *args)
        forms, promised = ([form_of(t) for t in tree_leaves(all) if t is not None] for all in (results, promised))
        assert forms == promised, op.name()
        names.add(op.name())
        return results

    monkeypatch.setattr(OpOverload, "__call__", compare)
    for name in ("is_compiling", "is_dynamo_compiling"):  # so that references run as their ops, and all are dispatched
        monkeypatch.setattr(torch.compiler, name, lambda: True)
    return names


def test_every_op_is_as_its_fake(called, device):
    for name, implementation in product(FEW, ("triton", "reference")):
        PROGRAMS[name](implementation, device)
    assert sorted(called) == OPS


@pytest.mark.parametrize("implementation", default_tier(["triton", "reference"], ["reference"]))
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_form_is_as_its_fake(name, implementation, called, device):
    PROGRAMS[name](implementation, device)
