"""Two runs give the same bits, for every kernel of the catalog and every form of the layer with all its gradients."""

import pytest
import torch

from moe_kernels import RouterSpec
from moe_layers import BalanceLosses, CapacityFactor, CustomAssignment, ExpertChoice, TokenRounding

from ..layers import moe_layer
from ..tiers import default_tier
from .gemm.kernel_arguments import KERNELS, supported_arguments
from .gemm.test_batch_invariance import FORMS, SIZES, make_tokens

ON_GPU = torch.cuda.is_available()
NUM_RUNS = 20 if ON_GPU else 2
NUM_TOKENS = 1500 if ON_GPU else 12


def disturb(number, device):
    """Fill memory that the next run may read by mistake: with `number` on a GPU, with NaN on a CPU."""
    if device == "cuda":
        torch.empty(2**26, device=device).fill_(number)
    torch.use_deterministic_algorithms(device == "cpu", warn_only=True)


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_every_kernel_repeats_bitwise(kernel, device):
    args = supported_arguments(kernel, device)
    first = None
    for number in range(NUM_RUNS):
        disturb(number, device)
        for written in args.outputs:
            written.fill_(number)
        kernel.run(args)
        if first is None:
            first = [written.clone() for written in args.outputs]
            assert all(written.isfinite().all() and written.any() for written in first)
        for actual, expected in zip(args.outputs, first, strict=True):
            assert torch.equal(actual, expected), f"run {number}"


def choose_by_sigmoid(logits):
    weights, experts = logits.sigmoid().topk(2)
    return experts.int(), weights


LAYERS = {
    **FORMS,
    "recompute_up": {"recompute": "up"},
    "bias_recompute_up": {"recompute": "up", "bias": True},
    "switch_and_z": {"balance_losses": BalanceLosses(switch=0.1, z=0.1)},
    "all_losses": {"balance_losses": BalanceLosses(switch=0.1, z=0.1, sequence=0.1, global_batch=0.1, importance=0.1)},
    "capacity": {"capacity": 500 if ON_GPU else 4},
    "capacity_by_weight": {"capacity": CapacityFactor(0.75, by="weight")},
    "expert_choice": {"assignment": ExpertChoice(2.0)},
    "token_rounding": {"assignment": TokenRounding(16 if ON_GPU else 4)},
    "custom": {"assignment": CustomAssignment(choose_by_sigmoid)},
    "selection_bias": {"router": RouterSpec.ernie()},
    "softcap": {"router": RouterSpec(logit_softcap=3.0, norm_power=2.0)},
    "batch_invariant": {"batch_invariant": True, "shared_d_ff": 16, "shared_gate": True, "latent_dim": 16},
}
if not ON_GPU:  # the interpreter is slow, and test_batch_invariance.py runs these forms there
    LAYERS = {name: options for name, options in LAYERS.items() if name not in FORMS or name in ("biases", "shared")}


QUICK = {"biases", "shared", "all_losses", "capacity_by_weight"}


# On a GPU the reference uses PyTorch's own kernels, some of which add in any order.
@pytest.mark.parametrize("implementation", ["triton"] if ON_GPU else ["triton", "reference"])
@pytest.mark.parametrize("form", default_tier(LAYERS, QUICK))
def test_every_form_of_the_layer_repeats_bitwise(form, implementation, device):
    """Compare output and every gradient, with routing that gives one expert most of the rows."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    layer = moe_layer(**{**SIZES, **LAYERS[form]}, implementation=implementation, device=device, dtype=dtype).train()
    tokens = make_tokens(NUM_TOKENS, device, dtype, d_model=layer.d_model).view(2, -1, layer.d_model)
    tokens = (tokens + layer.router.weight[0].detach()).requires_grad_()
    first = None
    for number in range(NUM_RUNS if implementation == "triton" else 2):
        disturb(number, device)
        out = layer(tokens)
        result = [out.detach(), *torch.autograd.grad(out.float().square().sum(), [tokens, *layer.parameters()])]
        first = first or result
        for i, (actual, expected) in enumerate(zip(result, first, strict=True)):
            assert torch.equal(actual, expected), f"result {i} of run {number}"
    assert all(tensor.isfinite().all() and tensor.any() for tensor in first)
