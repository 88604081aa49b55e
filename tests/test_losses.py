import pytest
import torch

from moe_layers import LayerRouting, MoEFeedForward, load_balancing_loss, router_z_loss, set_aux_loss_scale


def routing_of(logits, top_k=2):
    weights, experts = logits.softmax(-1).topk(top_k)
    counts = torch.bincount(experts.flatten(), minlength=logits.shape[1]).int()
    return LayerRouting(experts.int(), weights, logits, counts)


def random_logits(num_tokens=20, num_experts=6, dtype=torch.float64):
    return torch.randn(num_tokens, num_experts, dtype=dtype, generator=torch.Generator().manual_seed(0))


def test_load_balancing_by_hand():
    # Two tokens both choose expert 0 with probability 3/4: 2 * (1 * 3/4 + 0 * 1/4).
    logits = torch.tensor([[3.0, 1.0], [3.0, 1.0]]).log()
    torch.testing.assert_close(load_balancing_loss(routing_of(logits, 1)), torch.tensor(1.5))


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_load_balancing_is_one_at_perfect_balance(top_k):
    expert, token = torch.arange(6), torch.arange(12)
    logits = -((expert[None] - token[:, None]) % 6).double()
    torch.testing.assert_close(load_balancing_loss(routing_of(logits, top_k)), torch.tensor(1.0, dtype=torch.float64))


def test_z_loss_by_hand():
    logits = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    ln2 = torch.tensor(2.0).log()
    torch.testing.assert_close(router_z_loss(routing_of(logits)), (ln2**2 + (1 + ln2) ** 2) / 2)


@pytest.mark.parametrize("loss", [load_balancing_loss, router_z_loss])
def test_invariant_to_order_of_experts_and_tokens(loss):
    logits = random_logits()
    expected = loss(routing_of(logits))
    experts = torch.randperm(6, generator=torch.Generator().manual_seed(1))
    tokens = torch.randperm(20, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(loss(routing_of(logits[:, experts])), expected)
    torch.testing.assert_close(loss(routing_of(logits[tokens])), expected)


def test_splitting_a_batch():
    """Documented: the z-loss of halves averages to the whole's, the load-balancing loss does not."""
    logits = random_logits()

    def halves(loss):
        return (loss(routing_of(logits[:10])) + loss(routing_of(logits[10:]))) / 2

    torch.testing.assert_close(halves(router_z_loss), router_z_loss(routing_of(logits)))
    assert (halves(load_balancing_loss) - load_balancing_loss(routing_of(logits))).abs() > 1e-3


@pytest.mark.parametrize("loss", [load_balancing_loss, router_z_loss])
def test_gradcheck_and_no_tokens(loss):
    torch.autograd.gradcheck(lambda logits: loss(routing_of(logits)), random_logits().requires_grad_())
    assert loss(routing_of(random_logits(0))) == 0


def make_layer(device, **coefficients):
    torch.manual_seed(0)
    return MoEFeedForward(16, 8, 4, 2, init_std=0.3, implementation="triton", device=device, **coefficients)


def router_gradient(layer, x, scale=1.0):
    layer.zero_grad()
    (scale * layer(x).sum()).backward()
    return layer.router.weight.grad.clone()


@pytest.mark.parametrize("scale", [None, 0.25, 65536.0])
def test_coefficients_add_the_gradient_of_the_losses(scale, device):
    x = torch.randn(10, 16, device=device)
    plain = make_layer(device)
    layer = make_layer(device, load_balancing_coefficient=0.5, z_loss_coefficient=0.125)
    if scale is not None:
        set_aux_loss_scale(layer, torch.tensor(scale, device=device))
    y, routing = plain(x, return_routing=True)
    loss = 0.5 * load_balancing_loss(routing) + 0.125 * router_z_loss(routing)
    plain.zero_grad()
    (y.sum() + (1.0 if scale is None else scale) * loss).backward()
    assert torch.equal(layer(x), y)
    torch.testing.assert_close(router_gradient(layer, x), plain.router.weight.grad)
    # The losses see the tokens, too.
    assert (router_gradient(layer, x) - router_gradient(make_layer(device), x)).abs().max() > 1e-4


def test_scale_follows_loss_scaling_and_can_be_changed_in_place(device):
    x = torch.randn(10, 16, device=device)
    layer = make_layer(device, load_balancing_coefficient=0.5)
    expected = router_gradient(layer, x)
    scale = torch.tensor([1024.0], device=device)
    layer.set_aux_loss_scale(scale)
    torch.testing.assert_close(router_gradient(layer, x, 1024.0) / 1024.0, expected)
    scale.fill_(1.0)
    assert torch.equal(router_gradient(layer, x), expected)
    layer.set_aux_loss_scale(None)
    assert torch.equal(router_gradient(layer, x), expected)


def test_bad_scale():
    layer = make_layer("cpu")
    with pytest.raises(ValueError, match=r"scale must be a scalar tensor on cpu, got \[2\] on cpu"):
        layer.set_aux_loss_scale(torch.ones(2))
    with pytest.raises(ValueError, match=r"got \[\] on meta"):
        layer.set_aux_loss_scale(torch.ones((), device="meta"))
