"""The layers that `benchmarks.expert_parallel` compares: all layers of a configuration share the same parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from moe_layers import ExpertParallel, MoEFeedForward
from moe_layers.parallel.collectives import Ranks

from ..common.shapes import Shape
from .grouped_mm import TorchAllToAll, held

# Simplest first: among forms of about equal speed, the first is called the best.
FORMS = {
    "": {},
    "/2 chunks": {"chunks": 2},
    "/2 chunks, 16 SMs reserved": {"chunks": 2, "reserved_sms": 16},
    "/2 chunks, 32 SMs reserved": {"chunks": 2, "reserved_sms": 32},
    "/4 chunks, 16 SMs reserved": {"chunks": 4, "reserved_sms": 16},
}
STYLES = {
    f"{dispatcher}{form}": ExpertParallel(dispatcher, average_gradients=False, **options)
    for form, options in FORMS.items()
    for dispatcher in ("allgather", "alltoall")
}
STYLES |= {
    f"overlapped{form}": ExpertParallel("overlapped", average_gradients=False, **options)
    for form, options in {
        "/1 chunk, 2 SMs reserved": {"chunks": 1, "reserved_sms": 2},
        "/2 chunks, 2 SMs reserved": {"chunks": 2, "reserved_sms": 2},
        "/2 chunks, 4 SMs reserved": {"chunks": 2, "reserved_sms": 4},
    }.items()
}
BASELINE = "torch_grouped_mm"
IMPLEMENTATIONS = (*STYLES, BASELINE)


def make_layer(shape: Shape, mesh: DeviceMesh, dtype: torch.dtype) -> MoEFeedForward:
    """Return a layer with the same router on all ranks, but different experts on each. Then a row sent to a wrong rank
    changes the results. No rank holds all experts at any time."""
    sizes = shape.d_model, shape.d_ff, shape.num_experts, shape.top_k
    implementation = "triton" if mesh.device_type == "cuda" else "reference"
    layer = MoEFeedForward(*sizes, device="meta", dtype=dtype, implementation=implementation)
    parallelize_module(layer, mesh, ExpertParallel(), src_data_rank=None)
    layer.to_empty(device=mesh.device_type)
    for module, seed in ((layer.router, 0), (layer.experts, 1 + mesh.get_local_rank())):
        torch.manual_seed(seed)
        for parameter in module.parameters():
            nn.init.normal_(held(parameter).data, std=0.02)
    return layer


def with_style(layer: MoEFeedForward, style: ExpertParallel, mesh: DeviceMesh) -> MoEFeedForward:
    """Return a layer with the same parameters that communicates in this style."""
    other = MoEFeedForward(layer.d_model, 1, layer.num_experts, layer.router.top_k, device="meta")
    parallelize_module(other, mesh, style, src_data_rank=None)
    experts = copy.copy(layer.experts)
    experts.reserved_sms = other.experts.reserved_sms
    other.router, other.experts = layer.router, experts
    return other


def make_implementation(name: str, layer: MoEFeedForward, mesh: DeviceMesh) -> nn.Module:
    if name == BASELINE:
        return TorchAllToAll(layer, Ranks.of(mesh.get_group()))
    return with_style(layer, STYLES[name], mesh)


def local_layer(layer: MoEFeedForward) -> MoEFeedForward:
    """Return a layer on one rank with only the local experts, sharing their parameters."""
    experts = {name: held(parameter.detach()) for name, parameter in layer.experts.named_parameters()}
    num_local, d_model, d_ff = experts["w_down"].shape
    top_k, implementation = min(layer.router.top_k, num_local), layer.experts.implementation
    local = MoEFeedForward(d_model, d_ff, num_local, top_k, device="meta", implementation=implementation)
    local.router.weight = nn.Parameter(layer.router.weight.detach()[:num_local])
    for name, weight in experts.items():
        setattr(local.experts, name, nn.Parameter(weight))
    return local


def results(module: nn.Module, tokens: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """Return the output and the gradients of tokens and parameters as new tensors; no parameter keeps a gradient."""
    leaf = tokens.detach().requires_grad_()
    out = module(leaf)
    return out.detach(), *torch.autograd.grad(out, [leaf, *module.parameters()], dout)


def passes(module: nn.Module, tokens: Tensor, dout: Tensor) -> dict[str, Callable[[], object]]:
    """Return a function for each pass. A forward saves tensors for backward as in training."""
    leaf = tokens.detach().requires_grad_()
    return {"forward": lambda: module(leaf), "forward+backward": lambda: results(module, tokens, dout)}
