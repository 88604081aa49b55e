"""Ops that statistics and replay add to a forward of an enabled model: each launches a kernel on a GPU."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch

from moe_layers import RoutingReplay, observe

from ..ops import CountedOps
from .models import draw_tokens
from .test_replay_models import captured
from .test_statistics import enabled, padded

NUM_LAYERS = 2


def ops_of_forward(prepare, device, **inputs):
    """Return the ops of a forward by name. `prepare` takes the model, and may return a context of the forward."""
    model = enabled("qwen3_moe", device)
    context = prepare(model) or nullcontext()
    with torch.no_grad(), context, CountedOps() as ops:
        model(input_ids=draw_tokens(model), use_cache=False, **inputs)
    return ops.counts


def added_ops(prepare, device, **inputs):
    return ops_of_forward(prepare, device, **inputs) - ops_of_forward(lambda model: None, device, **inputs)


def observed(model):
    observe(model)


def replayed(change):
    """Replay the model's own choices, each changed by `change`, from the CPU."""

    def prepare(model):
        record = captured(model, lambda: model(input_ids=draw_tokens(model))).to("cpu")
        choices = {name: [change(choice) for choice in forwards] for name, forwards in record.choices.items()}
        return RoutingReplay(choices).replay(model)

    return prepare


def without_first(choice):
    return torch.cat([torch.full_like(choice[:1], -1), choice[1:]])


def test_statistics_are_one_op_per_layer(device):
    """The op makes two launches: see tests/unit/routing/test_statistics_kernels.py."""
    assert added_ops(observed, device) == {"moe_layers::add_forward": NUM_LAYERS}


def test_all_layers_share_the_mask_of_padding(device):
    _, mask = padded(enabled("qwen3_moe", device))
    added = added_ops(observed, device, attention_mask=mask)
    assert added == {"moe_layers::add_forward": NUM_LAYERS, "aten::_to_copy": 1}


def test_capture_is_one_op_per_layer(device):
    assert added_ops(lambda model: RoutingReplay().capture(model), device) == {"aten::_to_copy": NUM_LAYERS}


@pytest.mark.parametrize(("change", "names"), [(torch.clone, ["gather"]), (without_first, ["gather", "where"])])
def test_replay_gathers_scores(change, names, device):
    """The router's own choice is merged only into a record with gaps."""
    assert added_ops(replayed(change), device) == Counter({f"aten::{name}": NUM_LAYERS for name in names})
