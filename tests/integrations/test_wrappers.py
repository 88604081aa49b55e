"""Attachments to the modules of an enabled model still apply: hooks, and low-rank changes of the weights."""

import copy
from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from moe_layers import observe
from moe_layers.integrations.transformers import disable, enable

from ..tiers import default_tier
from .models import assert_same_step, build, check_change, draw_tokens, logits_of, skip_old, step
from .test_models import INTERFACE, REPLACED

RANK = 3


class Added(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, weight):
        return weight + self.change


class LowRank(nn.Module):
    """Experts with `b @ a` added to a parameter while their forward runs, like PEFT's `ParamWrapper`."""

    def __init__(self, base_layer, name):
        super().__init__()
        self.base_layer, self.name = base_layer, name
        parameter = getattr(self.experts(), name)
        num_experts, rows, columns = parameter.shape
        self.a = nn.Parameter(torch.randn(num_experts, RANK, columns).to(parameter) * columns**-0.5)
        self.b = nn.Parameter(torch.randn(num_experts, rows, RANK).to(parameter) * 0.3)

    def experts(self):
        return self.base_layer.experts() if isinstance(self.base_layer, LowRank) else self.base_layer

    def forward(self, *args):
        experts = self.experts()
        parametrize.register_parametrization(experts, self.name, Added(self.b @ self.a))
        try:
            with parametrize.cached():
                return self.base_layer(*args)
        finally:
            parametrize.remove_parametrizations(experts, self.name, leave_parametrized=False)
            getattr(experts, self.name).requires_grad_(False)


def adapt(model):
    """Freeze a model and wrap its experts."""
    torch.manual_seed(4)
    model.requires_grad_(False)
    for block in [module for module in model.modules() if hasattr(module, "experts")]:
        names = [name for name, parameter in block.experts.named_parameters() if parameter.dim() == 3]
        for name in names:
            block.experts = LowRank(block.experts, name)


@pytest.mark.parametrize("order", default_tier(["enabled", "adapted"], ["adapted"]))
@pytest.mark.parametrize(
    "model_type",
    default_tier(["llama4_text", "longcat_flash", "step3p7_text", "qwen3_moe", "gpt_oss"], ["llama4_text", "gpt_oss"]),
)
def test_low_rank_changes_of_the_experts(model_type, order, device):
    """Test both orders: `order` says whether the model was enabled or adapted first."""
    own = build(model_type, device)
    ours = copy.deepcopy(own)
    adapt(own)
    tokens = draw_tokens(own)
    baseline, exact = step(own, tokens), step(copy.deepcopy(own).double(), tokens)
    for change in (enable, adapt) if order == "enabled" else (adapt, enable):
        change(ours)
    actual = step(ours, tokens)
    assert set(actual[2]) == {name for name, _ in own.named_parameters() if name.endswith((".a", ".b"))}
    assert_same_step(actual, baseline, exact)
    disable(ours)
    assert torch.equal(step(ours, tokens)[0], baseline[0])


def called(model):
    """Return the names of the called modules, except those that the kernels replace: an activation, DBRX's `mlp`, the
    linear modules of JetMoE."""
    names, handles = set(), []
    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(lambda *_, name=name: names.add(name)))
    model(input_ids=draw_tokens(model))
    for handle in handles:
        handle.remove()
    replaced = (".input_linear", ".output_linear", ".mlp.activation")
    return {
        name
        for name in names
        if name.endswith("identity_expert") or not (".experts." in name or name.endswith(replaced))
    }


@pytest.mark.parametrize("model_type", default_tier([*INTERFACE, *REPLACED], ["qwen3_moe", "dbrx", "longcat_flash"]))
def test_each_module_is_called_as_before(model_type, device):
    skip_old(model_type)
    model = build(model_type, device)
    before = called(model)
    assert any(name.endswith(("experts", "mlp")) for name in before)
    enable(model)
    assert called(model) >= before


def test_a_hook_on_zero_experts_acts(device):
    """transformers' tensor parallelism divides the zero experts' input in a hook, because every rank adds them."""
    model = build("longcat_flash", device)
    for name, module in model.named_modules():
        if name.endswith("identity_expert"):
            module.register_forward_pre_hook(lambda _, args: (args[0] / 2,))
    check_change(model, enable)


def hook_by_accelerate(modules):
    """Add a hook to modules. Return the list of its calls, and what removes it."""
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    calls = []

    class Hook(hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append(module)
            return args, kwargs

    for module in modules:
        hooks.add_hook_to_module(module, Hook())
    return calls, lambda: [hooks.remove_hook_from_module(module) for module in modules]


def with_replaced_forward(model_type, device):
    """Return a model, what to enable of it, and the modules whose forwards are then replaced."""
    model = build(model_type, device)
    part = model if model_type in REPLACED else model.model.layers
    enable(part, implementation="reference")
    return model, part, [module for module in model.modules() if "forward" in vars(module)]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "llama4_text"])
def test_disable_keeps_hooks_around_a_replaced_forward(model_type, device):
    """accelerate keeps the forward that it wraps, and puts it back later."""
    model, part, replaced = with_replaced_forward(model_type, device)
    wanted, ours = logits_of(build(model_type, device)), logits_of(model)
    calls, remove = hook_by_accelerate(replaced)

    def check(expected, num_calls):
        assert torch.equal(logits_of(model), expected) and len(calls) == num_calls * len(replaced)

    check(ours, 1)
    enable(part, implementation="reference")
    check(ours, 2)
    disable(part)
    check(wanted, 3)
    enable(part, implementation="reference")
    check(ours, 4)
    disable(part)
    remove()
    check(wanted, 4)
    enable(part, implementation="reference")
    check(ours, 4)
    disable(part)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_replaced_forward_may_be_bound_to_its_module(device):
    """accelerate's mixed precision binds the function of a method to the module."""
    model, _, replaced = with_replaced_forward("llama4_text", device)
    ours = logits_of(model)
    for module in replaced:
        module.forward = MethodType(module.forward.__func__, module)
    assert torch.equal(logits_of(model), ours)


def test_a_copy_keeps_its_hooks(device):
    model, _, replaced = with_replaced_forward("llama4_text", device)
    calls, _ = hook_by_accelerate(replaced)
    twin = copy.deepcopy(model)
    wanted, ours = logits_of(build("llama4_text", device)), logits_of(model)
    disable(model)
    assert torch.equal(logits_of(model), wanted)
    assert torch.equal(logits_of(twin), ours)
    disable(twin)
    assert torch.equal(logits_of(twin), wanted) and len(calls) == 4 * len(replaced)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "llama4_text"])
def test_disable_keeps_a_forward_that_took_the_place_of_ours(model_type, device):
    _, part, replaced = with_replaced_forward(model_type, device)
    others = {module: lambda *args, **kwargs: None for module in replaced}
    for module, forward in others.items():
        module.forward = forward
    with pytest.raises(ValueError, match="must be its class's own, got a replaced one"):
        enable(part)
    disable(part)
    assert all(vars(module)["forward"] is forward for module, forward in others.items())


def test_disable_keeps_an_implementation_that_was_chosen_later(device):
    model = build("qwen3_moe", device)
    enable(model)
    model.set_experts_implementation("batched_mm")
    disable(model)
    assert model.config._experts_implementation == "batched_mm"


def test_disable_keeps_hooks_around_a_router(device):
    model = build("qwen3_moe", device)
    enable(model, implementation="reference")
    observers = observe(model)
    routers = [module.gate for module in model.modules() if hasattr(module, "gate")]
    calls, remove = hook_by_accelerate(routers)

    def check(observers, num_calls):
        logits_of(model)
        assert [observer.read().num_calls for observer in observers.values()] == [1, 1] and len(calls) == num_calls

    check(observers, 2)
    disable(model)
    check(observers, 4)
    check(observe(model), 6)
    remove()
    enable(model)
    disable(model)
    logits_of(model)
    assert len(calls) == 6
