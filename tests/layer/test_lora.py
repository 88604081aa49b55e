"""Low-rank adapters of a layer: `add_lora`, `set_lora`, `merge_lora`, `unmerge_lora`, `remove_lora`."""

import copy
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from moe_kernels import Activation, RouterSpec, apply_activation, sort_by_expert
from moe_kernels.testing import assert_accurate
from moe_layers import LoRA, MoEFeedForward, save_routing
from moe_layers.experts.grouped import ExpertRows
from moe_layers.experts.lora import dropout as lora_dropout
from moe_layers.experts.lora.adapters import ExpertLoRA

from .. import layers
from ..dtypes import DTYPES
from ..tiers import slow
from .test_saved_bytes import seen_bytes

OPTIONS = {"d_model": 16, "d_ff": 12, "num_experts": 4, "top_k": 2, "init_std": 0.3}
FACTORS = ["up_a", "up_b", "down_a", "down_b"]


def make_layer(device, implementation="reference", dtype=torch.float32, **options):
    torch.manual_seed(0)
    return layers.moe_layer(**{**OPTIONS, **options}, implementation=implementation, device=device, dtype=dtype)


def make_x(device, dtype=torch.float32, num_tokens=9):
    return layers.make_x(device, (num_tokens, 16), dtype=dtype).requires_grad_()


def with_effect(layer, std=0.3):
    """Give every factor values that change the output."""
    for i, factor in enumerate(layer.experts.lora.parameters()):
        torch.manual_seed(i)
        nn.init.normal_(factor, std=std)
    return layer


def adapted(device, *args, lora=None, **options):
    layer = make_layer(device, *args, **options)
    layer.add_lora(lora or LoRA(3, 6), dtype=None)
    return with_effect(layer)


def in_float64(layer):
    exact = copy.deepcopy(layer).double()
    for part in (exact.router, exact.experts):
        part.implementation = "reference"
    return exact


def effective(layer):
    """Return a float64 layer without adapters whose weights are those of the base plus the adapters' products."""
    plain = in_float64(layer)
    for adapter in plain.experts.lora.values():
        if adapter.is_active:
            for weight, a, b in (("w_up", "up_a", "up_b"), ("w_down", "down_a", "down_b")):
                if getattr(adapter, a) is not None:
                    product = getattr(adapter, b).data @ getattr(adapter, a).data
                    getattr(plain.experts, weight).data += adapter.settings.scale * product
    plain.remove_lora()
    return plain


def gradients_by_name(layer):
    return {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


def test_a_new_adapter_changes_no_bit_and_freezes_the_rest(device):
    layer = make_layer(device, "triton", DTYPES[-1], shared_d_ff=8, latent_dim=8)
    x = make_x(device, DTYPES[-1])
    before, out = copy.deepcopy(layer.state_dict()), layer(x)
    layer.add_lora(LoRA(3, 6))
    assert torch.equal(layer(x), out)
    assert [n for n, p in layer.named_parameters() if p.requires_grad] == [f"experts.lora.default.{f}" for f in FACTORS]
    assert {p.dtype for p in layer.experts.lora.parameters()} == {torch.float32}
    optimizer = torch.optim.SGD([p for p in layer.parameters() if p.requires_grad], lr=1.0)
    layer(x).float().square().sum().backward()
    assert set(gradients_by_name(layer)) == {f"experts.lora.default.{factor}" for factor in FACTORS}
    optimizer.step()
    assert not torch.equal(layer(x), out)
    assert all(torch.equal(layer.state_dict()[name], tensor) for name, tensor in before.items())


def test_a_starts_like_a_linear_layer_and_b_from_zero():
    torch.manual_seed(0)
    adapter = ExpertLoRA(LoRA(64, 1), 25, 8, 16, 3)
    for a in (adapter.up_a, adapter.down_a):
        bound = a.shape[2] ** -0.5  # as in nn.Linear.reset_parameters
        assert 0.98 * bound < a.abs().max() <= bound and abs(a.std() - bound / math.sqrt(3)) < 0.02 * bound
    assert not adapter.up_b.any() and not adapter.down_b.any()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True, "activation": Activation("gpt_oss", limit=0.5)},
        {"activation": "relu"},
        {"router": RouterSpec.llama4()},
        {"latent_dim": 8, "shared_d_ff": 8},
        {"capacity": 3},
        {"lora": LoRA(2, 8, targets=("up",))},
        {"lora": LoRA(2, 8, targets=["down"], rslora=True)},
        {"lora": LoRA(5, 2, shared_outer=True)},
    ],
    ids=str,
)
def test_equals_merged_weights_in_float64(options, device):
    layer = adapted(device, dtype=torch.float64, **options)
    x = make_x(device, torch.float64)
    plain = effective(layer)
    results = []
    for module in (layer, plain):
        out = module(x)
        results.append((out, *torch.autograd.grad(out.square().sum(), [x])))
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)
    layer.merge_lora()
    torch.testing.assert_close(layer(x), results[1][0], rtol=1e-11, atol=1e-11)
    assert layer.experts.lora is None and layer.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("options", [{}, {"recompute": "up"}, {"batch_invariant": True}], ids=str)
def test_kernels_keep_the_error_budget(options, device):
    """Two adapters are active, in float32 beside weights of a narrower dtype."""
    dtype = DTYPES[-1]
    results = []
    for implementation, kind in (("triton", dtype), ("reference", dtype), ("reference", torch.float64)):
        layer = make_layer(device, implementation, dtype, **options)
        layer.add_lora(LoRA(3, 6))
        layer.add_lora(LoRA(8, 8, targets=("down",)), "second")
        with_effect(layer)
        layer = layer.double() if kind == torch.float64 else layer
        x = make_x(device, dtype).detach().to(kind).requires_grad_()
        out = layer(x)
        out.float().square().sum().backward()
        results.append({"out": out, "dx": x.grad, **gradients_by_name(layer)})
    assert len(results[0]) == 2 + 6
    for name in results[0]:
        assert_accurate(*(result[name] for result in results), name)


def test_several_adapters(device):
    layer = adapted(device, dtype=torch.float64)
    layer.add_lora(LoRA(1, 3, shared_outer=True), "second", dtype=None)
    layer.add_lora(LoRA(2, 3, shared_outer=True, targets=("up",)), "third", dtype=None)
    with_effect(layer)
    x, outputs = make_x(device, torch.float64), {}
    for names in ((), "default", ["second", "third"], ("default", "second", "third")):
        layer.set_lora(names)
        outputs[str(names)] = layer(x)
        torch.testing.assert_close(outputs[str(names)], effective(layer)(x), rtol=1e-11, atol=1e-11)
    assert len({out.sum().item() for out in outputs.values()}) == 4
    layer.set_lora("second")
    layer(x).sum().backward()
    assert all(".second." in name for name in gradients_by_name(layer))
    layer.remove_lora("default")
    layer.set_lora(["second", "third"])
    assert torch.equal(layer(x), outputs["['second', 'third']"])
    layer.remove_lora()
    assert layer.experts.lora is None and torch.equal(layer(x), outputs["()"])
    with pytest.raises(ValueError, match=r"set_lora: names must be of adapters of the layer, \[\], got \['second'\]"):
        layer.set_lora("second")


def test_merging_rounds_once_and_can_be_undone(device):
    """After two merges, the layer keeps the error budget of the adapted one. One call undoes both merges."""
    dtype = torch.float16
    layer = make_layer(device, dtype=dtype)
    base = copy.deepcopy(layer.state_dict())
    layer.add_lora(LoRA(3, 6))
    layer.add_lora(LoRA(2, 2, targets=("up",)), "second")
    with_effect(layer)
    x = make_x(device, dtype)
    adapted_out, exact, factors = layer(x), effective(layer)(x.double()), copy.deepcopy(layer.experts.lora.state_dict())
    layer.merge_lora("second", keep_base=True)
    assert list(layer.experts.lora) == ["default"]
    layer.merge_lora(keep_base=True)
    assert layer.experts.lora is None and not any("lora" in name for name in layer.state_dict())
    assert_accurate(layer(x), adapted_out, exact, "merged")
    again = copy.deepcopy(layer)
    for module in (layer, again):
        module.unmerge_lora()
        assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in base.items())
        assert all(torch.equal(module.experts.lora.state_dict()[name], tensor) for name, tensor in factors.items())
        module.set_lora(["default", "second"])
    torch.testing.assert_close(layer(x), adapted_out)
    layer.set_lora("default")
    exact = effective(layer)
    layer.merge_lora()
    for name in ("w_up", "w_down"):
        assert torch.equal(getattr(layer.experts, name), getattr(exact.experts, name).to(dtype))
    with pytest.raises(ValueError, match=r"unmerge_lora: adapters must have been merged by .*keep_base=True"):
        layer.unmerge_lora()


def composed(layer, x, routing, masks):
    """Compute the layer slot by slot with dense linear maps and the given masks [R, in] of both projections."""
    experts, adapter = layer.experts, layer.experts.lora["default"]
    top_k, scale = layer.router.top_k, adapter.settings.scale
    chosen, weights = routing.topk_experts.flatten(), routing.topk_weights.flatten()
    total = torch.zeros_like(x)
    for row, slot in enumerate(chosen.argsort(stable=True).tolist()):
        e, token, weight = chosen[slot], slot // top_k, weights[slot]
        value = x[token] * weight if experts.weight_on_input else x[token]
        low = adapter.up_a[e] @ (masks[0][row] * value)
        hidden = experts.w_up[e] @ value + scale * adapter.up_b[e] @ low
        hidden = hidden if experts.b_up is None else hidden + experts.b_up[e]
        value = apply_activation(hidden[None], experts.activation)[0]
        low = adapter.down_a[e] @ (masks[1][row] * value)
        out = experts.w_down[e] @ value + scale * adapter.down_b[e] @ low
        out = out if experts.b_down is None else out + experts.b_down[e]
        total = total.index_add(0, chosen.new_tensor([token]), (out if experts.weight_on_input else weight * out)[None])
    return total


@pytest.mark.parametrize(
    ("implementation", "options"),
    [
        ("triton", {}),
        ("reference", {"bias": True, "activation": "relu"}),
        ("reference", {"router": RouterSpec.llama4()}),
    ],
    ids=["triton", "bias", "weight_on_input"],
)
def test_dropout_equals_a_composition_with_the_same_masks(implementation, options, device, monkeypatch):
    layer = adapted(device, implementation, lora=LoRA(3, 6, dropout=0.4), **options)
    for name, parameter in layer.experts.named_parameters():
        if name.startswith("b_"):
            nn.init.normal_(parameter)
    x, masks = make_x(device), []

    def recorded(rows, probability):
        masks.append(functional.dropout(torch.ones_like(rows), probability))
        return rows * masks[-1]

    torch.manual_seed(7)
    plain = layer(x)
    with monkeypatch.context() as patch:
        patch.setattr(lora_dropout, "functional", SimpleNamespace(dropout=recorded))
        torch.manual_seed(7)
        out, routing = layer(x, return_routing=True)
    assert torch.equal(out, plain) and [mask.shape[1] for mask in masks] == [16, 12]
    assert all(set(mask.unique().tolist()) == {0.0, masks[0].max().item()} for mask in masks)
    exact, exact_x = in_float64(layer), x.detach().double().requires_grad_()
    exact_routing = exact(exact_x, return_routing=True)[1]
    assert torch.equal(exact_routing.topk_experts, routing.topk_experts)
    expected = composed(exact, exact_x, exact_routing, [mask.double() for mask in masks])
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    # Without `return_routing` the router's gradient could be fused, which dropout excludes.
    gradients = torch.autograd.grad(plain.sin().sum(), [x, *layer.experts.lora.parameters()])
    wanted = torch.autograd.grad(expected.sin().sum(), [exact_x, *exact.experts.lora.parameters()])
    for gradient, e in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient.double(), e, rtol=1e-4, atol=1e-4)
    layer.eval()
    assert torch.equal(layer(x), layer(x))  # without dropout, by the fused op
    torch.testing.assert_close(layer(x).double(), effective(layer)(exact_x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("implementation", "dropout"), [pytest.param("triton", 0.0, marks=slow), ("reference", 0.0), ("reference", 0.4)]
)
def test_checkpointed_regions_repeat_masks_and_choices(implementation, dropout, device, monkeypatch):
    layer = adapted(device, implementation, lora=LoRA(3, 6, dropout=dropout))
    x = make_x(device)

    def run(region):
        layer.zero_grad()
        x.grad = None
        torch.manual_seed(3)
        region(lambda x: layer(x).sin(), x).sum().backward()
        return [x.grad, *gradients_by_name(layer).values()]

    for options in ({}, {"context_fn": save_routing}):
        if options:  # `save_routing` runs router and experts one by one
            monkeypatch.setattr("moe_layers.feed_forward.runs_as_one_op", lambda *_: False)
        plain = run(lambda region, x: region(x))
        again = run(partial(checkpoint, use_reentrant=False, **options))
        assert len(again) == 5 and all(map(torch.equal, again, plain))


@pytest.mark.parametrize(("implementation", "dropout"), [("triton", 0.0), pytest.param("reference", 0.4, marks=slow)])
def test_compiles(implementation, dropout, device):
    layer = adapted(device, implementation, lora=LoRA(3, 6, dropout=dropout))
    x, results = make_x(device), []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(3)
        layer.zero_grad()
        out = run(x)
        out.sum().backward()
        results.append([out, *gradients_by_name(layer).values()])
    assert len(results[0]) == 5
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_autocast(dropout, device):
    """Under autocast a float32 layer computes what it does in autocast's dtype; gradients are float32."""
    layer = adapted(device, lora=LoRA(3, 6, dropout=dropout))
    narrow = copy.deepcopy(layer)
    for weight in (narrow.experts.w_up, narrow.experts.w_down):
        weight.data = weight.data.bfloat16()
    x = make_x(device)
    torch.manual_seed(3)
    with torch.autocast(device, torch.bfloat16):
        out, routing = layer(x, return_routing=True)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert {gradient.dtype for gradient in gradients_by_name(layer).values()} == {torch.float32}
    torch.manual_seed(3)
    rows = ExpertRows(x.bfloat16(), routing.topk_weights, sort_by_expert(routing.topk_experts, 4))
    assert torch.equal(narrow.experts(rows), out)


@pytest.mark.parametrize("options", [{}, {"recompute": "up"}], ids=str)
def test_saved_bytes_count_the_adapter(options, device):
    dtype = DTYPES[-1]
    plain, layer = (make_layer(device, "triton", dtype, **options).requires_grad_(False) for _ in range(2))
    layer.add_lora(LoRA(8, 8), dtype=None)  # the scale is 1, so no scaled factor is made
    x = make_x(device, dtype, 40)
    assert layer.saved_bytes(40) == seen_bytes(layer, x)
    assert layer.saved_bytes(40) - plain.saved_bytes(40) == 80 * 8 * dtype.itemsize  # [R, r]


def test_state_dict_copies_and_files(device, tmp_path):
    layer = adapted(device)
    x = make_x(device)
    keys = [key for key in layer.state_dict() if "lora" in key]
    assert keys == [f"experts.lora.default.{factor}" for factor in FACTORS]
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    other = make_layer(device)
    other.add_lora(LoRA(3, 6), dtype=None)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    assert torch.equal(layers.pickled(layer)(x), layer(x))
    layer.save_safetensors(tmp_path / "layer.safetensors")
    other.reset_parameters()
    assert not other.experts.lora["default"].up_b.any() and not torch.equal(other(x), layer(x))
    other.load_safetensors(tmp_path / "layer.safetensors")
    assert torch.equal(other(x), layer(x))
    with pytest.raises(ValueError, match=r"save_checkpoint: merge_lora or remove_lora .* got adapters \['default'\]"):
        layer.save_checkpoint(tmp_path / "checkpoint")
    layer.merge_lora()
    assert "lora" not in repr(layer)
    layer.save_checkpoint(tmp_path / "checkpoint")
    kind = {"implementation": "reference", "device": device}
    assert torch.equal(MoEFeedForward.from_checkpoint(tmp_path / "checkpoint", **kind)(x), layer(x))
    shown = "(default): ExpertLoRA(rank=3, scale=2, targets=('up', 'down'), dropout=0.0, is_active=True)"
    assert shown in repr(other)


def test_a_share_of_the_experts_keeps_its_adapters(device):
    layer = adapted(device, dtype=torch.float64, lora=LoRA(3, 6, shared_outer=True))
    x, parts = make_x(device, torch.float64), []
    for share in (range(0, 1), range(1, 4)):
        part = copy.deepcopy(layer)
        part.keep_local_experts(share)
        parts.append(part(x))
        assert part.experts.lora["default"].up_b.shape[0] == len(share)
    torch.testing.assert_close(sum(parts), layer(x))


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"rank": 0}, "rank must be a positive integer, got 0"),
        ({"rank": True}, "rank must be a positive integer, got True"),
        ({"alpha": 0}, "alpha must be positive and finite, got 0"),
        ({"alpha": math.nan}, "alpha must be positive and finite, got nan"),
        ({"targets": "up"}, "targets must be a sequence of different names of .*, got 'up'"),
        ({"targets": ("up", "gate")}, r"targets must be .*, got \('up', 'gate'\)"),
        ({"targets": ("up", "up")}, "targets must be"),
        ({"targets": ()}, "targets must be"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"dropout": -0.1}, r"dropout must be in \[0, 1\)"),
    ],
)
def test_settings_are_checked(settings, error):
    with pytest.raises(ValueError, match=f"LoRA: {error}"):
        LoRA(**{"rank": 4, "alpha": 8, **settings})


def test_scales():
    assert LoRA(16, 8).scale == 0.5 and LoRA(16, 8, rslora=True).scale == 2.0


def test_a_name_counts_once(device):
    layer, twice = adapted(device), adapted(device)
    layer.merge_lora("default")
    twice.set_lora(["default", "default"])
    twice.merge_lora(["default", "default"])
    assert torch.equal(twice.experts.w_up, layer.experts.w_up) and twice.experts.lora is None
    removed = adapted(device)
    removed.remove_lora(["default", "default"])
    assert removed.experts.lora is None


def test_wrong_calls_are_named(device):
    layer = adapted(device)
    for name in ("default", "", "a.b", "keys", 3):
        with pytest.raises(ValueError, match=r"add_lora: name must be new, without dots, .* got"):
            layer.add_lora(LoRA(1, 1), name)
    with pytest.raises(ValueError, match="add_lora: lora must be a LoRA, got int 8"):
        layer.add_lora(8)
    for op in (layer.set_lora, layer.remove_lora, layer.merge_lora):
        with pytest.raises(ValueError, match=r"names must be of adapters of the layer, \['default'\], got \['other'\]"):
            op(["default", "other"])
    layer.set_lora([])
    with pytest.raises(ValueError, match=r"merge_lora: there must be an adapter to merge, got \['default'\]"):
        layer.merge_lora()
    layer = adapted(device, lora=LoRA(2, 2, dropout=0.5), batch_invariant=True)
    layer.eval()(make_x(device))
    with pytest.raises(ValueError, match="batch_invariant needs adapters without dropout in training"):
        layer.train()(make_x(device))
    layer = adapted(device)
    layer.merge_lora(keep_base=True)
    with pytest.raises(ValueError, match="add_lora: name must be new"):
        layer.add_lora(LoRA(1, 1))  # would collide when the merge is undone
    layer.keep_local_experts(range(2))
    with pytest.raises(ValueError, match=r"w_up must be as it was merged, .*\[4, 24, 16\], got .*\[2, 24, 16\]"):
        layer.unmerge_lora()
