"""Loss coefficients of the layer, masks, and counts over a step."""

import copy
from functools import cache, partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_kernels import RouterSpec
from moe_layers import (
    BalanceLosses,
    aux_losses,
    carry_expert_counts,
    global_expert_counts,
    global_load_balancing_loss,
    importance_loss,
    load_balancing_loss,
    observe,
    reset_expert_counts,
    router_z_loss,
    sequence_load_balancing_loss,
    set_aux_loss_scale,
    update_selection_bias,
)
from moe_layers.balance import losses

from .. import layers
from ..gpu import assert_never_waits
from ..tiers import default_tier
from .balance_cases import count, random_logits, routing_of

ALL = BalanceLosses(switch=0.5, sequence=0.25, global_batch=0.75, importance=0.3, z=0.125)
BIASED = RouterSpec.ernie()
make_x = partial(layers.make_x, shape=(3, 6, 16))


def make_layer(device, dtype=torch.float32, **options):
    torch.manual_seed(0)
    # The interpreter is slow: kernels run only on a GPU, or if a test asks for them.
    implementation = "reference" if device == "cpu" else None
    options = {"init_std": 0.3, "implementation": implementation, **options}
    return layers.moe_layer(16, 8, 5, 2, device=device, dtype=dtype, **options)


def gradients(layer, *calls, scale=1.0):
    """Return the gradients of the sum of the outputs, for each parameter."""
    layer.zero_grad()
    for x, facts in calls:
        (scale * layer(x, **facts)).sum().backward()
    return [parameter.grad.clone() for parameter in layer.parameters()]


@pytest.mark.parametrize(
    ("scale", "implementation"), [(None, "reference"), (0.25, "triton"), (0.25, "reference"), (65536.0, "reference")]
)
def test_coefficients_add_the_gradient_of_the_losses(scale, implementation, device):
    x = make_x(device)
    plain = make_layer(device, implementation=implementation)
    layer = make_layer(device, implementation=implementation, balance_losses=ALL)
    if scale is not None:
        set_aux_loss_scale(layer, torch.tensor(scale, device=device))
    y, routing = plain(x, return_routing=True)
    loss = 0.5 * load_balancing_loss(routing) + 0.25 * sequence_load_balancing_loss(routing)
    loss = loss + 0.75 * global_load_balancing_loss(routing, global_expert_counts(routing))
    loss = loss + 0.3 * importance_loss(routing) + 0.125 * router_z_loss(routing)
    (y.sum() + (1.0 if scale is None else scale) * loss).backward()
    assert torch.equal(layer(x), y)
    actual = gradients(layer, (x, {}))
    torch.testing.assert_close(actual, [parameter.grad for parameter in plain.parameters()])
    assert (actual[0] - gradients(make_layer(device), (x, {}))[0]).abs().max() > 1e-4


def test_scale_can_be_changed_in_place(device):
    x = make_x(device)
    layer = make_layer(device, balance_losses=ALL)
    expected = gradients(layer, (x, {}))
    scale = torch.tensor([1024.0], device=device)
    set_aux_loss_scale(layer, scale)
    torch.testing.assert_close([gradient / 1024.0 for gradient in gradients(layer, (x, {}), scale=1024.0)], expected)
    scale.fill_(1.0)
    assert all(map(torch.equal, gradients(layer, (x, {})), expected))
    set_aux_loss_scale(layer, None)
    assert all(map(torch.equal, gradients(layer, (x, {})), expected))


def test_functional_gradients_are_those_of_a_backward(device):
    x, layer = make_x(device), make_layer(device, balance_losses=ALL, implementation="reference")
    parameters = dict(layer.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(layer, parameters, (x,)).sum()

    functional_gradients = torch.func.grad(loss)(parameters)
    loss(parameters).backward()
    torch.testing.assert_close(
        list(functional_gradients.values()), [parameter.grad for parameter in parameters.values()]
    )


def float16_step(layer, x):
    with torch.autocast(x.device.type, torch.float16):
        layer(x).sum().backward()


def test_float16_autocast_without_a_scale_warns_once(device, monkeypatch):
    monkeypatch.setattr(losses, "_warn_once", cache(losses._warn_once.__wrapped__))
    x, layer = make_x(device), make_layer(device, balance_losses=BalanceLosses(z=0.1))
    with pytest.warns(RuntimeWarning, match=r"A GradScaler scales the main loss alone: call set_aux_loss_scale\("):
        float16_step(layer, x)
    float16_step(layer, x)  # a second warning would be an error


def test_no_warning_where_nothing_is_scaled(device, monkeypatch):
    """Any warning would fail this test."""
    monkeypatch.setattr(losses, "_warn_once", cache(losses._warn_once.__wrapped__))
    x, layer = make_x(device), make_layer(device, balance_losses=BalanceLosses(z=0.1))
    float16_step(copy.deepcopy(layer).eval(), x)
    float16_step(make_layer(device), x)
    with torch.autocast(x.device.type, torch.bfloat16):
        layer(x)
    layer(x)
    set_aux_loss_scale(layer, torch.ones((), device=device))
    float16_step(layer, x)


def test_a_model_balanced_by_bias_has_no_aux_losses(device):
    layer = make_layer(device, router=RouterSpec.deepseek_v3())
    layer(make_x(device))
    assert aux_losses(layer) == {}
    layer.balance_losses = BalanceLosses(sequence=0.1)
    with pytest.raises(ValueError, match="a layer must have balance_losses and a forward with gradients, got 1 layers"):
        aux_losses(layer)
    layer(make_x(device))
    assert aux_losses(layer).keys() == {""}


def test_aux_losses_are_those_of_the_last_forward(device):
    model = torch.nn.Sequential(
        make_layer(device, balance_losses=ALL), torch.nn.Identity(), make_layer(device), make_layer(device)
    )
    model[3].balance_losses = BalanceLosses(z=0.5)
    set_aux_loss_scale(model, torch.tensor(8.0, device=device))
    with pytest.raises(ValueError, match="a layer must have balance_losses and a forward with gradients, got 3 layers"):
        aux_losses(model)
    observers = observe(model)
    expected = []
    for seed in range(2):
        x = make_x(device, seed=seed)
        model(x)
        _, routing = copy.deepcopy(model[0])(x, return_routing=True)
        expected.append(ALL.total(routing))
        losses = aux_losses(model)
        assert list(losses) == ["0", "3"] and not any(loss.requires_grad for loss in losses.values())
        torch.testing.assert_close(losses["0"], expected[-1].detach())
    with torch.no_grad():
        model(make_x(device, seed=2))
    assert aux_losses(model)["0"] == losses["0"]
    assert observers["0"].read().aux_loss == pytest.approx(sum(expected).item() / 2)
    assert observers["2"].read().aux_loss == 0 and observers["2"].read().num_calls == 3


def test_the_loss_of_a_transform_is_not_kept(device):
    x, layer = make_x(device), make_layer(device, balance_losses=ALL, implementation="reference")
    layer(x)
    before = layer.aux_loss
    torch.func.grad(lambda x: layer(x).sum())(2 * x)
    assert layer.aux_loss is before


def test_float16_with_loss_scaling_over_micro_batches(device):
    """A small coefficient's gradient is below float16's smallest number, but survives when scaled by the GradScaler."""
    coefficient, micro_batches = 1e-7, [make_x(device, seed=seed) for seed in range(4)]
    layer = make_layer(device, torch.float16, balance_losses=BalanceLosses(z=coefficient), implementation="triton")
    exact = make_layer(device, implementation="reference").double()
    exact.load_state_dict(layer.state_dict())
    for x in micro_batches:
        _, routing = exact(x.half().double(), return_routing=True)
        (coefficient / 4 * router_z_loss(routing)).backward()
    expected = exact.router.weight.grad

    def router_gradient():
        layer.zero_grad()
        for x in micro_batches:
            (0.0 * layer(x.half()).sum()).backward()
        return layer.router.weight.grad

    set_aux_loss_scale(layer, torch.tensor(1 / 4, device=device))
    assert not torch.allclose(router_gradient().double(), expected, rtol=0.1, atol=0)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**20)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    set_aux_loss_scale(layer, scaler.scale(torch.tensor(1 / 4, device=device)))
    router_gradient()
    layer.float()  # like the unscaled gradients of a mixed-precision optimizer
    scaler.unscale_(optimizer)
    error = (layer.router.weight.grad.double() - expected).abs().max()
    assert error <= 4 * torch.finfo(torch.float16).eps * expected.abs().max()


def test_accumulated_micro_batches_give_the_gradient_of_the_whole(device):
    """Scaling by 1 / number of calls equals passing the `num_tokens` of all calls."""
    x = make_x(device, shape=(4, 6, 16))
    layer = make_layer(device, balance_losses=BalanceLosses(sequence=0.25, z=0.125))
    expected = gradients(layer, (x, {}))
    for num_tokens in (24, torch.tensor(24, device=device)):
        calls = [(part, {"num_tokens": num_tokens}) for part in x.split([1, 3])]
        torch.testing.assert_close(gradients(layer, *calls), expected, rtol=1e-4, atol=1e-5)
    set_aux_loss_scale(layer, torch.tensor(0.5, device=device))
    torch.testing.assert_close(gradients(layer, *[(part, {}) for part in x.split(2)]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"implementation": "triton"}, {"router": BIASED, "shared_d_ff": 8}, {"num_zero_experts": 2}]
)
def test_padding_changes_nothing(options, device):
    """Padding, with extreme values, changes neither outputs of tokens nor gradients nor counts."""
    layer = make_layer(device, balance_losses=ALL, **options)
    lengths, position = torch.tensor([5, 2, 6], device=device), torch.arange(6, device=device)
    token_mask = torch.stack([position < 5, position >= 4, position < 6])
    x = make_x(device)
    tokens = x[token_mask]
    padded = torch.where(token_mask[..., None], x, 100.0)
    y, routing = layer(tokens, return_routing=True, sequence_lengths=lengths)
    padded_y, padded_routing = layer(padded, return_routing=True, token_mask=token_mask)
    torch.testing.assert_close(padded_y[token_mask], y)
    assert torch.equal(padded_routing.tokens_per_expert, routing.tokens_per_expert)
    assert (padded_routing.topk_experts[~token_mask.flatten()] == -1).all()

    def of_tokens(x, mask, **facts):
        layer.zero_grad()
        layer.router.expert_counts.zero_()
        layer(x, **facts)[mask].sin().sum().backward()
        return [layer.router.expert_counts.clone(), *(parameter.grad.clone() for parameter in layer.parameters())]

    expected = of_tokens(tokens, slice(None), sequence_lengths=lengths)
    assert expected[0].sum() == 26
    torch.testing.assert_close(of_tokens(padded, token_mask, token_mask=token_mask), expected, rtol=1e-4, atol=1e-5)


def test_padding_takes_no_capacity(device):
    layer = make_layer(device, capacity=2)
    x = make_x(device, shape=(1, 6, 16))
    padded = torch.cat([x[:, :1].expand(1, 5, 16), x], dim=1)
    token_mask = torch.arange(11, device=device)[None] >= 5
    y, routing = layer(padded, token_mask=token_mask, return_routing=True)
    torch.testing.assert_close(y[:, 5:], layer(x))
    expected = layer(x, return_routing=True)[1]
    assert torch.equal(routing.choices[5:], expected.choices)
    assert routing.choices_per_expert.tolist() == count(expected.choices.cpu(), 5).tolist()
    assert (expected.topk_experts == -1).any()


@pytest.mark.parametrize("use_reentrant", default_tier([False, True], [False]))
@pytest.mark.parametrize("options", [{}, {"implementation": "triton"}, {"capacity": 2, "router": BIASED}])
def test_activation_checkpointing_changes_nothing(options, use_reentrant, device):
    """Gradients are bitwise equal, and every choice is counted once, although every forward runs twice."""
    layer = make_layer(device, balance_losses=ALL, **options)
    calls = []
    layer.router.register_forward_hook(lambda *_: calls.append(1))

    def run(forward):
        layer.zero_grad()
        reset_expert_counts(layer)
        for seed in range(2):
            x = make_x(device, seed=seed).requires_grad_()
            # The sine needs the layer's output, so a recomputation runs the whole layer.
            forward(lambda x: layer(x).sin(), x).sum().backward()
            carry_expert_counts(layer)
        grads = [parameter.grad.clone() for parameter in layer.parameters()]
        return [layer.router.expert_counts.clone(), x.grad, *grads]

    expected = run(lambda region, x: region(x))
    assert len(calls) == 2
    actual = run(partial(checkpoint, use_reentrant=use_reentrant))
    assert len(calls) == 6
    assert expected[0].sum() == 2 * 18 * 2
    assert all(map(torch.equal, actual, expected))


def test_global_batch_over_micro_batches(device):
    """The second micro-batch uses the counts of both; after a reset, only its own."""
    layer = make_layer(device, balance_losses=BalanceLosses(global_batch=0.75))
    plain = make_layer(device)
    first, second = make_x(device, seed=0), make_x(device, seed=1)
    before = plain(first, return_routing=True)[1].tokens_per_expert
    y, routing = plain(second, return_routing=True)

    def expected(counts):
        plain.zero_grad()
        (y.sum() + 0.75 * global_load_balancing_loss(routing, counts)).backward(retain_graph=True)
        return [parameter.grad.clone() for parameter in plain.parameters()]

    layer(first)
    carry_expert_counts(layer)
    with_both = gradients(layer, (second, {}))
    torch.testing.assert_close(with_both, expected(before + routing.tokens_per_expert))
    reset_expert_counts(layer)
    torch.testing.assert_close(gradients(layer, (second, {})), expected(routing.tokens_per_expert))
    assert (with_both[0] - layer.router.weight.grad).abs().max() > 1e-4


def test_compiles_without_graph_break(device):
    layer = make_layer(device, balance_losses=ALL, router=BIASED, implementation="triton")
    x, token_mask = make_x(device), torch.ones(3, 6, dtype=torch.bool, device=device)
    token_mask[1, 4:] = False
    lengths = torch.tensor([9, 9], device=device)
    facts = {"token_mask": token_mask, "sequence_lengths": lengths, "num_tokens": 40}
    expected = gradients(layer, (x, facts))
    counts = layer.router.expert_counts.clone()
    reset_expert_counts(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(x, **facts).sum().backward()
    assert torch.equal(layer.router.expert_counts, counts)
    torch.testing.assert_close(gradients(compiled, (x, facts)), expected)
    # Compiled code in a checkpointed region also counts once.
    reset_expert_counts(layer)
    checkpoint(lambda x: compiled(x, **facts), x, use_reentrant=False).sum().backward()
    assert torch.equal(layer.router.expert_counts, counts)


@pytest.mark.gpu
def test_never_waits_for_the_gpu(device):
    layer = make_layer(device, torch.bfloat16, balance_losses=ALL, router=BIASED, capacity=4)
    x = make_x(device).bfloat16().requires_grad_()
    facts = {
        "token_mask": torch.ones(3, 6, dtype=torch.bool, device=device),
        "sequence_lengths": torch.tensor([9, 9], device=device),
        "num_tokens": torch.tensor(18, device=device),
        "return_routing": True,
    }

    def step():
        y, _ = layer(x, **facts)
        y.sum().backward()
        carry_expert_counts(layer)
        update_selection_bias(layer)

    assert_never_waits(step)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"switch": -0.1}, "BalanceLosses: switch must be finite and not negative, got -0.1"),
        ({"z": float("nan")}, "BalanceLosses: z must be finite and not negative, got nan"),
        ({"global_batch": float("inf")}, "global_batch must be finite"),
        ({"score": "relu"}, "BalanceLosses: score must be one of .*, got 'relu'"),
        ({"switch": 0.1, "group": object()}, "only global_batch needs a group"),
    ],
)
def test_bad_losses(options, message):
    with pytest.raises(ValueError, match=message):
        BalanceLosses(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"x": torch.zeros(18, 16)},
            r"sequence_lengths, got None; pass sequence_lengths or x \[\.\.\., S, d_model\] to the layer",
        ),
        ({"token_mask": torch.ones(18).bool()}, r"token_mask must be \[3, 6\] torch.bool on cpu, got \[18\]"),
        ({"token_mask": torch.ones(3, 6)}, r"got \[3, 6\] torch.float32"),
        ({"sequence_lengths": torch.ones(3)}, r"sequence_lengths must be \[N\] int32 or int64"),
        ({"sequence_lengths": torch.ones(3, 1).int()}, r"got \[3, 1\] torch.int32"),
        ({"num_tokens": -2}, "num_tokens must not be negative, got -2"),
        ({"num_tokens": torch.ones(3)}, r"num_tokens must be a scalar, got \[3\]"),
    ],
)
def test_bad_facts_of_tokens(arguments, message):
    layer = make_layer("cpu", balance_losses=ALL)
    with pytest.raises(ValueError, match=message):
        layer(**{"x": torch.zeros(3, 6, 16), **arguments})


def test_losses_need_no_sequences_and_no_graph_without_gradients(device):
    layer = make_layer(device, balance_losses=ALL, implementation="triton")
    with torch.no_grad():
        y = layer(torch.zeros(18, 16, device=device))
    assert y.shape == (18, 16) and not y.requires_grad


def test_bad_scale():
    layer = make_layer("cpu")
    with pytest.raises(ValueError, match=r"scale must be a scalar tensor on cpu, got \[2\] on cpu"):
        set_aux_loss_scale(layer, torch.ones(2))
    with pytest.raises(ValueError, match=r"scale must be a Tensor, got float 0\.25"):
        set_aux_loss_scale(layer, 0.25)
    with pytest.raises(ValueError, match=r"got \[\] on meta"):
        set_aux_loss_scale(layer, torch.ones((), device="meta"))


@pytest.mark.parametrize("function", [set_aux_loss_scale, carry_expert_counts, reset_expert_counts])
def test_a_model_without_moe_layers_is_refused(function):
    arguments = [None] if function is set_aux_loss_scale else []
    with pytest.raises(ValueError, match=f"{function.__name__}: the model must have a MoEFeedForward or MoE blocks of"):
        function(torch.nn.Linear(2, 2), *arguments)


def test_bad_accumulated_counts():
    routing = routing_of(random_logits())
    for counts in (torch.ones(5).int(), torch.ones(6), torch.ones(6, device="meta").int()):
        with pytest.raises(ValueError, match=r"accumulated_counts must be \[E=6\] integers on cpu"):
            global_expert_counts(routing, accumulated_counts=counts)


@pytest.mark.parametrize("router", [RouterSpec.deepseek_v3(5, 1), BIASED], ids=["groups", "bias"])
@pytest.mark.parametrize("count", ["scores", "choices"])
def test_sequence_loss_of_a_layer_counts_scores_or_choices(count, router, device):
    """The bias, or the groups, exclude the expert of the second highest score. The loss reads the scores it is told."""
    losses = BalanceLosses(sequence=1.0, count=count, score="sigmoid")
    torch.manual_seed(0)
    top_k = 5 // router.num_groups if router.num_groups > 1 else 2
    layer = layers.moe_layer(16, 8, 5, top_k, device=device, init_std=0.3, router=router, balance_losses=losses)
    layer.router.selection_bias.copy_(torch.tensor([0.0, 0.0, 0.0, 0.0, 9.0], device=device))
    x = make_x(device)
    _, routing = layer(x, return_routing=True)
    assert (routing.topk_experts == 4).any(1).all()
    expected = sequence_load_balancing_loss(routing, score="sigmoid", count=count)
    torch.testing.assert_close(layer.aux_loss, expected.detach())
    counted = routing.logits.topk(top_k).indices if count == "scores" else routing.topk_experts
    unbiased = routing._replace(topk_experts=counted.int())
    torch.testing.assert_close(expected, sequence_load_balancing_loss(unbiased, score="sigmoid", count="choices"))
