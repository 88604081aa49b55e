"""Peak memory of loading and converting, measured in a separate process."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ..processes import run_python
from ..tiers import default_tier

MIB = 2**20
EXPERTS, D_MODEL, D_FF = 16, 1024, 1024
LAYER_BYTES = EXPERTS * 3 * D_MODEL * D_FF * 4  # 192 MiB
# Files are unmapped after every 32 MiB read; the rest is for the allocator and the program's own pages.
SLACK = (32 + 16) * MIB

PREPARATION = """
import torch
from moe_layers import MoEFeedForward
from moe_layers.checkpoint.model.convert import convert
MoEFeedForward.from_checkpoint("tests/golden/mixtral", 1)  # imports what is imported on the first use
torch.ones(1000, 1000).copy_(torch.ones(1000, 1000, dtype=torch.bfloat16))
"""
MEASURE = """
import gc
def kib(file, field):
    return next(int(line.split()[1]) for line in open(f"/proc/self/{file}") if line.startswith(field))
gc.collect()
open("/proc/self/clear_refs", "w").write("5")  # reset the peak
before = kib("smaps_rollup", "Rss:")  # exact, whereas `status` counts pages in batches
{action}
print((max(kib("status", "VmHWM:"), kib("smaps_rollup", "Rss:")) - before) * 1024)
"""


def peak_bytes(action, preparation=PREPARATION):
    """Return the most memory that `action` takes in a new process, beyond what the process has after `preparation`."""
    code = preparation + MEASURE.replace("{action}", action)
    # Return freed memory to the system at once, so that the allocator's reserve is not measured.
    return int(run_python(["-c", code], MALLOC_MMAP_THRESHOLD_=str(MIB // 4)).stdout.split()[-1])


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """Write two layers of a Mixtral, fused and per expert, in one file each."""
    directory = tmp_path_factory.mktemp("big")
    config = {"model_type": "mixtral", "hidden_size": D_MODEL, "intermediate_size": D_FF, "num_experts_per_tok": 2}
    config |= {"num_local_experts": EXPERTS}
    up, down = torch.rand(2 * D_FF, D_MODEL), torch.rand(D_MODEL, D_FF)
    per_expert, fused = {}, {}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp."
        for tensors in (per_expert, fused):
            tensors[f"{prefix}gate.weight"] = torch.rand(EXPERTS, D_MODEL)
        for e in range(EXPERTS):
            for name, tensor in (("w1", up[:D_FF]), ("w3", up[D_FF:]), ("w2", down)):
                per_expert[f"{prefix}experts.{e}.{name}.weight"] = tensor.clone()
        fused[f"{prefix}experts.gate_up_proj"] = up.expand(EXPERTS, -1, -1).contiguous()
        fused[f"{prefix}experts.down_proj"] = down.expand(EXPERTS, -1, -1).contiguous()
    for name, tensors in (("per_expert", per_expert), ("fused", fused)):
        (directory / name).mkdir()
        save_file(tensors, directory / name / "model.safetensors")
        (directory / name / "config.json").write_text(json.dumps(config))
    return directory


LAYOUTS, DTYPES = ("per_expert", "fused"), ("float32", "bfloat16")
pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")


@pytest.mark.parametrize(("layout", "dtype"), default_tier(product(LAYOUTS, DTYPES), [("fused", "float32")]))
def test_loading_takes_one_layer_and_one_tensor(layout, dtype, big):
    size = LAYER_BYTES // (1 if dtype == "float32" else 2)
    load = f"layer = MoEFeedForward.from_checkpoint({str(big / layout)!r}, 1, dtype=torch.{dtype})"
    peak = peak_bytes(load)
    assert size <= peak < size + D_MODEL * D_FF * 4 + SLACK


@pytest.mark.parametrize("layout", default_tier(LAYOUTS, ["per_expert"]))
def test_a_range_of_experts_takes_no_more_than_these(layout, big):
    load = f"layer = MoEFeedForward.from_checkpoint({str(big / layout)!r}, 1, experts=range(5, 7))"
    assert peak_bytes(load) < 2 / EXPERTS * LAYER_BYTES + SLACK


def test_converting_holds_one_shard(big, tmp_path):
    shard_bytes = 96 * MIB  # the checkpoint has 384 MiB
    action = f"convert({str(big / 'fused')!r}, {str(tmp_path / 'out')!r}, 'per_expert', max_shard_bytes={shard_bytes})"
    assert shard_bytes - 2 * D_MODEL * D_FF * 4 <= peak_bytes(action) < 2 * shard_bytes
