"""A transformer block with the layer, compiled as a whole: no graph break, and one recompilation for any T."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

from moe_kernels import RouterSpec
from moe_kernels.testing import assert_accurate
from moe_layers import BalanceLosses, CapacityFactor, ExpertChoice, MoEConfig, MoEFeedForward, TokenRounding

from ..tiers import default_tier, slow

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch._inductor.*")  # Inductor's performance advice

ON_GPU = torch.cuda.is_available()
D, HEAD = (256, 64) if ON_GPU else (32, 16)
SIZES = {"d_model": D, "d_ff": 3 * D // 4, "num_experts": 8 if ON_GPU else 4, "top_k": 2}
# Lengths of sequences, two per batch: unordered, on both sides of powers of two and of a tile's height.
LENGTHS = (65, 129, 300, 33, 1000, 64, 128, 513, 7, 2) if ON_GPU else (5, 4, 6, 3, 8, 9, 2, 7, 10, 12)
LOSSES = BalanceLosses(switch=0.01, z=0.001, sequence=0.01, global_batch=0.01, importance=0.01)
FORMS = {
    "everything": {
        "router": RouterSpec.deepseek_v3(2, 1),
        "bias": True,
        "shared_d_ff": D // 2,
        "shared_gate": True,
        "balance_losses": LOSSES,
    },
    "capacity": {"capacity": 4},
}
if ON_GPU:
    FORMS |= {
        "softmax": {},
        "token_rounding": {"assignment": TokenRounding(4)},
        "recompute_up": {"recompute": "up", "router": RouterSpec.softmax(normalize=False)},
        "latent": {"latent_dim": D // 2},
        "zero_experts": {"num_zero_experts": 2},
        "capacity_factor": {"capacity": CapacityFactor(1.0, by="weight")},
        "expert_choice": {"assignment": ExpertChoice(1.0)},
        "batch_invariant": {"batch_invariant": True, "shared_d_ff": D // 2, "shared_gate": True},
    }


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + experts(norm(x)). x is [B, S, D]."""

    def __init__(self, config, *, device, dtype, **moe):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.attention_norm, self.experts_norm = (nn.RMSNorm(D, eps=1e-6, **factory) for _ in range(2))
        self.w_qkv, self.w_out = (nn.Linear(D, n * D, bias=False, **factory) for n in (3, 1))
        self.experts = MoEFeedForward.from_config(config, **moe, **factory)

    def forward(self, x):
        qkv = self.w_qkv(self.attention_norm(x)).unflatten(-1, (3, -1, HEAD))  # [B, S, 3, heads, HEAD]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, heads, S, HEAD]
        x = x + self.w_out(attended.transpose(1, 2).flatten(2))
        return x + self.experts(self.experts_norm(x))


def compiled(block):
    """Compile without graph breaks: with Inductor on a GPU, without code generation on a CPU."""
    return torch.compile(block, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")


def make_block(device, dtype=torch.float32, **options):
    torch.manual_seed(0)
    assignment = options.pop("assignment", None)
    config = MoEConfig(**SIZES, init_std=0.1, **options)
    return TransformerBlock(config, assignment=assignment, implementation="triton", device=device, dtype=dtype)


def make_x(length, device, dtype=torch.float32):
    generator = torch.Generator(device).manual_seed(length)
    return torch.randn(2, length, D, device=device, generator=generator).to(dtype).requires_grad_()


def step(run, x, block):
    """Return the output and every gradient."""
    out = run(x)
    return out.detach(), *torch.autograd.grad(out.float().square().mean(), [x, *block.parameters()])


def test_sizes_may_be_symbols_from_the_start(device):
    """With `dynamic=True`, floats in the settings of the router and the activation become symbols, too."""
    block = make_block(device, **FORMS["everything"])
    run = torch.compile(block, dynamic=True, backend="aot_eager", fullgraph=True)
    for length in LENGTHS[:2]:
        x = make_x(length, device)
        torch.testing.assert_close(step(run, x, block), step(block, x, block), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, *([torch.bfloat16] if ON_GPU else [])], ids=str)
@pytest.mark.parametrize("form", default_tier(FORMS, ["everything"]))
def test_one_recompilation_over_ten_numbers_of_tokens(form, dtype, device):
    """No size is marked as dynamic: the second T shows the compiler that T changes."""
    torch.use_deterministic_algorithms(False)
    block = make_block(device, dtype, **FORMS[form])
    run = compiled(block)
    counters.clear()
    for number, length in enumerate(LENGTHS):
        with torch.compiler.set_stance("default" if number < 2 else "fail_on_recompile"):
            x = make_x(length, device, dtype)
            results = step(run, x, block) if ON_GPU or number in (0, 1, 9) else [run(x)]
        assert results[0].shape == x.shape
        assert all(tensor.isfinite().all() for tensor in results)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@slow  # test_one_recompilation_over_ten_numbers_of_tokens compiles the same block
@pytest.mark.parametrize("form", FORMS if ON_GPU else ["everything"])
def test_results_are_within_the_error_budget(form, device):
    """Compiled for any T, the block is compared with the same block in plain PyTorch."""
    torch.use_deterministic_algorithms(False)
    block = make_block(device, **FORMS[form])
    plain = copy.deepcopy(block)
    for module in plain.modules():
        if hasattr(module, "implementation"):
            module.implementation = "reference"
    run, exact = compiled(block), copy.deepcopy(plain).double()
    for length in LENGTHS[:2]:
        x = make_x(length, device)
        results = step(run, x, block), step(plain, x, plain), step(exact, x.detach().double().requires_grad_(), exact)
        for i, (a, b, e) in enumerate(zip(*results, strict=True)):
            assert_accurate(a, b, e, f"result {i} at length {length}")


def test_a_batch_invariant_shared_expert_is_exported_for_any_number_of_tokens(device):
    config = MoEConfig(**SIZES, shared_d_ff=D // 2, batch_invariant=True)
    layer = MoEFeedForward.from_config(config, implementation="triton", device=device)
    x = make_x(5, device)[:1].detach()
    sizes = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(layer, (make_x(4, device).detach(),), dynamic_shapes=sizes)
    assert torch.equal(program.module()(x), layer(x))
