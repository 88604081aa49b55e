"""PEFT's LoRA of expert parameters, computed by the experts' op: PEFT itself, in float64, is the golden result."""

import copy
from functools import partial

import pytest
import torch
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode

from moe_kernels.testing import assert_accurate
from moe_layers.integrations.transformers import disable, enable

from .models import assert_same_step, build, check_change, draw_tokens, logits_of, step
from .peft_models import (
    TARGETS,
    WARNINGS,
    adapt,
    assert_equal_steps,
    compare_steps,
    enabled_and_adapted,
    float64_pair,
    lora,
    peft,
    randomise,
)

pytestmark = WARNINGS
enable_reference = partial(enable, implementation="reference")
several_adapters = pytest.mark.skipif(
    Version(peft.__version__) < Version("0.21"), reason="before 0.21 peft has one adapter of parameters per model"
)
# The configuration's field with the width of an expert, and the width D of a token.
D_FF = {
    "qwen3_moe": ("moe_intermediate_size", 56),
    "mixtral": ("intermediate_size", 64),
    "gpt_oss": ("intermediate_size", 64),
    "deepseek_v3": ("moe_intermediate_size", 60),
    "olmoe": ("intermediate_size", 40),
}


@pytest.mark.parametrize("sizes", ["own", "2F = D", "F = D"])
@pytest.mark.parametrize(
    ("model_type", "r"), [("qwen3_moe", 1), ("mixtral", 3), ("gpt_oss", 8), ("deepseek_v3", 3), ("olmoe", 8)]
)
@pytest.mark.parametrize("order", ["enabled", "adapted"])
def test_peft_is_golden(model_type, r, sizes, order):
    """Test both orders: `order` says whether the model was enabled or adapted first."""
    name, d_model = D_FF[model_type]
    changes = {"own": {}, "2F = D": {name: d_model // 2}, "F = D": {name: d_model}}[sizes]
    golden = adapt(build(model_type, dtype=torch.float64, **changes), lora(r))
    ours, _ = enabled_and_adapted(build(model_type, dtype=torch.float64, **changes), order, lora(r))
    _, _, gradients = compare_steps(ours, golden)
    assert {name.rsplit(".", 3)[1] for name in gradients} == {"lora_A", "lora_B"}


@pytest.mark.parametrize("model_type", ["llama4_text", "longcat_flash"])
def test_blocks_whose_forward_is_replaced(model_type):
    """LongCat's up parameter also holds unused matrices of zero experts. Its router computes in float32."""
    names = {"llama4_text": "feed_forward.experts", "longcat_flash": "mlp.experts"}
    targets = [f"{names[model_type]}.{parameter}" for parameter in ("gate_up_proj", "down_proj")]
    report, *_ = check_change(adapt(build(model_type), lora(targets=targets)), enable_reference)
    assert len(report.adapted) == 4


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_kernels_are_as_accurate_as_peft(model_type, device):
    model = adapt(build(model_type, device, num_hidden_layers=1), lora())
    check_change(model, partial(enable, implementation="triton"))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_float32_adapters_of_bfloat16_weights(model_type):
    model = adapt(build(model_type, dtype=torch.bfloat16), lora())
    dtypes = {"lora_" in name: parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes == {False: torch.bfloat16, True: torch.float32}
    _, actual, _ = check_change(model, enable_reference)
    assert all(gradient.dtype == torch.float32 for gradient in actual[2].values())


@pytest.mark.parametrize("targets", [TARGETS[:1], TARGETS[1:]], ids=["up", "down"])
def test_one_adapted_parameter(targets):
    golden, ours = float64_pair(config=lora(targets=targets))
    key = targets[0].rsplit(".", 1)[1]
    assert [name.rsplit(".", 1)[1] for name in enable_reference(ours).adapted] == [key, key]
    compare_steps(ours, golden)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")  # they do
def test_ranks_and_scales_of_their_own():
    patterns = {"rank_pattern": {"experts.gate_up_proj": 5}, "alpha_pattern": {"experts.down_proj": 2}}
    golden, ours = float64_pair(config=lora(use_rslora=True, **patterns))
    assert len({parameter.shape for name, parameter in ours.named_parameters() if "lora_A" in name}) == 2
    enable_reference(ours)
    compare_steps(ours, golden)


class Sizes(TorchDispatchMode):
    """Records the number of elements of each new tensor. Views of parameters are not new."""

    def __init__(self, model):
        super().__init__()
        self.known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for out in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in self.known:
                self.sizes.append(out.numel())
        return result


def num_large(model, tokens, smallest):
    """Return how many tensors as large as the smallest weight one forward and backward make."""
    with Sizes(model) as made:
        step(model, tokens)
    return sum(size >= smallest for size in made.sizes)


@pytest.mark.parametrize("order", ["enabled", "adapted"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_no_tensor_of_the_size_of_the_weights(model_type, order):
    model = build(model_type, **{D_FF[model_type][0]: 128})
    tokens = draw_tokens(model, batch=1, length=5)
    smallest = model.model.layers[0].mlp.experts.down_proj.numel()
    model.requires_grad_(False)
    model.enable_input_require_grads()
    enable_reference(model)
    assert num_large(model, tokens, smallest) == 0
    if order == "adapted":
        disable(model)
    model = adapt(model, lora())
    if order == "adapted":
        assert num_large(model, tokens, smallest)  # PEFT makes some
        enable_reference(model)
    assert num_large(model, tokens, smallest) == 0


def with_two_adapters(model_type, targets=TARGETS):
    """Return a model with two active adapters of different ranks."""
    model = adapt(build(model_type, dtype=torch.float64), lora(3, 5, targets))
    model.add_adapter("other", lora(2, 7, targets))
    randomise(model)
    model.base_model.set_adapter(["default", "other"])
    return model


@several_adapters
def test_two_active_adapters_of_different_ranks():
    model = with_two_adapters("gpt_oss")
    ours = copy.deepcopy(model)
    enable_reference(ours)
    assert len(compare_steps(ours, model)[2]) == 2 * 2 * 4


class Pair:
    """Holds an adapted model for PEFT and an equal model for us. Each change is made to both models."""

    def __init__(self, model_type):
        self.golden, self.ours = float64_pair(model_type)
        enable_reference(self.ours)
        self.tokens = draw_tokens(self.golden)

    def apply(self, change):
        """Change both models, and compare their results. Return PEFT's output."""
        self.golden, self.ours = (change(model) or model for model in (self.golden, self.ours))
        expected = self.golden(input_ids=self.tokens).logits
        if not expected.requires_grad:
            actual = self.ours(input_ids=self.tokens).logits
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10 * expected.abs().max().item())
            return expected
        compare_steps(self.ours, self.golden)
        return expected.detach()


@several_adapters
def test_two_wrappers_of_one_parameter():
    """The golden model has both adapters in one wrapper."""
    golden = with_two_adapters("qwen3_moe", TARGETS[1:])
    ours = copy.deepcopy(golden)
    for layer in ours.base_model.model.model.layers:
        inner = layer.mlp.experts
        outer = copy.deepcopy(inner)
        outer.base_layer = inner
        inner.set_adapter("default")
        outer.set_adapter("other")
        layer.mlp.experts = outer
    enable_reference(ours)
    torch.testing.assert_close(logits_of(ours), logits_of(golden), rtol=0, atol=1e-10)


def deactivate(model):
    for module in model.modules():
        if type(module).__name__ == "ParamWrapper":
            module.set_adapter([])


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_adapters_disabled_merged_and_deleted_after_enable(model_type):
    pair = Pair(model_type)
    adapted = pair.apply(lambda model: None)
    disabled = pair.apply(lambda model: model.base_model.disable_adapter_layers())
    assert not torch.allclose(disabled, adapted)
    assert torch.equal(pair.apply(lambda model: model.base_model.enable_adapter_layers()), adapted)
    torch.testing.assert_close(pair.apply(lambda model: model.merge_adapter()), adapted)
    reasons = enable_reference(pair.ours).adapted_by_wrapper
    assert len(reasons) == 4 and set(reasons.values()) == {"it is merged"}
    torch.testing.assert_close(pair.apply(lambda model: model.unmerge_adapter()), adapted)
    torch.testing.assert_close(pair.apply(deactivate), disabled)
    torch.testing.assert_close(pair.apply(lambda model: model.base_model.unload()), disabled)


@several_adapters
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_adapters_added_and_switched_after_enable(model_type):
    pair = Pair(model_type)
    first = pair.apply(lambda model: model.add_adapter("other", lora(2)))
    assert torch.equal(pair.apply(lambda model: randomise(model)), first)
    assert not torch.allclose(pair.apply(lambda model: model.set_adapter("other")), first)
    assert torch.equal(pair.apply(lambda model: model.set_adapter("default")), first)
    assert torch.equal(pair.apply(lambda model: model.delete_adapter("other")), first)


def test_merge_and_unload():
    golden, ours = float64_pair("gpt_oss")
    enable_reference(ours)
    merged = ours.merge_and_unload()
    torch.testing.assert_close(logits_of(merged), logits_of(golden))
    assert not any(hasattr(module, "base_layer") for module in merged.modules())
    disable(merged)
    assert torch.equal(logits_of(merged), logits_of(golden.merge_and_unload()))


@pytest.mark.parametrize("order", ["enabled", "adapted"])
def test_disable_gives_the_adapters_back_to_peft(order):
    golden = adapt(build("qwen3_moe"), lora())
    tokens = draw_tokens(golden)
    expected = step(golden, tokens)
    ours = build("qwen3_moe")
    if order == "enabled":
        enable_reference(ours)
    ours = adapt(ours, lora())
    before = {name: set(vars(module)) for name, module in ours.named_modules()}
    if order == "adapted":
        enable_reference(ours)
    assert not torch.equal(step(ours, tokens)[0], expected[0])
    disable(ours)
    again = step(ours, tokens)
    assert torch.equal(again[0], expected[0])
    assert all(torch.equal(gradient, expected[2][name]) for name, gradient in again[2].items())
    for name, module in ours.named_modules():
        assert "forward" not in vars(module) and not module._forward_pre_hooks, name
        added = {attribute for attribute in vars(module).keys() - before[name] if "moe_layers" in attribute}
        assert order == "enabled" or not added, name


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")  # the only API in 5.7
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant):
    golden, ours = float64_pair("gpt_oss")
    enable_reference(ours)
    calls = []
    experts = ours.get_base_model().model.layers[0].mlp.experts.get_base_layer()
    experts.register_forward_pre_hook(lambda *_: calls.append(None))
    for model in (golden, ours):
        model.train()
        model.base_model.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
    compare_steps(ours, golden, output_router_logits=False)
    assert len(calls) == 2  # it was recomputed


@pytest.mark.filterwarnings("ignore:moe_layers. PEFT itself computes the adapters:UserWarning")
@pytest.mark.parametrize("chosen", ["enabled", "by name"])
def test_inference_mode(chosen):
    """With the name alone PEFT makes the changed weights, as inference tensors."""
    golden, ours = float64_pair("gpt_oss")
    if chosen == "enabled":
        enable_reference(ours)
    else:
        ours.base_model.model.set_experts_implementation("moe_layers")
    with torch.inference_mode():
        actual, expected = logits_of(ours), logits_of(golden)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def test_autocast():
    golden, ours = float64_pair()
    tokens = draw_tokens(golden)
    golden, ours = golden.float(), ours.float()
    exact = step(copy.deepcopy(golden).double(), tokens)
    enable_reference(ours)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_step(step(ours, tokens), step(golden, tokens), exact)


def saved_files(model, directory):
    model.save_pretrained(directory)
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


@pytest.mark.parametrize("order", ["enabled", "adapted"])
def test_saved_files_are_those_of_peft(tmp_path, order):
    golden = adapt(build("qwen3_moe"), lora())
    ours, _ = enabled_and_adapted(build("qwen3_moe"), order)
    ours(input_ids=draw_tokens(golden))
    assert list(ours.state_dict()) == list(golden.state_dict())
    expected = saved_files(golden, tmp_path / "peft")
    assert saved_files(ours, tmp_path / "ours") == expected
    assert {"adapter_config.json", "adapter_model.safetensors"} <= expected.keys()


@pytest.mark.skipif(Version(peft.__version__).release[:2] == (0, 19), reason="peft 0.19 loads with transformers 5.5")
def test_adapters_loaded_into_an_enabled_model(tmp_path):
    model = adapt(build("qwen3_moe", dtype=torch.float64), lora())
    model.save_pretrained(tmp_path)
    loaded = build("qwen3_moe", dtype=torch.float64)
    enable_reference(loaded)
    loaded = peft.PeftModel.from_pretrained(loaded, tmp_path, is_trainable=True)
    compare_steps(loaded, model)


def test_copies_and_their_adapters():
    golden, ours = float64_pair()
    tokens = draw_tokens(golden)
    enable_reference(ours)
    twin = copy.deepcopy(ours)
    disable(ours)
    expected = step(golden, tokens)
    assert torch.equal(step(ours, tokens)[0], expected[0])
    assert_equal_steps(step(twin, tokens), expected)
    disable(twin)
    assert torch.equal(step(twin, tokens)[0], expected[0])


def step_of_block(block):
    tokens = torch.randn(2, 5, 56, generator=torch.Generator().manual_seed(0)).to(block.gate.weight)
    out = block(tokens)
    out.square().sum().backward()
    return torch.cat([out.flatten(), *(p.grad.flatten() for name, p in block.named_parameters() if "lora_" in name)])


# The compiler itself reads gradients of tensors that pass between graphs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("order", ["enabled", "adapted"])
def test_compiled_block(order, device):
    """Compiling takes seconds. Wrappers that are found while compiling break the graph once."""
    golden = adapt(build("qwen3_moe", device), lora()).base_model.model.model.layers[0].mlp
    baseline, exact = step_of_block(golden), step_of_block(copy.deepcopy(golden).double())
    ours, _ = enabled_and_adapted(build("qwen3_moe", device), order, implementation=None)
    block = ours.base_model.model.model.layers[0].mlp
    block.compile(backend="aot_eager", fullgraph=order == "adapted")
    assert_accurate(step_of_block(block), baseline, exact)
    assert "forward" in vars(block.experts) and "forward" in vars(block.experts.base_layer)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_modules_of_torchscript_can_be_added():
    """Reading the `forward` of the class of a TorchScript module raises an error."""
    torch.nn.Sequential(torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 2))))
