"""Statistics of transformers models: what the routers chose, on enabled models."""

import copy
import math
import pickle

import pytest
import torch
import transformers
from packaging.version import Version
from torch.nn import functional

from moe_layers import RoutingReplay, observe
from moe_layers.integrations.transformers import disable, enable
from moe_layers.integrations.transformers.routers.model_forward import ModelForward
from moe_layers.memory import saved_bytes

from ..layer.test_saved_bytes import seen_bytes
from ..tiers import default_tier, slow
from .models import assert_same_step, build, draw_tokens, step

MODELS = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "olmoe"]
REFUSED = {"dbrx", "jetmoe", "llama4_text"}
if Version(transformers.__version__) < Version("5.19"):
    REFUSED.add("longcat_flash")


def enabled(model_type, device, **options):
    model = build(model_type, device, **options)
    if model_type not in REFUSED and any(hasattr(module, "route_tokens_to_experts") for module in model.modules()):
        pytest.skip(f"the blocks of {model_type} choose the experts in transformers {transformers.__version__}")
    enable(model, implementation="reference")
    return model


def padded(model):
    """Return tokens and a mask whose first sequence begins with five padding tokens."""
    tokens = draw_tokens(model)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    return tokens, mask


def router_outputs(model, run):
    """Return the outputs of every router while `run()` runs."""
    outputs = []
    routers = [
        m.get_submodule(n)
        for m in model.modules()
        for n in ("gate", "router")
        if hasattr(m, "experts") and n in m._modules
    ]
    hooks = [router.register_forward_hook(lambda module, args, out: outputs.append(out)) for router in routers]
    run()
    for hook in hooks:
        hook.remove()
    return outputs


@pytest.mark.parametrize("model_type", MODELS)
def test_statistics_are_those_of_the_routers_results(model_type, device):
    model = enabled(model_type, device)
    tokens, mask = padded(model)
    observers = observe(model)
    outputs = router_outputs(model, lambda: model(input_ids=tokens, attention_mask=mask))
    assert len(observers) == len(outputs) > 0
    for (name, observer), (logits, _, chosen) in zip(observers.items(), outputs, strict=True):
        assert name.startswith("model.layers.") and name.endswith(".mlp")
        statistics, is_token = observer.read(), mask.flatten().bool()
        assert (statistics.num_calls, statistics.num_tokens, statistics.num_padding_tokens) == (1, 19, 5)
        counts = functional.one_hot(chosen[is_token], logits.shape[1]).sum((0, 1)).cpu()
        assert statistics.tokens_per_expert.tolist() == counts.tolist()
        assert statistics.num_dropped == 0
        assert statistics.dead_experts == tuple(e for e, count in enumerate(counts.tolist()) if not count)
        assert statistics.max_violation == pytest.approx(counts.max().item() / counts.double().mean().item() - 1)
        entropies = torch.distributions.Categorical(logits=logits[is_token].double()).entropy()
        assert statistics.entropy == pytest.approx(entropies.mean().item(), rel=1e-6)
        assert 0 < statistics.smallest_margin <= statistics.margin < math.inf


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")  # the only API in 5.7
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_forwards_do_not_count(use_reentrant, device):
    model = enabled("qwen3_moe", device).train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    observers = observe(model)
    expected = step(model, draw_tokens(model))
    assert {observer.read().num_calls for observer in observers.values()} == {1}
    disable(model)
    assert not [name for module in model.modules() for name in vars(module) if name.startswith("_moe_layers")]
    enable(model, implementation="reference")
    torch.testing.assert_close(step(model, draw_tokens(model)), expected, rtol=0, atol=0)


def test_generated_tokens_count_once(device):
    """With a cache, the mask covers past tokens, too."""
    model = enabled("qwen3_moe", device)
    tokens, mask = padded(model)
    observers = observe(model)
    new = model.generate(tokens, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
    statistics = observers["model.layers.0.mlp"].read()
    rows = new.shape[1] - tokens.shape[1] - 1  # the last token is not passed through the model
    assert statistics.num_tokens == 19 + 2 * rows and statistics.num_padding_tokens == 5


def test_statistics_go_on_when_the_model_is_enabled_again(device):
    model = enabled("qwen3_moe", device)
    observers = observe(model)
    enable(model, implementation="reference")
    model(input_ids=draw_tokens(model))
    assert observers["model.layers.0.mlp"].read().num_calls == 1


def test_copies_and_pickles_are_observed_by_themselves(device):
    model = enabled("qwen3_moe", device)
    tokens = draw_tokens(model)
    observe(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(input_ids=tokens).logits, model(input_ids=tokens).logits)
        theirs, ours = observe(other), observe(model)
        other(input_ids=tokens)
        assert theirs["model.layers.1.mlp"].read().num_calls == 1
        assert ours["model.layers.1.mlp"].read().num_calls == 0


def test_a_failed_forward_is_forgotten(device):
    model = enabled("qwen3_moe", device)
    tokens, mask = padded(model)
    observers = observe(model)

    def fail(module, args):
        raise RuntimeError("stop")

    hook = model.get_input_embeddings().register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        model(input_ids=tokens, attention_mask=mask)
    hook.remove()
    model(input_ids=tokens)
    assert observers["model.layers.0.mlp"].read().num_padding_tokens == 0


def test_experts_without_their_router_are_refused(device):
    block = enabled("qwen3_moe", device).model.layers[0].mlp
    with pytest.raises(ValueError, match="moe_layers: Qwen3MoeExperts must have a router in its block, named one of"):
        observe(block.experts)
    (observer,) = observe(block).values()
    block(torch.zeros(2, 3, 56, device=device))
    assert observer.read().num_tokens == 6


def test_tokens_that_the_mask_does_not_cover_are_refused():
    forward = ModelForward(torch.nn.Identity(), {"attention_mask": torch.ones(5, 4)})
    for num_tokens in (21, 25):
        message = rf"tokens of a.gate must be those of attention_mask \[5, 4\], got {num_tokens}"
        with pytest.raises(ValueError, match=message):
            forward.token_mask("a.gate", num_tokens, torch.device("cpu"))


def test_layers_on_several_devices_read_padding_and_lengths_on_their_own(device):
    """`device_map="auto"` makes such models. The input may also be on the host, because accelerate moves it."""
    padded = ModelForward(torch.nn.Identity(), {"attention_mask": torch.ones(2, 3, device=device)})
    packed = ModelForward(torch.nn.Identity(), {"cu_seq_lens_q": torch.tensor([0, 2, 6], device=device)})
    for own in map(torch.device, (device, "meta")):
        assert padded.token_mask("a.gate", 6, own).device.type == own.type
        assert packed.sequence_lengths(6, own).device.type == own.type


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT warns
@pytest.mark.parametrize("target", [["mlp.experts.gate_up_proj"], ["mlp.gate.weight"]], ids=["experts", "router"])
def test_adapters_of_experts_and_routers(target, device):
    peft = pytest.importorskip("peft", minversion="0.18", reason="peft 0.18 or later is not installed")
    model = enabled("qwen3_moe", device)
    tokens, mask = padded(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_parameters=target, init_lora_weights=False))
    record = RoutingReplay()
    observers = observe(adapted)
    with record.capture(adapted):
        expected = adapted(input_ids=tokens, attention_mask=mask).logits
    assert [observer.read().num_padding_tokens for observer in observers.values()] == [5, 5]
    with record.replay(adapted):
        assert torch.equal(adapted(input_ids=tokens, attention_mask=mask).logits, expected)
    adapted.disable_adapter_layers()
    assert not torch.equal(adapted(input_ids=tokens, attention_mask=mask).logits, expected)
    assert list(observers) == [f"base_model.model.model.layers.{layer}.mlp" for layer in range(2)]


@slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_models_are_observed_and_replayed(device):
    """The graph of a compiled model breaks at each router."""
    model = enabled("qwen3_moe", device)
    double = enabled("qwen3_moe", device, dtype=torch.float64)
    tokens = draw_tokens(model)
    inner = copy.deepcopy(model)
    compiled = torch.compile(inner, backend="aot_eager")
    observers, record = observe(inner), RoutingReplay()
    with record.capture(inner):
        assert_same_step(step(compiled, tokens), step(model, tokens), step(double, tokens))
    assert {observer.read().num_tokens for observer in observers.values()} == {tokens.numel()}
    record = RoutingReplay({name: [choice.flip(0)] for name, (choice,) in record.choices.items()})
    steps = []
    for hooked, called in ((inner, compiled), (model, model), (double, double)):
        with record.replay(hooked):
            steps.append(step(called, tokens))
    assert_same_step(*steps)


class TestSavedBytes:
    """The kernels run in the interpreter, because the reference's memory depends on the routing."""

    @pytest.mark.parametrize("model_type", default_tier(MODELS, ["qwen3_moe", "gpt_oss", "deepseek_v3"]))
    def test_blocks_save_what_is_predicted(self, model_type, device):
        model = build(model_type, device)
        enable(model, implementation="triton")
        x = torch.randn(1, 10, model.config.hidden_size, device=device, requires_grad=True)
        blocks = [module for module in model.modules() if hasattr(module, "experts")]
        assert saved_bytes(model, 10) == sum(seen_bytes(block, x) for block in blocks) > 0

    def test_experts_with_a_norm_are_refused(self):
        model = build("muse_spark_text")
        enable(model)
        with pytest.raises(NotImplementedError, match="saved_bytes: experts must have no norm behind them, got one"):
            saved_bytes(model, 10)

    def test_models_that_are_not_enabled_are_refused(self):
        model = build("qwen3_moe")
        with pytest.raises(ValueError, match="saved_bytes: the experts must be computed by moe_layers, got others in"):
            saved_bytes(model, 10)
        enable(model, implementation="reference")
        with pytest.raises(NotImplementedError, match="saved_bytes: the reference would run"):
            saved_bytes(model, 10)
