"""Every MoE class of the installed transformers: computed as by its own code, or refused with the reason.

The classes are read from transformers' source, so that a new release brings its own cases. A tiny model is built from
the configuration class of each. The steps that ask for float32 compute in float64, too, so that results are equal.
"""

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from packaging.version import Version
from transformers import PreTrainedModel

from moe_layers.integrations.transformers import enable
from moe_layers.integrations.transformers.experts.experts_forward import ATTRIBUTE

from ..checkpoint.tiny_models import LATENT_ATTENTION, ROPE, known_fields
from ..tiers import default_tier
from . import sharded_models
from .models import draw_tokens, initialise, step, tiny_config

pytestmark = [
    pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="earlier models differ"),
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_(en|dis)able:FutureWarning"),
]

# Decorated classes, and names of experts, of blocks around them and of their routers.
_CLASSES = re.compile(
    r"^@use_experts_implementation.*\n(?:@.*\n)*class (\w+)"
    r"|^class (\w*Experts\w*|\w+Mo[eE]|\w+Mo[eE]Block|\w+SparseMLP|\w+MoA|\w*Router|\w*TopKGating)\(",
    re.MULTILINE,
)
_ROUTERS = re.compile(r"Router$|TopKGating$")


def moe_classes() -> dict[str, set[str]]:
    """Return the names of MoE classes by folder of transformers' models. Imports none of them."""
    models = Path(transformers.__file__).parent / "models"
    sources = {path.parent.name: path.read_text() for path in sorted(models.glob("*/modeling_*.py"))}
    found = {folder: {"".join(names) for names in _CLASSES.findall(source)} for folder, source in sources.items()}
    return {folder: names for folder, names in found.items() if names}


CLASSES = moe_classes()

NO_EXPERTS = {
    "AriaSharedExpertsMLP": "shared experts",
    "InklingSharedExperts": "shared experts",
    "GraniteDoclingDensityRouter": "chooses between two paths of a sample",
    "Qwen3OmniMoeTextTopKRouter": "in no model: those of the thinker and the talker derive from it",
    "JetMoeMoA": "a mixture of attention, which JetMoE computes itself",
}
DROPOUT = r"\(each expert is a module of its own, with dropout between its matrices\)"
MASK = r"\(transformers reads the router's mask as expert ids, so only experts 0 and 1 run\)"
REFUSED = {
    "doge": r"DogeCDMoE \(its experts are pairs of vectors, found by product keys\)",
    "nllb_moe": rf"NllbMoeExperts {MASK}, NllbMoeSparseMLP {MASK}",
    "switch_transformers": rf"SwitchTransformersExperts {DROPOUT}, SwitchTransformersSparseMLP {DROPOUT}",
    "vitpose_backbone": r"VitPoseNaiveMoe \(its experts are single matrices, chosen by data set\)",
}
COMPUTED = sorted(folder for folder, names in CLASSES.items() if folder not in REFUSED and names - NO_EXPERTS.keys())
# Models of transformers that have no gradient checkpointing.
NO_CHECKPOINTING = {"DiffusionGemmaEncoderTextModel", "JetMoeModel"}

LINEAR_ATTENTION = {"linear_head_dim": 8, "linear_num_heads": 4}
VISION = {"adapter_in_dim": 32, "adapter_out_dim": 32, "patch_size": 4, "num_attention_heads": 2}
NLLB = {
    f"{part}_{name}": value
    for part in ("encoder", "decoder")
    for name, value in {"layers": 1, "attention_heads": 4, "ffn_dim": 16, "sparse_step": 1}.items()
}
IMAGES = {"image_size": [16, 16], "patch_size": [4, 4]}
# Fields that differ from those of `tiny_config`, by model type.
FIELDS = {
    "axk1": LATENT_ATTENTION,
    "axk2": LATENT_ATTENTION,
    "doge": {"is_moe": True, "num_experts": 16},
    "dots3_note_vision_encoder": {**VISION, "per_layer_config": {1: {"num_local_experts": 4}}},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [12, 9], "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
    "glm4v_moe_text": {"rope_parameters": {**ROPE, "mrope_section": [1, 0, 1]}},
    "glm5_next_text": LINEAR_ATTENTION,
    "kimi_linear": LINEAR_ATTENTION,
    "mistral4": {"head_dim": 16},
    "nemotron_h": {"hybrid_override_pattern": "*E"},
    "nllb-moe": NLLB,
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 16},
    "step3p5": {"sliding_window": 8, "share_expert_dim": 24},
    "vitpose_backbone": {"num_experts": 3, "part_features": 8, **IMAGES},
    "zaya": {"num_experts_per_tok": 1},
}
WIDTHS = {"hidden_size": 32, "d_model": 32}
MOST_PARAMETERS = 3_000_000


def tiny_models(folder, **changes):
    """Yield models that together hold all MoE classes of a folder, each with the names that it adds."""
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    left, problems = CLASSES[folder] - NO_EXPERTS.keys(), []
    for kind in list(vars(module).values()):
        if not (inspect.isclass(kind) and issubclass(kind, PreTrainedModel) and kind.__module__ == module.__name__):
            continue
        config_class = kind.config_class
        if not left or "forward" not in vars(kind) or not inspect.isclass(config_class):
            continue
        own = {**FIELDS.get(config_class.model_type, {}), **changes}
        try:
            config = tiny_config(config_class, config_class.model_type, **known_fields(config_class, WIDTHS), **own)
            with torch.device("meta"):
                planned = kind._from_config(config)
        except (AttributeError, TypeError, ValueError, RuntimeError, StrictDataclassError) as error:
            problems.append(f"{kind.__name__}: {error!r}")
            continue
        held = left & {type(part).__name__ for part in planned.modules()}
        if sum(parameter.numel() for parameter in planned.parameters()) > MOST_PARAMETERS:
            problems.append(f"{kind.__name__}: too large")
        elif held:
            torch.manual_seed(0)
            left -= held
            yield initialise(kind._from_config(config, experts_implementation="eager")).double(), held
    assert not left, f"no tiny model holds {left}; {problems}"


def inputs_of(model):
    """Return the inputs of a forward."""
    kind, width = type(model).__name__, model.config.hidden_size
    if kind == "Dots3NoteVisionModel":
        pixels = torch.randn(16, 3 * model.config.patch_size**2, dtype=torch.float64)
        return {"pixel_values": pixels, "grid_thw": torch.tensor([[1, 4, 4]])}
    if kind == "Qwen3OmniMoeTalkerModel":  # this model has no embedding of `input_ids`
        return {"inputs_embeds": torch.randn(2, 12, width, dtype=torch.float64)}
    tokens = draw_tokens(model)
    if kind == "Ernie4_5_VLMoeTextModel":  # tokens of text and of images have different experts
        return {"input_ids": tokens, "moe_mm_token_type_ids": tokens % 2}
    return {"input_ids": tokens}


@pytest.fixture
def all_in_float64():
    with sharded_models.all_in_float64():
        yield


def run(model, inputs, experts):
    """Return the results of a step in evaluation, in training and with gradient checkpointing."""
    results = [step(model.eval(), inputs)]
    calls = []
    hooks = [part.register_forward_pre_hook(lambda part, _: calls.append(part)) for part in experts]
    for checkpointing in (False, True) if type(model).__name__ not in NO_CHECKPOINTING else (False,):
        if checkpointing:
            model.gradient_checkpointing_enable()
        calls.clear()
        torch.manual_seed(1)
        results.append(step(model.train(), inputs))
        assert not checkpointing or len(calls) > len(set(calls))  # experts were recomputed
        if checkpointing:
            model.gradient_checkpointing_disable()
    for hook in hooks:
        hook.remove()
    return results


def assert_equal(actual, expected):
    """Compare outputs, router logits and gradients, relative to the largest value of each."""
    assert actual[2].keys() == expected[2].keys()
    pairs = [*zip(actual[:2], expected[:2], strict=True), *((actual[2][name], expected[2][name]) for name in actual[2])]
    for a, e in pairs:
        assert a.shape == e.shape and a.dtype == e.dtype == torch.float64
        assert not e.numel() or (a - e).abs().max() <= 1e-11 * e.abs().max()


def check(folder, **changes):
    """Compare each tiny model of a folder with itself enabled. Return the activations."""
    activations = set()
    for model, held in tiny_models(folder, **changes):
        experts = [part for part in model.modules() if type(part).__name__ in held]
        inputs = inputs_of(model)
        expected = run(model, inputs, experts)
        report = enable(model, implementation="reference")
        assert report.blocks >= 1
        computed = [part for part in model.modules() if hasattr(part, ATTRIBUTE)]
        inside = [inner for part in computed for inner in part.modules()]
        around = [part for part in model.modules() if not set(computed).isdisjoint(part.modules())]
        names = {type(part).__name__ for part in (*inside, *around)}
        assert all(name in names or _ROUTERS.search(name) for name in held), held
        for actual, wanted in zip(run(model, inputs, experts), expected, strict=True):
            assert_equal(actual, wanted)
        assert all(any(p.grad is not None and p.grad.any() for p in part.parameters()) for part in computed)
        activations |= {activation for _, activation, _ in report.kinds}
    return activations


# gpt_oss: transposed, biases. jetmoe and llama4: replaced forwards. muse_spark: a norm behind the experts.
FEW = ["gpt_oss", "jetmoe", "llama4", "muse_spark", "qwen3_moe"]


@pytest.mark.parametrize("folder", default_tier(COMPUTED, FEW))
def test_computed_as_by_the_model(folder, all_in_float64):
    assert check(folder)


def test_clamped_gelu(all_in_float64):
    """transformers' own tests of DeepSeek-V4 use this activation."""
    assert check("deepseek_v4", hidden_act="gelu") == {"clamped_geglu(limit=1.5)"}


@pytest.mark.parametrize("folder", default_tier(REFUSED, ["nllb_moe"]))
def test_refused_with_the_reason(folder):
    for model, _ in tiny_models(folder):
        with pytest.raises(ValueError, match=f"must support all experts, got unsupported {REFUSED[folder]}"):
            enable(model)


def test_nllb_runs_two_experts_only():
    """`enable` refuses NLLB-MoE for this reason."""
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_sparse_step": 1, "decoder_sparse_step": 1}
    config = transformers.NllbMoeConfig(d_model=8, num_experts=4, moe_token_dropout=0.0, **sizes)
    block = transformers.models.nllb_moe.modeling_nllb_moe.NllbMoeSparseMLP(config, ffn_dim=8)
    tokens = torch.randn(1, 64, 8)
    chosen, *_ = block.router(tokens.view(-1, 8))
    assert (chosen.sum(0) > 0).all()
    experts = [block.experts[f"expert_{index}"] for index in range(4)]
    block(tokens).sum().backward()
    assert [part.fc1.weight.grad is not None for part in experts] == [True, True, False, False]


def test_every_class_is_in_one_list():
    """A class of another kind than those that the names describe fails here or in the tests above."""
    assert REFUSED.keys() <= CLASSES.keys()
    assert NO_EXPERTS.keys() <= set().union(*CLASSES.values())
    assert len(COMPUTED) > 60
