"""Layers, tokens and comparisons that the tests of expert parallelism share."""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from moe_layers import ExpertParallel, MoEFeedForward

D_MODEL, D_FF, NUM_EXPERTS, TOP_K = 16, 8, 8, 3

# Tokens of the processes, of which the first ones are used. The last process of two has none in the second.
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
    """With bounds that no process can pass."""
    bound = {"max_rows_factor": float(distributed.get_world_size())}
    return [style | (bound if "max_rows_factor" in style else {}) for style in STYLES]


OVERLAPPED = {"dispatcher": "overlapped", "chunks": 2, "reserved_sms": 4}
KERNELS = {"implementation": "triton", "dtype": torch.float32}  # on a CPU in the interpreter


def layer_options(style):
    """Of a layer in which this dispatcher is not another one: where kernels do not run, the overlapped one is."""
    return KERNELS if style["dispatcher"] == "overlapped" else {}


def float_dtype(device):
    """What the reference computes on a CPU, and the kernels on a GPU."""
    return torch.float32 if device.type == "cuda" else torch.float64


def implementation_of(device):
    return "triton" if device.type == "cuda" else "reference"


def make_layer(device, seed=0, **options):
    """The same in every process."""
    torch.manual_seed(seed)
    sizes = {"d_model": D_MODEL, "d_ff": D_FF, "num_experts": NUM_EXPERTS, "top_k": TOP_K}
    kind = {"init_std": 0.3, "dtype": float_dtype(device), "implementation": implementation_of(device)}
    layer = MoEFeedForward(**{**sizes, **kind, **options})
    for name, parameter in layer.named_parameters():
        if "b_" in name or "bias" in name:
            nn.init.normal_(parameter, std=0.3)
    return layer.to(device)


def expert_mesh(device, size=None):
    """The last `size` processes of each neighbourhood, or all, hold the experts between them."""
    num_processes = distributed.get_world_size()
    size = size or num_processes
    return init_device_mesh(device.type, (num_processes // size, size), mesh_dim_names=("efsdp", "ep"))


def shard_experts(layer, mesh, dispatcher="auto", **options):
    return parallelize_module(layer, mesh["ep"], ExpertParallel(dispatcher, **options))


def lengths_of(name):
    return LENGTHS[name][: distributed.get_world_size()]


def draw(device, num_tokens, seed=1, width=D_MODEL):
    """The same in every process and on every device."""
    values = torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(device, float_dtype(device))


def own(tensor, lengths):
    """This process's part of what has a row for each token."""
    return tensor.split(lengths)[distributed.get_rank()]


def summed(tensor):
    """The sum over all processes."""
    total = tensor.detach().clone()
    distributed.all_reduce(total)
    return total


def full(tensor):
    """The whole of a sharded tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_close(actual, expected):
    """Equal but for the order of sums: by the scale of the whole tensor, in which each element has its errors."""
    assert actual.shape == expected.shape
    scale = expected.abs().max().item() if expected.numel() else 0.0
    tolerance = {torch.float64: 1e-13, torch.float32: 2e-5}[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * max(scale, 1e-3))


TOKENS = 8  # of each process


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
    """The model with experts over so many processes, and FSDP2 over all."""
    model, mesh = Model(device, **options), expert_mesh(device, experts_over)
    everywhere = init_device_mesh(device.type, (distributed.get_world_size(),))
    parallelize_module(model, mesh["ep"], {"layers.*.moe": ExpertParallel(**(style or {}))})
    for layer in model.layers:
        fully_shard(layer["moe"].experts, mesh=mesh["efsdp"])
        fully_shard(layer["moe"], mesh=everywhere)
    return fully_shard(model, mesh=everywhere)


def data(device, step):
    """Tokens of all processes, and what to make of them."""
    num_tokens = TOKENS * distributed.get_world_size()
    return draw(device, num_tokens, seed=step), draw(device, num_tokens, seed=100 + step)


def own_data(device, step):
    """This process's part of them."""
    return (own(tensor, [TOKENS] * distributed.get_world_size()) for tensor in data(device, step))


class CollectiveCounter(TorchDispatchMode):
    """Names and dtypes of the collectives that run inside."""

    def __init__(self):
        super().__init__()
        self.names, self.dtypes = [], []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "_c10d_functional" and "wait" not in op.name():
            self.names.append(op.name().removeprefix("_c10d_functional::"))
            self.dtypes.append(args[0].dtype)
        return op(*args, **(kwargs or {}))
