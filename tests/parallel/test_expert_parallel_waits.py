"""Number of host synchronisations, counted on tensors without values, where any read of a value raises."""

from unittest import mock

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_layers import ExpertParallel, MoEFeedForward
from moe_layers.routing.result import Slots

from .expert_parallel_cases import D_FF, D_MODEL, NUM_EXPERTS, STYLES, TOP_K, CollectiveCounter

TOKENS = 12


@pytest.fixture
def mesh():
    """Return a mesh of two ranks, of which only one exists."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))["ep"]
    distributed.destroy_process_group()


def even_counts(tensor, num_chunks):
    """Replace `Tensor.tolist`. A vector holds the rows of each chunk. A matrix has a column per rank, and rows of bytes
    per token, gradients (all but those of shared factors), and each chunk's rows to and from that rank."""
    rows = TOKENS * TOP_K // num_chunks
    if tensor.dim() == 1:
        return [rows] * len(tensor)
    return [[4 * D_MODEL] * 2, [7] * 2, *[[rows // 2] * 2] * (2 * num_chunks)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels' ops take tensors without values in the interpreter")
@pytest.mark.parametrize("style", STYLES, ids=str)
def test_the_host_reads_once_or_never(style, mesh):
    """With a limit on the rows the host never synchronises. Otherwise it does once, in forward. With allgather this
    happens while all tokens are in flight, with alltoall before, because it sends the counted rows."""
    layer = MoEFeedForward(D_MODEL, D_FF, NUM_EXPERTS, TOP_K, device="meta", implementation="triton")
    parallelize_module(layer, mesh, ExpertParallel(**style), src_data_rank=None)
    tokens = torch.empty(TOKENS, D_MODEL, device="meta", requires_grad=True)
    weights = torch.empty(TOKENS, TOP_K, device="meta", requires_grad=True)
    choices, logits = torch.empty_like(weights, dtype=torch.int32), weights.new_empty(TOKENS, NUM_EXPERTS)
    sent, under_way, num_chunks = CollectiveCounter(), [], style.get("chunks", 1)

    def tolist(tensor):
        under_way.append(len(sent.names))
        return even_counts(tensor, num_chunks)

    # The device type of tensors without values has no autocast.
    with (
        mock.patch.object(torch.Tensor, "tolist", tolist),
        mock.patch.object(torch, "is_autocast_enabled", lambda _: False),
    ):
        with sent:
            out = layer.dispatcher.run(tokens, Slots(choices, weights, logits), layer.experts).wait()
        in_forward = under_way.copy()
        out.sum().backward()
    assert under_way == in_forward
    if "max_rows_factor" in style:
        assert in_forward == []
    elif style["dispatcher"] == "alltoall":
        assert in_forward == [1]  # after the counts
    else:
        assert in_forward == [1 + 3 * num_chunks]  # after the counts, and each chunk's choices, weights and tokens
    assert tokens.grad.shape == tokens.shape and weights.grad.shape == weights.shape
