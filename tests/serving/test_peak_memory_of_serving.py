"""Peak memory of `iter_weights`, measured in a separate process."""

import pytest

from ..checkpoint.test_peak_memory import MIB, SLACK, pytestmark, run_python  # noqa: F401
from ..tiers import slow

LAYERS, EXPERTS, WIDTH = 4, 16, 512
LAYER_BYTES = EXPERTS * 3 * WIDTH * WIDTH * 4  # 48 MiB

MEASURE = """
import gc, warnings
warnings.simplefilter("ignore")
import torch, transformers
from moe_layers.serving import iter_weights, pack
def kib(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))
def make(width, layers):
    config = transformers.Qwen3MoeConfig(vocab_size=64, hidden_size=width, moe_intermediate_size=width,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=16)
    return wrapped(transformers.AutoModelForCausalLM.from_config(config))
def wrapped(model):
    if {adapted}:
        import peft
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[], target_parameters=names))
    return model
list(pack(iter_weights(make(64, 1), "vllm"), 1 << 20))
model = make(WIDTH, LAYERS)
gc.collect()
open("/proc/self/clear_refs", "w").write("5")  # reset the peak
before = kib("VmRSS")
for bucket in pack(iter_weights(model, "vllm"), 1 << 20):
    pass
print((kib("VmHWM") - before) * 1024)
"""


@slow  # two processes that import transformers and one that imports PEFT
@pytest.mark.parametrize("adapted", [False, True])
def test_at_most_one_layer_beyond_the_model(adapted):
    """Nothing for a plain model, whose experts are views; a parameter of a layer for one with adapters."""
    code = MEASURE.replace("{adapted}", str(adapted)).replace("WIDTH, LAYERS", f"{WIDTH}, {LAYERS}")
    peak = int(run_python(["-c", code], MALLOC_MMAP_THRESHOLD_=str(MIB // 4)).stdout.split()[-1])
    assert peak < (LAYER_BYTES if adapted else 0) + SLACK // 3, peak
