"""Layers, tokens and comparisons shared by the tests of expert parallelism."""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from moe_layers import ExpertParallel, clip_grad_norm_

from ..layers import moe_layer

D_MODEL, D_FF, NUM_EXPERTS, TOP_K = 16, 8, 8, 3

# Numbers of tokens per rank; the first ones are used. In the second case, the last rank of two has no tokens.
LENGTHS = {
    "even": [12] * 8,
    "none_in_one": [19, 0, 7, 7, 3, 0, 5, 1],
    "one_each_but_the_first": [33, *[1] * 7],
    "none": [0] * 8,
}

STYLES = [
    {"dispatcher": "alltoall"},
    {"dispatcher": "allgather"},
    {"dispatcher": "alltoall", "max_rows_factor": 2.0},
    {"dispatcher": "allgather", "max_rows_factor": 2.0},
    {"dispatcher": "alltoall", "chunks": 3},
    {"dispatcher": "allgather", "chunks": 2},
    {"dispatcher": "alltoall", "chunks": 2, "max_rows_factor": 2.0},
    {"dispatcher": "allgather", "chunks": 2, "max_rows_factor": 2.0},
]


def styles():
    """Return styles whose limits no rank can exceed."""
    bound = {"max_rows_factor": float(distributed.get_world_size())}
    return [style | (bound if "max_rows_factor" in style else {}) for style in STYLES]


OVERLAPPED = {"dispatcher": "overlapped", "chunks": 2, "reserved_sms": 4}
KERNELS = {"implementation": "triton", "dtype": torch.float32}  # on a CPU, in the interpreter


def layer_options(style):
    """Return layer options for which a style keeps its dispatcher: without kernels, "overlapped" uses another one."""
    return KERNELS if style["dispatcher"] == "overlapped" else {}


def float_dtype(device):
    """Return the dtype that the reference computes in on a CPU, or the kernels on a GPU."""
    return torch.float32 if device.type == "cuda" else torch.float64


def implementation_of(device):
    return "triton" if device.type == "cuda" else "reference"


def make_layer(device, seed=0, **options):
    """Return a layer that is equal on every rank."""
    torch.manual_seed(seed)
    sizes = {"d_model": D_MODEL, "d_ff": D_FF, "num_experts": NUM_EXPERTS, "top_k": TOP_K}
    kind = {"init_std": 0.3, "dtype": float_dtype(device), "implementation": implementation_of(device)}
    layer = moe_layer(**{**sizes, **kind, **options})
    for name, parameter in layer.named_parameters():
        if "b_" in name or "bias" in name:
            nn.init.normal_(parameter, std=0.3)
    return layer.to(device)


def expert_mesh(device, size=None):
    """Return a mesh in which groups of `size` neighbouring ranks, or all ranks, share the experts."""
    num_processes = distributed.get_world_size()
    size = size or num_processes
    return init_device_mesh(device.type, (num_processes // size, size), mesh_dim_names=("efsdp", "ep"))


def shard_experts(layer, mesh, dispatcher="auto", **options):
    return parallelize_module(layer, mesh["ep"], ExpertParallel(dispatcher, **options))


def sharded_layer(device, style, **options):
    """Return a layer whose experts all ranks share, with the options that the style needs."""
    return shard_experts(make_layer(device, **layer_options(style), **options), expert_mesh(device), **style)


def lengths_of(name):
    return LENGTHS[name][: distributed.get_world_size()]


def draw(device, num_tokens, seed=1, width=D_MODEL):
    """Return tokens that are equal on every rank and device."""
    values = torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(device, float_dtype(device))


def own(tensor, lengths):
    """Return this rank's part of a tensor with one row per token."""
    return tensor.split(lengths)[distributed.get_rank()]


def summed(tensor):
    """Return the sum over all ranks."""
    total = tensor.detach().clone()
    distributed.all_reduce(total)
    return total


def full(tensor):
    """Return the whole of a sharded tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_close(actual, expected, msg=None):
    """Compare up to the order of sums, relative to the largest value of the whole tensor."""
    assert actual.shape == expected.shape
    scale = expected.abs().max().item() if expected.numel() else 0.0
    tolerance = {torch.float64: 1e-13, torch.float32: 2e-5}[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * max(scale, 1e-3), msg=msg)


def assert_all_close(actual, expected):
    """Compare tensors, which may be sharded, in turn."""
    for a, b in zip(actual, expected, strict=True):
        assert_close(full(a), full(b))


def assert_gradients(many, one):
    assert_all_close(*([parameter.grad for parameter in module.parameters()] for module in (many, one)))


def summed_gradients(module):
    """Return the gradients of a sharded layer, summed over the ranks where the dispatcher has not summed them."""
    gradients = [parameter.grad for parameter in module.parameters()]
    return [full(gradient) if isinstance(gradient, DTensor) else summed(gradient) for gradient in gradients]


def assert_close_numbers(actual, expected, rtol, atol, msg=None):
    """Compare number by number. On GPUs, where kernels add in other orders, compare as `assert_close` does."""
    if actual.is_cuda:
        return assert_close(actual, expected, msg)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, msg=msg)


TOKENS = 8  # per rank


class Model(nn.Module):
    def __init__(self, device, **options):
        super().__init__()
        torch.manual_seed(5)
        self.project = nn.Linear(D_MODEL, D_MODEL).to(device, options.get("dtype", float_dtype(device)))
        self.layers = nn.ModuleList([nn.ModuleDict({"moe": make_layer(device, seed, **options)}) for seed in range(2)])

    def forward(self, x):
        x = self.project(x)
        for layer in self.layers:
            x = x + layer["moe"](x)
        return x


def sharded(device, experts_over, style=None, **options):
    """Return the model with experts sharded over this many ranks, and FSDP2 over all."""
    model, mesh = Model(device, **options), expert_mesh(device, experts_over)
    parallelize_module(model, mesh["ep"], {"layers.*.moe": ExpertParallel(**(style or {}))})
    return shard_by_fsdp(model, mesh["efsdp"])


def mesh_of_all_ranks(device):
    return init_device_mesh(device.type, (distributed.get_world_size(),))


def shard_by_fsdp(model, mesh_of_experts, mesh=None):
    """Apply FSDP2 to the experts of each layer over one mesh, and to the rest over another, by default over all."""
    mesh = mesh or mesh_of_all_ranks(model.project.weight.device)
    for layer in model.layers:
        fully_shard(layer["moe"].experts, mesh=mesh_of_experts)
        fully_shard(layer["moe"], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def draw_adapters(module):
    """Give the factors `b` of adapters, which are zero at first, values that are equal on every rank."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in module.named_parameters():
        if name.endswith("_b"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def train_step(model, optimizer, x, target, clip=clip_grad_norm_):
    """Return (norm of the gradients before clipping, gradients after clipping by name)."""
    optimizer.zero_grad()
    x, target = (tensor.to(model.project.weight.dtype) for tensor in (x, target))
    (model(x) - target).square().mean().backward()
    norm = clip(model.parameters(), max_norm=0.05)
    gradients = {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return norm, gradients


def data(device, step):
    """Return the tokens of all ranks, and their targets."""
    num_tokens = TOKENS * distributed.get_world_size()
    return draw(device, num_tokens, seed=step), draw(device, num_tokens, seed=100 + step)


def own_data(device, step):
    """Return this rank's part of the data."""
    return (own(tensor, [TOKENS] * distributed.get_world_size()) for tensor in data(device, step))


def recorded(make_recorder, layer, x):
    """Run forward and backward, each inside a context manager of its own. Return both context managers."""
    forward, backward = make_recorder(), make_recorder()
    with forward:
        y = layer(x)
    with backward:
        y.sum().backward()
    return forward, backward


class CollectiveCounter(TorchDispatchMode):
    """Records names and dtypes of the collectives that run inside the context."""

    def __init__(self):
        super().__init__()
        self.names, self.dtypes = [], []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "_c10d_functional" and "wait" not in op.name():
            self.names.append(op.name().removeprefix("_c10d_functional::"))
            self.dtypes.append(args[0].dtype)
        return op(*args, **(kwargs or {}))
