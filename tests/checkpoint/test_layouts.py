import itertools

import pytest
import torch

from moe_layers.checkpoint.files.layouts import LAYOUTS, Sizes, find_layout

SIZES = Sizes(num_experts=3, d_ff=5, d_model=7)


def parameters(gated):
    generator = torch.Generator().manual_seed(0)
    rows = 10 if gated else 5
    shapes = {"w_up": (3, rows, 7), "w_down": (3, 7, 5), "b_up": (3, rows), "b_down": (3, 7)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def to_disk(layout, state, bias):
    disk = {}
    for key, e in itertools.product(layout.select(bias=bias), range(3)):
        name = key.name.replace("{e}", str(e))
        tensor = disk.setdefault(name, torch.full(key.shape(SIZES), torch.nan))
        rows = key.rows_of_expert(e, SIZES)
        matrix = tensor if rows is None else tensor[rows] if key.flat else tensor[e]
        key.disk_parts(matrix).copy_(key.parameter_parts(state[key.parameter][e], layout.gated))
    return disk


def test_every_family_by_its_formula():
    state = parameters(gated=True)
    gate, up = state["w_up"].split(5, dim=1)
    down = state["w_down"]
    alternating = torch.stack([gate, up], dim=2).flatten(1, 2)  # g0 u0 g1 u1 ...
    expected = {
        "per_expert": {
            **{f"experts.{e}.gate_proj.weight": gate[e] for e in range(3)},
            **{f"experts.{e}.up_proj.weight": up[e] for e in range(3)},
            **{f"experts.{e}.down_proj.weight": down[e] for e in range(3)},
        },
        "per_expert_w123": {
            **{f"experts.{e}.w1.weight": gate[e] for e in range(3)},
            **{f"experts.{e}.w3.weight": up[e] for e in range(3)},
            **{f"experts.{e}.w2.weight": down[e] for e in range(3)},
        },
        "fused": {"experts.gate_up_proj": torch.cat([gate, up], 1), "experts.down_proj": down},
        "transposed": {"experts.gate_up_proj": torch.cat([gate, up], 1).mT, "experts.down_proj": down.mT},
        "transposed_fc": {"experts.fc1.weight": torch.cat([gate, up], 1).mT, "experts.fc2.weight": down.mT},
        "interleaved": {"experts.gate_up_proj": alternating.mT, "experts.down_proj": down.mT},
        "linear": {"input_linear.weight": torch.cat([gate, up], 1), "output_linear.weight": down},
        "flat": {
            "experts.mlp.w1": gate.reshape(15, 7),
            "experts.mlp.v1": up.reshape(15, 7),
            "experts.mlp.w2": down.mT.reshape(15, 7),
        },
        "stacked": {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down},
        "stacked_w13": {"experts.w13_weight": alternating, "experts.w2_weight": down},
    }
    for name, tensors in expected.items():
        disk = to_disk(find_layout(name, gated=True, bias=False), state, bias=False)
        assert disk.keys() == tensors.keys()
        assert all(torch.equal(disk[key], tensors[key]) for key in disk), name


def test_plain_experts_by_their_formula():
    state = parameters(gated=False)
    up, down = state["w_up"], state["w_down"]
    disk = to_disk(find_layout("named", gated=False, bias=False), state, bias=False)
    assert torch.equal(disk["experts.expert_2.wi.weight"], up[2])
    assert torch.equal(disk["experts.expert_2.wo.weight"], down[2])
    disk = to_disk(find_layout("per_expert", gated=False, bias=False), state, bias=False)
    assert set(disk) == {f"experts.{e}.{name}_proj.weight" for e in range(3) for name in ("up", "down")}


def test_biases_follow_their_rows():
    state = parameters(gated=True)
    disk = to_disk(find_layout("interleaved", gated=True, bias=True), state, bias=True)
    assert torch.equal(disk["experts.gate_up_proj_bias"][:, ::2], state["b_up"][:, :5])
    assert torch.equal(disk["experts.gate_up_proj_bias"][:, 1::2], state["b_up"][:, 5:])
    assert torch.equal(disk["experts.down_proj_bias"], state["b_down"])


def test_no_two_layouts_share_name_and_gatedness():
    assert len({(layout.name, layout.gated) for layout in LAYOUTS}) == len(LAYOUTS)


@pytest.mark.parametrize(
    ("name", "gated", "bias", "message"),
    [
        ("per-expert", True, False, "layout must be one of .*'fused'.*, got 'per-expert'"),
        ("mxfp4", True, True, "layout must be one of"),
        ("flat", True, True, "'flat' has no tensors for the biases"),
        ("named", True, False, "'named' has no tensors for gated experts"),
        ("interleaved", False, False, "'interleaved' has no tensors for plain experts"),
    ],
)
def test_layouts_that_cannot_be_written(name, gated, bias, message):
    with pytest.raises(ValueError, match=message):
        find_layout(name, gated=gated, bias=bias)
