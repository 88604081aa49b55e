"""Auxiliary losses and bias updates of transformers models have the contract of this package's layers."""

import pytest
import torch

from moe_layers import (
    BalanceLosses,
    LayerRouting,
    aux_losses,
    carry_expert_counts,
    reset_expert_counts,
    set_aux_loss_scale,
    update_selection_bias,
)
from moe_layers.balance import losses
from moe_layers.integrations.transformers import balance_routing
from moe_layers.integrations.transformers.routers.attached import hooked_routers

from ..tiers import default_tier
from .models import build, draw_tokens
from .test_statistics import MODELS, enabled, padded, router_outputs

LOSSES = BalanceLosses(switch=0.3, sequence=0.2, global_batch=0.4, importance=0.1, z=0.05)


def losses_by_hand(model, mask, run, losses):
    """Return the total loss of all layers, from the tensors that the routers return while `run()` runs."""
    total = 0.0
    lengths = mask.shape[1]
    is_token = mask.flatten().bool()
    for logits, weights, chosen in router_outputs(model, run):
        chosen = torch.where(is_token[:, None], chosen, -1).int()
        counts = torch.stack([(chosen == e).sum() for e in range(logits.shape[1])]).int()
        routing = LayerRouting(chosen, weights, logits, counts, token_mask=is_token, sequence_lengths=lengths)
        total = total + losses.total(routing)
    return total


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def main_loss(model, tokens, mask):
    return model(input_ids=tokens, attention_mask=mask, use_cache=False).logits.float().square().mean()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")  # the only API in 5.7
@pytest.mark.parametrize("recompute", [None, False, True], ids=["plain", "checkpointed", "reentrant"])
@pytest.mark.parametrize("model_type", default_tier(MODELS, ["qwen3_moe", "deepseek_v3"]))
def test_gradients_are_those_of_the_losses_added_by_hand(model_type, recompute, device):
    """A recomputed layer has the mask of padding of its own forward, although other forwards ran in between."""
    model = enabled(model_type, device, dtype=torch.float64).train()
    tokens, mask = padded(model)
    results = []
    added = losses_by_hand(model, mask, lambda: results.append(main_loss(model, tokens, mask)), LOSSES)
    model.zero_grad()
    (results[0] + added).backward()
    expected = gradients(model)
    model.zero_grad()
    if recompute is not None:
        model.gradient_checkpointing_enable({"use_reentrant": recompute})
        model.enable_input_require_grads()
    balance_routing(model, LOSSES)
    loss = main_loss(model, tokens, mask)
    main_loss(model, tokens.flip(1), None)
    main_loss(model, tokens.flip(0), mask.flip(0))
    loss.backward()
    torch.testing.assert_close(gradients(model), expected, rtol=1e-9, atol=1e-11)
    # The last forward had the sequences in another order. DeepSeek-V3's router computes in float32.
    kept, few_ulps = sum(aux_losses(model).values()), 8 * torch.finfo(added.dtype).eps
    torch.testing.assert_close(kept, added.detach(), rtol=max(few_ulps, 1e-9), atol=0)


def test_losses_need_no_labels_and_scale(device):
    """The scale multiplies the gradients, not the values. Without gradients there is no loss."""
    model = enabled("qwen3_moe", device)
    tokens, mask = padded(model)
    balance_routing(model, BalanceLosses(z=0.1))
    with torch.no_grad():
        main_loss(model, tokens, mask)
    with pytest.raises(ValueError, match="aux_losses: a layer must have balance_losses and a forward"):
        aux_losses(model)
    steps = []
    for scale in (None, torch.tensor(3.0, device=device), torch.tensor(0.0, device=device)):
        set_aux_loss_scale(model, scale)
        model.zero_grad()
        main_loss(model, tokens, mask).backward()
        steps.append((gradients(model), aux_losses(model)))
    assert steps[0][1].keys() == {"model.layers.0.mlp", "model.layers.1.mlp"}
    name = "model.layers.1.mlp.gate.weight"
    one, three, none = (step[0][name] for step in steps)
    torch.testing.assert_close(three - none, 3 * (one - none), rtol=1e-3, atol=1e-6)
    assert (one - none).abs().max() > 1e-4
    balance_routing(model)  # no losses
    model.zero_grad()
    main_loss(model, tokens, mask).backward()
    assert torch.equal(gradients(model)[name], none)


def test_float16_autocast_without_a_scale_warns(monkeypatch, device):
    monkeypatch.setattr(losses, "_warn_once", losses._warn_once.__wrapped__)
    model = enabled("qwen3_moe", device).train()
    balance_routing(model, BalanceLosses(z=0.1))
    tokens = draw_tokens(model)
    with torch.autocast(tokens.device.type, torch.float16):
        with pytest.warns(RuntimeWarning, match="balance_routing: auxiliary losses under float16 autocast without"):
            model(input_ids=tokens)
        set_aux_loss_scale(model, torch.ones((), device=device))
        model(input_ids=tokens)


@pytest.mark.parametrize("by", ["num_tokens", "scale"])
def test_accumulated_calls_equal_one_call(by, device):
    """Unequal calls use `num_tokens`, equal calls use the scale."""
    model = enabled("qwen3_moe", device, dtype=torch.float64).train()
    tokens = draw_tokens(model, batch=4)
    losses = BalanceLosses(sequence=0.3, z=0.2) if by == "num_tokens" else BalanceLosses(z=0.2)
    parts = tokens.split([1, 3] if by == "num_tokens" else [2, 2])
    balance_routing(model, losses)
    main = model(input_ids=tokens).logits.square()
    main.sum().backward()
    expected = gradients(model)
    model.zero_grad()
    if by == "num_tokens":
        balance_routing(model, losses, num_tokens=tokens.numel())
    else:
        set_aux_loss_scale(model, torch.tensor(0.5, dtype=torch.float64, device=device))
    for part in parts:
        model(input_ids=part).logits.square().sum().backward()
    torch.testing.assert_close(gradients(model), expected, rtol=1e-9, atol=1e-10)


def test_a_global_batch_holds_the_counts_of_earlier_calls(device):
    model = enabled("qwen3_moe", device, dtype=torch.float64).train()
    first, second = draw_tokens(model, batch=4).split(2)
    balance_routing(model, BalanceLosses(global_batch=1.0))
    model(input_ids=first)
    carry_expert_counts(model)
    model(input_ids=second)
    kept = aux_losses(model)
    routed = [router_outputs(model, lambda part=part: model(input_ids=part)) for part in (first, second)]
    for layer, loss in enumerate(kept.values()):
        ids = torch.cat([outputs[layer][2].flatten() for outputs in routed])
        counts = torch.bincount(ids, minlength=routed[1][layer][0].shape[1])
        probabilities = routed[1][layer][0].softmax(-1).mean(0)
        expected = len(counts) * (counts.double() / counts.sum() * probabilities).sum()
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    reset_expert_counts(model)
    model(input_ids=second, attention_mask=torch.ones_like(second))
    assert all((loss - kept[name]).abs() > 1e-5 for name, loss in aux_losses(model).items())


@pytest.mark.parametrize("first", [0, 9], ids=["whole", "continued"])
def test_packed_sequences_are_balanced_one_by_one(first, device):
    """`position_ids` tell where sequences begin. The first may continue a sequence of another forward."""
    model = enabled("qwen3_moe", device, dtype=torch.float64)
    tokens = draw_tokens(model, batch=1)
    positions = torch.cat([torch.arange(first, first + 5), torch.arange(7)])[None].to(device)
    (logits, weights, chosen), *_ = router_outputs(model, lambda: model(input_ids=tokens, position_ids=positions))
    counts = torch.bincount(chosen.flatten(), minlength=logits.shape[1]).int()
    lengths = torch.tensor([5, 7], device=device)
    routing = LayerRouting(chosen.int(), weights, logits, counts, sequence_lengths=lengths)
    losses = BalanceLosses(sequence=1.0)
    expected = losses.total(routing)
    assert (expected - losses.total(routing._replace(sequence_lengths=12))).abs() > 1e-4
    balance_routing(model, losses)
    model(input_ids=tokens, position_ids=positions)
    torch.testing.assert_close(aux_losses(model)["model.layers.0.mlp"], expected.detach(), rtol=1e-9, atol=0)


class TestOneBalancingLoss:
    MATCH = "balance_routing: the model must have one balancing loss, got BalanceLosses and output_router_logits=True"

    def test_of_the_configuration(self):
        model = build("mixtral", output_router_logits=True)
        with pytest.raises(ValueError, match=self.MATCH):
            balance_routing(model, BalanceLosses(switch=0.1))
        balance_routing(model)  # counts alone

    def test_of_a_call(self, device):
        model = enabled("qwen3_moe", device)
        balance_routing(model, BalanceLosses(switch=0.1))
        tokens = draw_tokens(model)
        with pytest.raises(ValueError, match=self.MATCH):
            model(input_ids=tokens, labels=tokens, output_router_logits=True)
        model.router_aux_loss_coef = 0.0
        model(input_ids=tokens, labels=tokens, output_router_logits=True).loss.backward()
        with torch.no_grad():
            model(input_ids=tokens, output_router_logits=True)


class TestSelectionBias:
    @pytest.mark.parametrize("model_type", default_tier(["deepseek_v3", "glm4_moe", "nemotron_h"], ["deepseek_v3"]))
    def test_moves_towards_the_mean_load(self, model_type, device):
        model = enabled(model_type, device).train()
        tokens, mask = padded(model)
        balance_routing(model)
        (router,) = hooked_routers(model).values()
        before = router.selection_bias.clone()
        (_, _, chosen), *_ = router_outputs(model, lambda: model(input_ids=tokens, attention_mask=mask))
        counts = torch.bincount(chosen[mask.flatten().bool()].flatten(), minlength=len(before))
        with torch.no_grad():
            model.eval()(input_ids=tokens)  # does not count
        assert router.expert_counts.tolist() == counts.tolist()
        update_selection_bias(model, rate=0.25)
        direction = (counts.double().mean() - counts).sign().to(before.dtype)
        torch.testing.assert_close(router.selection_bias, before + 0.25 * direction, rtol=0, atol=1e-6)
        stored = next(tensor for name, tensor in model.state_dict().items() if name.endswith("e_score_correction_bias"))
        assert torch.equal(stored.view(-1), router.selection_bias) and not router.expert_counts.any()

    def test_bad_calls(self, device):
        model = enabled("deepseek_v3", device)
        uncounted = r"update_selection_bias: forwards of model.layers.1.mlp.gate must be counted"
        with pytest.raises(ValueError, match=uncounted):
            update_selection_bias(model)
        balance_routing(model)
        hooked_routers(model)["model.layers.1.mlp"].router.bfloat16()
        with pytest.raises(ValueError, match=r"bias must be a float32 or float64 tensor .* got torch.bfloat16"):
            update_selection_bias(model)
        with pytest.raises(ValueError, match="update_selection_bias: needs a router with a selection bias"):
            update_selection_bias(enabled("qwen3_moe", device))


def test_bad_arguments():
    model = build("qwen3_moe")
    with pytest.raises(ValueError, match="balance_routing: the model must have MoE blocks of transformers, got Linear"):
        balance_routing(torch.nn.Linear(2, 2), BalanceLosses(z=1.0))
    with pytest.raises(ValueError, match="balance_routing: losses must be a BalanceLosses, got float"):
        balance_routing(model, 0.1)
    with pytest.raises(ValueError, match="balance_routing: num_tokens must not be negative"):
        balance_routing(model, num_tokens=-1)
