"""Small random transformers models, and functions that run them and compare their results."""

import copy

import pytest
import torch
import transformers
from packaging.version import Version

from moe_kernels.testing import assert_accurate
from moe_layers.integrations.transformers import enable

from ..checkpoint.tiny_models import config_class_of, config_fields, known_fields, model_class

transformers.logging.set_verbosity_error()

since_5_23 = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="tested with transformers 5.23"
)
# Models whose eager experts always compute in float32, so that a float64 run would not be exact.
FLOAT32_EAGER = {"openai_privacy_filter"}

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = {**SIZES, "moe_intermediate_size": 16, "num_experts": 8}

# Arguments of all Trainers: no output, and the CPU if there is no GPU.
QUIET = {"report_to": [], "disable_tqdm": True, "use_cpu": not torch.cuda.is_available()}

OWN_FIELDS = {
    "dbrx": {"d_model": 64, "hidden_size": 64},
    "nemotron_h": {"hybrid_override_pattern": "*E"},  # Mamba layers would look for kernels online
    "muse_spark_text": {"moe_hidden_size": 20},
    "step3p7_text": {"share_expert_dim": 24, "sliding_window": 8},
}


def model_class_of(model_type):
    if model_type == "step3p7_text":
        from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

        return Step3p7TextModel
    return model_class(model_type)


def config_of(model_type, **changes):
    if model_type == "step3p7_text" and Version(transformers.__version__) >= Version("5.17"):  # not in the mapping
        from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig as config_class
    else:
        config_class = config_class_of(model_type)
    return tiny_config(config_class, model_type, **changes)


def tiny_config(config_class, model_type, **changes):
    fields = known_fields(config_class, config_fields(model_type)) | OWN_FIELDS.get(model_type, {})
    if model_type == "dbrx":
        sizes = {"moe_num_experts": 6, "moe_top_k": 3, "ffn_hidden_size": 20, "hidden_size": fields["d_model"]}
        config = config_class(**fields, ffn_config=sizes, attn_config={"clip_qkv": 8.0})
        config.attn_config.rope_theta = 1e4
        return config
    return config_class(**{**fields, **changes})


def skip_old(model_type):
    if model_type == "dbrx" and Version(transformers.__version__) < Version("5.17"):
        pytest.skip("DBRX's experts of transformers before 5.17 multiply by transposed matrices")
    if model_type == "jetmoe" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("JetMoE of transformers before 5.23 is refused")


def build(model_type, device="cpu", dtype=torch.float32, **changes):
    """Return a model in evaluation mode with weights of unit scale."""
    torch.manual_seed(0)
    config = config_of(model_type, **changes)
    plain = "batched_mm" if model_type in FLOAT32_EAGER else "eager"  # transformers' own experts in plain PyTorch
    model = model_class_of(model_type)._from_config(config, experts_implementation=plain).eval()
    return initialise(model).to(device, dtype)


def initialise(model):
    """Give a model weights of unit scale."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point():
                tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 5)  # experts by token, distinct in a row
            elif tensor.dim() > 1:
                tensor.copy_(torch.randn(tensor.shape) * tensor.shape[-1] ** -0.5)
            elif "bias" in name:
                tensor.copy_(torch.randn(tensor.shape) * 0.3)
    for module in model.modules():
        if hasattr(module, "limit"):
            module.limit = 1.5  # values of unit scale reach this limit
    return model


def draw_tokens(model, batch=2, length=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, model.config.vocab_size, (batch, length), generator=generator).to(model.device)


def logits_of(model):
    """Return the logits of `draw_tokens(model)`, without gradients."""
    with torch.no_grad():
        return model(draw_tokens(model)).logits


def enabled_logits(models, implementation="reference"):
    """Enable models. Return the logits of each."""
    for model in models:
        enable(model, implementation=implementation)
    return [logits_of(model) for model in models]


def experts_of(model):
    """Return name and experts of each block."""
    return [(name, module) for name, module in model.named_modules() if name.endswith(".experts")]


def step(model, tokens, **options):
    """Return the output, the router logits if any, and all gradients by name of a loss with random weights per output.

    Args:
        tokens: ids of tokens, or all inputs by name.
    """
    model.zero_grad()
    options = {"output_router_logits": True, "use_cache": False, **options}
    result = model(**(tokens if isinstance(tokens, dict) else {"input_ids": tokens}), **options)
    out = result.last_hidden_state if "last_hidden_state" in result else result.logits
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator).to(out)
    (out * dout).sum().backward()
    parameters = {name.removeprefix("_orig_mod."): p for name, p in model.named_parameters()}  # in a compiled model
    gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    router_logits = [logits.detach().flatten() for logits in getattr(result, "router_logits", None) or ()]
    return out.detach(), torch.cat(router_logits) if router_logits else out.new_empty(0), gradients


def make_trainer(model, directory, rows, **settings):
    """Return a Trainer on rows of token ids, with a constant learning rate. It uses the CPU if there is no GPU."""
    settings = {"per_device_train_batch_size": 2, "lr_scheduler_type": "constant", **QUIET, **settings}
    arguments = transformers.TrainingArguments(str(directory), **settings)
    data = [{"input_ids": row, "labels": row} for row in rows]
    return transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4])


def assert_same_bits(actual, expected):
    """Compare the results of two steps."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def assert_same_step(actual, baseline, exact):
    """Apply the error budget to outputs, router logits and all gradients together, relative to their largest values."""
    for name, a, b, e in zip(("output", "router logits"), actual[:2], baseline[:2], exact[:2], strict=True):
        assert_accurate(a, b, e, name)
    assert actual[2].keys() == baseline[2].keys() == exact[2].keys()
    largest = {name: gradient.abs().max().item() for name, gradient in exact[2].items()}
    for name, size in largest.items():
        assert size or not actual[2][name].any(), name
    scaled = [
        torch.cat([gradient.flatten() / (largest[name] or 1.0) for name, gradient in gradients.items()])
        for gradients in (actual[2], baseline[2], exact[2])
    ]
    assert_accurate(*scaled, "gradients")


def check_change(model, change, tokens=None):
    """Compare a step after `change(model)` with the step before it, by `assert_same_step`.

    Returns:
        the result of `change`, the step after it and the step before it.
    """
    tokens = draw_tokens(model) if tokens is None else tokens
    baseline, exact = step(model, tokens), step(copy.deepcopy(model).double(), tokens)
    result = change(model)
    actual = step(model, tokens)
    assert_same_step(actual, baseline, exact)
    return result, actual, baseline


def assert_close_gradients(actual, expected, tolerance, smallest=0.0):
    """Compare gradients by name. The limit is relative to the largest value of a gradient, plus `smallest`."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        atol = tolerance * gradient.abs().max().item() + smallest
        torch.testing.assert_close(actual[name], gradient, rtol=0.0, atol=atol, msg=name)
