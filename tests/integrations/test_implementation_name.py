"""`experts_implementation="moe_layers"`: the experts are recognised at their first call, without `enable`."""

import copy
from functools import partial

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from moe_layers.integrations.transformers import disable, enable
from moe_layers.integrations.transformers.experts.experts_forward import ATTRIBUTE

from ..processes import run_python
from ..tiers import default_tier, slow
from .models import build, check_change, config_of, step
from .models import draw_tokens as draw_some
from .test_copies import PICKLED
from .test_enable import UNSUPPORTED
from .test_experts_of_models import draw_routing, experts_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # PEFT warns
    pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning"),  # PEFT 0.18 warns
]
# Few tokens are drawn, because the interpreter, which is slow, runs the kernels here.
draw_tokens = partial(draw_some, batch=1, length=3)
NAME = "moe_layers"
MODELS = ["qwen3_moe", "gpt_oss", "nemotron_h"]
TOLD = r"PEFT itself computes the adapters of {}Experts.*call moe_layers\.integrations\.transformers\.enable\(model\)"


def chosen_by_name(model_type, device):
    model = build(model_type, device)
    model.set_experts_implementation(NAME)
    return model


@pytest.mark.parametrize("model_type", default_tier(MODELS, ["gpt_oss"]))
def test_step_is_the_models_own(model_type, device):
    model = build(model_type, device)
    tokens = draw_tokens(model)
    _, actual, baseline = check_change(model, lambda model: model.set_experts_implementation(NAME), tokens)
    assert not torch.equal(actual[0], baseline[0])
    model.set_experts_implementation("eager")
    assert torch.equal(model(input_ids=tokens, use_cache=False)[0], baseline[0])


def test_from_pretrained_and_from_config_take_the_name(tmp_path, device):
    saved = build("qwen3_moe", device)
    saved.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation=NAME).to(device)
    config = config_of("qwen3_moe")
    made = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=NAME).to(device).eval()
    made.load_state_dict(saved.state_dict())
    tokens = draw_tokens(saved)
    enable(saved)
    wanted = saved(input_ids=tokens).logits
    for model in (loaded, made):
        assert model.config._experts_implementation == NAME
        # With `enable`, one op also computes the router.
        torch.testing.assert_close(model(input_ids=tokens).logits, wanted, rtol=1e-4, atol=1e-5)
        assert getattr(experts_of(model), ATTRIBUTE) == getattr(experts_of(saved), ATTRIBUTE)
        assert getattr(experts_of(copy.deepcopy(model)), ATTRIBUTE) == getattr(experts_of(saved), ATTRIBUTE)
    loaded.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.config._experts_implementation != NAME


def test_two_models_share_a_configuration(device):
    config = config_of("qwen3_moe")
    config._experts_implementation = NAME
    models = [transformers.Qwen3MoeForCausalLM(config).to(device) for _ in range(2)]
    tokens = draw_tokens(models[0])
    for model in models:
        del model.model.layers[1:]
        assert model(input_ids=tokens).logits.isfinite().all()
        assert hasattr(experts_of(model), ATTRIBUTE)


@pytest.mark.parametrize(("change", "reason"), UNSUPPORTED)
def test_what_cannot_be_computed_raises_at_its_call(change, reason, device):
    model = chosen_by_name("qwen3_moe", device)
    change(model.model.layers[0].mlp.experts)
    for _ in range(2):
        with pytest.raises(ValueError, match="moe_layers: " + reason.format("Qwen3MoeExperts")):
            model(input_ids=draw_tokens(model))


@pytest.mark.parametrize("model_type", default_tier(MODELS, ["gpt_oss"]))
def test_first_call_inside_a_tracer(model_type, device):
    """torch.compile and torch.export recognise the experts, too, without a graph break."""
    eager = experts_of(chosen_by_name(model_type, device))
    compiled, traced = copy.deepcopy(eager), copy.deepcopy(eager)
    inputs = draw_routing(eager, torch.float32)
    wanted = eager(*inputs)
    graphs = CompileCounterWithBackend("aot_eager")
    run = torch.compile(compiled, backend=graphs, fullgraph=True)
    assert torch.equal(run(*inputs), wanted) and torch.equal(run(*inputs), wanted)
    assert graphs.frame_count == 1
    assert torch.equal(torch.export.export(traced, inputs, strict=False).module()(*inputs), wanted)


def test_first_call_inside_selective_checkpointing(device):
    """The checkpoint's mode counts the ops of forward, and expects the same ops in recomputation."""
    experts = experts_of(chosen_by_name("qwen3_moe", device))
    tokens, ids, weights = draw_routing(experts, torch.float32)
    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    tokens.requires_grad_()
    out = checkpoint(experts, tokens, ids, weights, use_reentrant=False, context_fn=contexts)
    gradients = torch.autograd.grad(out.square().sum(), [tokens, *experts.parameters()])
    plain = experts(tokens, ids, weights)
    expected = torch.autograd.grad(plain.square().sum(), [tokens, *experts.parameters()])
    assert torch.equal(out, plain) and all(map(torch.equal, gradients, expected))


@pytest.fixture
def peft_models():
    return pytest.importorskip("tests.integrations.peft_models")


@pytest.mark.parametrize("model_type", default_tier(["qwen3_moe", "gpt_oss"], ["qwen3_moe"]))
def test_peft_computes_its_adapters_by_itself_and_is_told(model_type, peft_models):
    assert_equal_steps = peft_models.assert_equal_steps
    golden = peft_models.adapt(build(model_type, dtype=torch.float64), peft_models.lora())
    ours = copy.deepcopy(golden)
    ours.base_model.model.set_experts_implementation(NAME)
    tokens = draw_tokens(golden)
    expected = step(golden, tokens)
    with pytest.warns(UserWarning, match=TOLD.format(r"\w+")):
        assert_equal_steps(step(ours, tokens), expected)
    assert_equal_steps(step(ours, tokens), expected)  # without a second warning
    assert hasattr(experts_of(ours).get_base_layer(), ATTRIBUTE)
    enable(ours, implementation="reference")
    assert_equal_steps(step(ours, tokens), expected)


def test_adapters_that_follow_the_first_forward_are_told(device, peft_models):
    model = chosen_by_name("qwen3_moe", device)
    tokens = draw_tokens(model)
    model(input_ids=tokens)
    adapted = peft_models.adapt(model, peft_models.lora())
    for _ in range(2):  # also after `disable`, which restores the name
        with pytest.warns(UserWarning, match=TOLD.format("Qwen3Moe")):
            adapted(input_ids=tokens)
        enable(adapted)
        adapted(input_ids=tokens)
        disable(adapted)


def test_adapters_of_compiled_experts_are_told(device, peft_models):
    adapted = peft_models.adapt(chosen_by_name("qwen3_moe", device), peft_models.lora())
    wrapper = adapted.base_model.model.model.layers[0].mlp.experts
    inputs = draw_routing(wrapper.get_base_layer(), torch.float32)
    with pytest.warns(UserWarning, match=TOLD.format("Qwen3Moe")):
        torch.compile(wrapper, backend="aot_eager")(*inputs)


@slow  # a process that imports transformers
def test_a_called_model_unpickles_in_a_new_process(tmp_path, device):
    model = chosen_by_name("qwen3_moe", device)
    tokens = draw_tokens(model)
    torch.save((model, tokens, model(input_ids=tokens).logits.detach()), tmp_path / "pickled.pt")
    run_python(["-c", PICKLED], cwd=tmp_path, interpret=True)
