"""Peak memory of `iter_weights`: of a process, and of PyTorch's allocations for each kind of model."""

import gc
from importlib import import_module

import pytest
from torch import nn
from torch.profiler import ProfilerActivity, profile

from moe_layers import LoRA
from moe_layers.experts.quantization import quantize_experts_
from moe_layers.serving import iter_weights

from ..checkpoint.test_peak_memory import SLACK, peak_bytes
from ..checkpoint.test_peak_memory import pytestmark as only_on_linux
from ..layers import moe_layer
from ..tiers import slow

LAYERS, EXPERTS, WIDTH = 4, 16, 512
LAYER_BYTES = EXPERTS * 3 * WIDTH * WIDTH * 4  # 48 MiB

PREPARATION = """
import warnings
warnings.simplefilter("ignore")
import torch, transformers
from moe_layers.serving import iter_weights, pack
def make(width, layers):
    config = transformers.Qwen3MoeConfig(vocab_size=64, hidden_size=width, moe_intermediate_size=width,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=16)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if {adapted}:
        import peft
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[], target_parameters=names))
    return model
list(pack(iter_weights(make(64, 1), "vllm"), 1 << 20))
model = make({WIDTH}, {LAYERS})
"""
READ = 'for _ in pack(iter_weights(model, "vllm"), 1 << 20): pass'


@only_on_linux
@slow  # two processes that import transformers and one that imports PEFT
@pytest.mark.parametrize("adapted", [False, True])
def test_at_most_one_layer_beyond_the_model(adapted):
    """A plain model needs nothing, because experts are views. With adapters, a parameter of a layer is needed."""
    peak = peak_bytes(READ, PREPARATION.format(adapted=adapted, WIDTH=WIDTH, LAYERS=LAYERS))
    assert peak < (LAYER_BYTES if adapted else 0) + SLACK // 3, peak


def peak_of(model, **options):
    """Return the most bytes that PyTorch allocates at once while the weights are read, one at a time."""

    def read():
        for _ in iter_weights(model, **options):
            gc.collect()  # Triton's interpreter holds its arguments in cycles

    gc.freeze()  # so that collections take little time
    read()  # creates what only the first use creates
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        read()
    gc.unfreeze()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def num_bytes(module):
    return sum(parameter.numel() * 4 for parameter in module.parameters())


def own(format=None, adapted=False):
    layer = moe_layer(64, 64, 16, 2)
    size = num_bytes(layer)
    if format is not None:
        quantize_experts_(layer, format)
    if adapted:
        layer.add_lora(LoRA(2, 4))
    return nn.ModuleDict({"moe": layer}), size


def qwen(adapted=False):
    transformers = pytest.importorskip("transformers", minversion="5.7", reason="transformers 5.7 or later is needed")
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 64}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 16}
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**sizes))
    size = num_bytes(model.model.layers[0])
    if adapted:
        from ..integrations.peft_models import adapt, lora

        model = adapt(model, lora())
    return model, size


def quantised(file):
    """Return the stored model of a file of `tests/integrations`, which needs transformers, and a plain layer's size."""
    stored, plain = import_module(f"tests.integrations.{file}").pair()
    return stored, num_bytes(plain.model.layers[0])


KINDS = {  # the model, options of iter_weights, and layers beyond the model
    "plain": (qwen, {}, 0),
    "adapters": (lambda: qwen(adapted=True), {}, 1),
    "FP8": (lambda: quantised("test_quantized_models"), {}, 1),
    "FP8 kept": (lambda: quantised("test_quantized_models"), {"keep_quantized": True}, 0),
    "MXFP4": (lambda: quantised("test_mxfp4"), {}, 1),
    "MXFP4 kept": (lambda: quantised("test_mxfp4"), {"keep_quantized": True}, 0),
    "own": (own, {}, 0.1),  # an expert
    "own, adapters": (lambda: own(adapted=True), {}, 1),
    "own, int8": (lambda: own("int8"), {}, 1),
    "own, mxfp4 and adapters": (lambda: own("mxfp4", adapted=True), {}, 1),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_model_needs_at_most_one_layer(kind):
    make, options, layers = KINDS[kind]
    model, size = make()
    assert peak_of(model, **options) <= layers * size
