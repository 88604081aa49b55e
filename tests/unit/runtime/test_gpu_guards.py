"""Properties visible only on a GPU: memory, repeatability, streams and threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moe_kernels import GroupedGemmArguments, WgradArguments, get_kernels
from moe_kernels.gemm.tile_table import make_tile_table
from moe_kernels.testing import make_logits

from ...layers import moe_layer

pytestmark = pytest.mark.gpu
SIZES = {"d_model": 512, "d_ff": 768, "num_experts": 16, "top_k": 4}


def make_layer(seed=0, **sizes):
    torch.manual_seed(seed)
    return moe_layer(**{**SIZES, **sizes}, init_std=0.05, device="cuda", dtype=torch.bfloat16)


def make_x(layer, num_tokens, routing="random", seed=0):
    """Return tokens whose choice of experts follows a pattern."""
    w_router = layer.router.weight.detach().float()
    generator = torch.Generator("cuda").manual_seed(seed)
    tokens = torch.randn(num_tokens, w_router.shape[1], device="cuda", generator=generator)
    wanted = 8 * make_logits(num_tokens, len(w_router), routing, "cuda", generator)
    tokens += torch.linalg.lstsq(w_router, (wanted - tokens @ w_router.t()).t()).solution.t()
    return tokens.bfloat16().requires_grad_()


def step(layer, x):
    """Return the output and every gradient."""
    y = layer(x)
    return y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])


@pytest.mark.parametrize("d_ff", [128, 1024])
def test_backward_transients(d_ff):
    """Beyond saved tensors and weight gradients, backward needs at most max(8 R F, 6 R F + 2 R D) bytes + 5 percent."""
    layer = make_layer(d_ff=d_ff)
    x = make_x(layer, 16384)
    dout = torch.randn_like(x)
    layer(x).backward(dout)  # compiles, and allocates the parameters' gradients
    torch.use_deterministic_algorithms(False)
    for tensor in (x, *layer.parameters()):
        tensor.grad = None
    y = layer(x)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y.backward(dout)
    gradients = sum(parameter.grad.nbytes for parameter in layer.parameters())
    transients = torch.cuda.max_memory_allocated() - before - gradients
    num_rows, d_model = 16384 * SIZES["top_k"], SIZES["d_model"]
    assert transients <= 1.05 * max(8 * num_rows * d_ff, 6 * num_rows * d_ff + 2 * num_rows * d_model)


def test_two_streams_at_once():
    layers = [make_layer(seed) for seed in range(2)]
    xs = [make_x(layer, 2000, "zipf", seed) for seed, layer in enumerate(layers)]
    expected = [step(layer, x) for layer, x in zip(layers, xs, strict=True)]
    streams = [torch.cuda.Stream() for _ in layers]
    torch.cuda.synchronize()
    for _ in range(10):
        results = []
        for stream, layer, x in zip(streams, layers, xs, strict=True):
            with torch.cuda.stream(stream):
                results.append(step(layer, x))
        torch.cuda.synchronize()
        for result, e in zip(results, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(result, e, strict=True))


@pytest.mark.parametrize("name", ["grouped_gemm_ws", "wgrad_ws", "grouped_gemm_tma", "grouped_gemm_pointer"])
def test_first_launch_of_a_thread(name):
    """A thread that has not used the GPU has no context. Encoding a descriptor used to fail there."""
    kernels = get_kernels(metadata_filter=lambda m: m.kernel_name.startswith(name) and not m.design.gather)
    kernel = next(k for k in kernels if k.metadata.operands.A.dtype == torch.bfloat16 and k.metadata.epilogue is None)
    if kernel.obstacle:
        pytest.skip(kernel.obstacle)
    a = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(2, 64, 64, device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor([30, 64], device="cuda", dtype=torch.int32)
    if kernel.arguments_class is GroupedGemmArguments:
        b = b.mT if kernel.metadata.operands.B.layout == "column" else b
        args = GroupedGemmArguments(a, b, torch.empty_like(a), tile_table=make_tile_table(offsets, 64, 128))
    else:
        args = WgradArguments(a, a, torch.empty_like(b), tile_table=make_tile_table(offsets, 64, 128))
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(kernel.run, args).result()
    torch.cuda.synchronize()
    assert args.out.isfinite().all()


def test_backward_from_other_threads():
    """Threads, including autograd's, start without an allocator for TMA descriptors."""
    layer = make_layer(d_ff=256)
    x = make_x(layer, 500)
    expected = step(layer, x)
    assert threading.current_thread() is threading.main_thread()
    with ThreadPoolExecutor(2) as pool:
        for result in [pool.submit(step, layer, x) for _ in range(6)]:
            assert all(torch.equal(a, b) for a, b in zip(result.result(), expected, strict=True))


def test_the_callers_allocator_is_left_alone():
    import triton
    from triton.runtime import _allocation

    def mine(size, alignment, stream):
        raise AssertionError("a kernel of this package used the caller's allocator")

    triton.set_allocator(mine)
    layer = make_layer(d_ff=256)
    step(layer, make_x(layer, 500))
    assert _allocation._allocator.get() is mine


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_layer_on_another_gpu_than_the_current_one():
    layer = make_layer()
    x = make_x(layer, 500)
    expected = step(layer, x)
    other = layer.to("cuda:1")
    result = step(other, x.detach().to("cuda:1").requires_grad_())
    assert torch.cuda.current_device() == 0
    for a, b in zip(result, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu())
