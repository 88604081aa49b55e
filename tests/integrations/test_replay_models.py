"""`RoutingReplay` on transformers models: captured choices, and choices imported from rollouts."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from moe_layers import BalanceLosses, RoutingReplay, observe
from moe_layers.integrations.transformers import balance_routing

from ..tiers import default_tier, slow
from .models import assert_same_bits, build, draw_tokens, skip_old, step
from .test_models import INTERFACE, REPLACED
from .test_statistics import MODELS, REFUSED, enabled, padded, router_outputs

NAMES = ["model.layers.0.mlp", "model.layers.1.mlp"]


def captured(model, run):
    record = RoutingReplay()
    with record.capture(model), torch.no_grad():
        run()
    return record


def random_choices(model, num_tokens, seed=3):
    generator = torch.Generator().manual_seed(seed)
    own = captured(model, lambda: model(input_ids=draw_tokens(model)))
    num_experts = {name: observer.router.num_experts for name, observer in observe(model).items()}
    choices = {}
    for name, (choice,) in own.choices.items():
        order = torch.rand(num_tokens, num_experts[name], generator=generator).argsort(1)
        choices[name] = [order[:, : choice.shape[1]].int()]
    return RoutingReplay(choices)


@pytest.mark.parametrize("model_type", default_tier([*INTERFACE, *REPLACED], MODELS))
def test_replaying_its_own_choices_is_bitwise_the_same_step(model_type, device):
    """Observing and capturing change nothing, either. Every choice of every block is counted."""
    skip_old(model_type)
    model = enabled(model_type, device).train()
    tokens = draw_tokens(model)
    expected = step(model, tokens)
    if model_type in REFUSED:
        for hook in (observe, lambda model: captured(model, lambda: model(input_ids=tokens))):
            with pytest.raises(ValueError, match=r"moe_layers: the router of .* must return its choice, got"):
                hook(model)
        return
    observers = observe(model)
    record = captured(model, lambda: model(input_ids=tokens))
    for name, observer in observers.items():
        statistics = observer.read()
        assert statistics.num_tokens == tokens.numel()
        assert statistics.tokens_per_expert.sum() == record.choices[name][0].numel() > 0
    with record.replay(model):
        assert_same_bits(step(model, tokens), expected)
    other = random_choices(model, tokens.numel())
    with other.replay(model):
        assert not torch.equal(step(model, tokens)[0], expected[0])
    assert_same_bits(step(model, tokens), expected)


# All other architectures that transformers runs with the sizes of `config_fields`.
OTHERS = """
    minimax qwen3_next qwen3_5_moe_text qwen3_vl_moe_text qwen3_omni_moe_text mellum jamba hunyuan_v1_moe
    granitemoeshared granitemoehybrid granitemoe_swa aria_text deepseek_v2 deepseek_v32 kimi_linear glm4_moe_lite
    glm_moe_dsa solar_open exaone_moe bailing_hybrid mimo_v2_flash minimax_m2 lfm2_moe afmoe hy_v3 laguna flint
    cohere2_moe ernie4_5_moe
"""


@slow
@pytest.mark.parametrize("model_type", OTHERS.split())
def test_every_router_is_seen_and_replayed(model_type, device):
    """The router's statistics hold its choice, its selection bias is found, and its choice replays bit for bit."""
    model = enabled(model_type, device).train()
    tokens = draw_tokens(model)

    def run():
        model.zero_grad()
        torch.manual_seed(0)
        result = model(input_ids=tokens, use_cache=False)
        out = result.logits if "logits" in result else result.last_hidden_state
        out.float().square().mean().backward()
        return out.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    observers = observe(model)
    record = captured(model, lambda: model(input_ids=tokens, use_cache=False))
    expected = run()
    with record.replay(model):
        assert_same_bits(run(), expected)
    statistics = [observer.read() for observer in observers.values()]
    assert all(layer.smallest_margin >= 0 and layer.num_tokens == 3 * tokens.numel() for layer in statistics)
    state = [*model.named_parameters(), *model.named_buffers()]
    has_bias = any(name.endswith(("e_score_correction_bias", "expert_bias")) for name, _ in state)
    assert all((observer.router.selection_bias is not None) == has_bias for observer in observers.values())


def weights_by_hand(model_type, logits, chosen, router):
    """Return the weights of any experts by the formula of the model."""
    if model_type == "gpt_oss":
        return logits.gather(1, chosen).softmax(1)
    scores = logits.sigmoid() if model_type == "deepseek_v3" else logits.softmax(-1)
    weights = scores.gather(1, chosen)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(1, keepdim=True)
    return weights * getattr(router, "routed_scaling_factor", 1.0)


@pytest.mark.parametrize("model_type", MODELS)
def test_replayed_experts_are_weighed_by_the_models_own_scores(model_type, device):
    """The gradients of the weights agree, too."""
    model = enabled(model_type, device, dtype=torch.float64)
    tokens = draw_tokens(model)
    record = random_choices(model, tokens.numel())
    with record.replay(model):
        outputs = router_outputs(model, lambda: model(input_ids=tokens))
    for (name, (choice,)), (logits, weights, chosen) in zip(record.choices.items(), outputs, strict=True):
        assert torch.equal(chosen.cpu().int(), choice)
        block = model.get_submodule(name)
        router = getattr(block, "gate", None) or block.router
        expected = weights_by_hand(model_type, logits, chosen, router).to(weights.dtype)
        torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-7)  # the models' softmax is float32
        dweights = torch.randn_like(weights)
        actual, wanted = (torch.autograd.grad(w, logits, dweights, retain_graph=True)[0] for w in (weights, expected))
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")  # the only API in 5.7
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_repeats_the_choices_of_its_forward(use_reentrant, device):
    """Two replayed forwards and one without are in flight, and backward runs outside of the contexts."""
    model = enabled("qwen3_moe", device).train()
    tokens = [draw_tokens(model, seed=seed) for seed in range(3)]
    records = [random_choices(model, tokens[0].numel(), seed) for seed in (3, 4)]

    def run(order):
        model.zero_grad()
        losses = []
        for part, record in zip(tokens, records, strict=False):
            with record.replay(model):
                losses.append(model(input_ids=part, use_cache=False).logits.square().mean())
        losses.append(model(input_ids=tokens[2], use_cache=False).logits.square().mean())
        if order is None:
            sum(losses).backward()
        else:
            for index in order:
                losses[index].backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    orders = (None, (0, 1, 2), (2, 0, 1))
    expected = [run(order) for order in orders]
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    for order, gradients in zip(orders, expected, strict=True):
        assert_same_bits(run(order), gradients)


def test_generated_choices_replay_on_the_whole_sequence(device):
    """The choices of prefill and decoding, joined along the sequence, are those of one forward."""
    model = enabled("qwen3_moe", device)
    tokens, mask = padded(model)
    record = RoutingReplay()
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with record.capture(model):
        sampled = model.generate(tokens, attention_mask=mask, **options)
    layers = [
        torch.cat([part.view(len(tokens), -1, part.shape[1]) for part in record.choices[name]], 1) for name in NAMES
    ]
    has_choice = functional.pad(mask, (0, 4), value=1).bool()
    first, second = (array[keep] for array, keep in zip(torch.stack(layers, 2), has_choice, strict=True))
    mask = functional.pad(mask, (0, 5), value=1)
    rollouts = [first, second.cpu().numpy()]  # a tensor on the model's device, and an array
    imported = RoutingReplay.from_rollouts(model, rollouts, attention_mask=mask)
    own = captured(model, lambda: model(input_ids=sampled, attention_mask=mask)).to("cpu")
    for name in NAMES:
        (choice,), (expected,) = imported.choices[name], own.choices[name]
        known = choice[:, 0] >= 0
        assert known.sum() == mask.sum() - len(tokens)  # all but the last token of each sequence
        assert torch.equal(choice[known], expected[known])


@pytest.mark.parametrize("side", ["left", "right"])
def test_rollouts_fill_a_padded_batch(side, device):
    """Tokens without a recorded choice keep the model's own."""
    model = enabled("qwen3_moe", device)
    tokens = draw_tokens(model, length=8)
    lengths, generator = [5, 8], np.random.default_rng(0)
    columns = torch.arange(8)
    mask = torch.stack([columns >= 8 - n if side == "left" else columns < n for n in lengths]).to(device)
    rollouts = [
        np.stack([[generator.permutation(8)[:3] for _ in range(2)] for _ in range(n - 1)]).astype(np.uint8)
        for n in lengths
    ]
    record = RoutingReplay.from_rollouts(model, rollouts, attention_mask=mask)
    own = router_outputs(model, lambda: model(input_ids=tokens, attention_mask=mask))
    with record.replay(model):
        replayed = router_outputs(model, lambda: model(input_ids=tokens, attention_mask=mask))
    for layer, (_, _, chosen) in enumerate(replayed):
        chosen = chosen.view(2, 8, 3).cpu()
        for sequence, (array, n) in enumerate(zip(rollouts, lengths, strict=True)):
            start = 8 - n if side == "left" else 0
            assert chosen[sequence, start : start + n - 1].tolist() == array[:, layer].tolist()
    kept = record.choices[NAMES[0]][0][:, 0] < 0
    assert kept.sum() == 16 - sum(lengths) + 2
    assert torch.equal(replayed[0][2].cpu()[kept], own[0][2].cpu()[kept])  # the first layer sees the same tokens


def test_rollouts_of_packed_sequences(device):
    model = enabled("qwen3_moe", device)
    arrays = [torch.rand(n, 2, 8).argsort(2)[..., :3].int() for n in (4, 6)]
    record = RoutingReplay.from_rollouts(model, arrays)
    assert all(torch.equal(record.choices[name][0], torch.cat(arrays)[:, i]) for i, name in enumerate(NAMES))
    record = RoutingReplay.from_rollouts(model, arrays, lengths=[5, 7])
    assert [choice.shape for (choice,) in record.choices.values()] == [(12, 3)] * 2
    assert (record.choices[NAMES[0]][0][[4, 11]] == -1).all()
    tokens = draw_tokens(model, batch=1)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None].to(device)
    with record.replay(model):
        outputs = router_outputs(model, lambda: model(input_ids=tokens, position_ids=positions))
    assert torch.equal(outputs[1][2][:4].cpu().int(), arrays[0][:, 1])
    assert torch.equal(outputs[1][2][5:11].cpu().int(), arrays[1][:, 1])


def test_rollouts_of_all_layers_skip_the_dense_ones():
    model = enabled("deepseek_v3", "cpu")
    assert model.config.num_hidden_layers == 2
    array = torch.rand(4, 2, 10).argsort(2)[..., :3]
    array[:, 0] = 0  # what engines leave there
    record = RoutingReplay.from_rollouts(model, [array])
    assert torch.equal(record.choices["model.layers.1.mlp"][0], array[:, 1].int())


def test_losses_and_statistics_see_the_replayed_choice(device):
    model = enabled("qwen3_moe", device)
    tokens = draw_tokens(model)
    record = random_choices(model, tokens.numel())
    observers = observe(model)
    balance_routing(model, BalanceLosses(switch=0.1))
    with record.replay(model):
        model(input_ids=tokens)
    for name, observer in observers.items():
        statistics = observer.read()
        assert statistics.tokens_per_expert.tolist() == record.choices[name][0].flatten().bincount(minlength=8).tolist()
        assert statistics.smallest_margin < 0


def refused(message):
    return pytest.raises(ValueError, match=message)


class TestRefused:
    def model(self):
        return enabled("qwen3_moe", "cpu")  # 8 experts, 3 per token, 2 layers

    def array(self, layers=2, top_k=3):
        return torch.rand(6, layers, 8).argsort(2)[..., :top_k].int()

    def test_rollouts_of_other_shapes_and_lengths(self):
        model, array, form = self.model(), self.array(), r"a rollout must be integers \[sequence, layer, top-k\], got"
        mask = torch.tensor([[0, 1, 1, 1, 1]])
        both = {"lengths": [6], "attention_mask": torch.ones(1, 6)}
        for rollouts, options, message in (
            ([torch.zeros(4, 2, 3)], {}, rf"{form} \[4, 2, 3\] torch.float32 in rollout 0"),
            ([torch.zeros(4, 2).int()], {}, rf"{form} \[4, 2\] torch.int32 in rollout 0"),
            ([], {}, "rollouts must hold a sequence, got none"),
            ([array, self.array(top_k=2)], {}, r"must have \[2, 3\] layers and experts, got \[2, 2\] in rollout 1"),
            ([self.array(layers=3)], {}, "must have the model's 2 layers with experts or 2 layers, got 3"),
            ([self.array(top_k=2)], {}, "model.layers.0.mlp must have 3 experts per token, got 2"),
            ([array], {"lengths": [5]}, "rollout 0 must have at most the 5 tokens of its sequence, got 6"),
            ([array], {"attention_mask": mask}, "rollout 0 must have at most the 4 tokens of its sequence, got 6"),
            ([array], {"attention_mask": torch.ones(2, 6)}, r"attention_mask must be \[B=1, S\], got \[2, 6\]"),
            ([array], {"lengths": [3, 3]}, "lengths must be 1 numbers, got 2"),
            ([array], both, "one of attention_mask and lengths must be None, got both"),
        ):
            with refused(message):
                RoutingReplay.from_rollouts(model, rollouts, **options)

    def test_experts_out_of_range_or_twice(self):
        model, array = self.model(), self.array()
        array[2, 1, 0] = 8
        with refused("experts of model.layers.1.mlp must be below 8, got 8"):
            RoutingReplay.from_rollouts(model, [array])
        array[2, 1] = torch.tensor([4, 1, 4])
        with refused(r"experts of a token must differ, got \[4, 1, 4\] in model.layers.1.mlp"):
            RoutingReplay.from_rollouts(model, [array])
        bad = {name: [torch.full((6, 3), 9, dtype=torch.int32)] for name in NAMES}
        with refused("RoutingReplay.replay: experts of model.layers.0.mlp must be below 8, got 9"):
            RoutingReplay(bad).replay(model).__enter__()

    def test_forwards_that_differ_from_the_record(self):
        model = self.model()
        record = RoutingReplay.from_rollouts(model, [self.array()])
        with refused(r"choice 0 of model.layers.0.mlp must be \[24, 3\], got \[6, 3\]"), record.replay(model):
            model(input_ids=draw_tokens(model))
        with refused("must run 1 times, as in the record, got one more"), record.replay(model):
            for _ in range(2):
                model(input_ids=draw_tokens(model, batch=1, length=6))
        with refused("model.layers.0.mlp must run 1 times, as in the record, got 0"), record.replay(model):
            pass

    def test_other_models(self):
        record = RoutingReplay.from_rollouts(self.model(), [self.array()])
        other = build("qwen3_moe", num_hidden_layers=3)
        with refused(r"record must hold the model's routers, got none of \['model.layers.2.mlp'\]"):
            record.replay(other).__enter__()
        for call in (record.replay, record.capture, lambda model: RoutingReplay.from_rollouts(model, [self.array()])):
            with refused("the model must have a TopKRouter or MoE blocks of transformers, got none"):
                call(torch.nn.Linear(2, 2)).__enter__()

    def test_two_records_at_once_and_a_part_of_a_model(self):
        model = self.model()
        record = RoutingReplay.from_rollouts(model, [self.array()])
        with record.replay(model):
            with refused("must replay one record at a time, got a second one"):
                record.replay(model).__enter__()
            model(input_ids=draw_tokens(model, batch=1, length=6))
        part = model.model.layers[0].mlp
        alone = RoutingReplay({"": record.choices[NAMES[0]]})
        with refused("must run once in each forward of its model, got a run outside of one"), alone.replay(part):
            part(torch.zeros(1, 6, 56))

    def test_routers_that_choose_in_another_way(self):
        model = enabled("phimoe", "cpu")
        tokens = draw_tokens(model)
        record = captured(model, lambda: model(input_ids=tokens))
        with refused("PhimoeTopKRouter must choose its experts by one top-k of scores"), record.replay(model):
            model(input_ids=tokens)
