"""examples/fine_tune_several_gpus.py, on a model and a text small enough for seconds."""

import re
import warnings
from argparse import Namespace
from dataclasses import replace
from importlib import import_module
from unittest import mock

import pytest
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from ..processes import make_test, shared_folder
from ..tiers import slow
from .examples import SIZES, implementation_of, small_text

pytest.importorskip("transformers", minversion="5.23", reason="transformers 5.23 or later is not installed")
pytest.importorskip("peft", minversion="0.19", reason="peft 0.19 or later is not installed")
pytestmark = slow  # each process imports transformers


def losses(device, lora, mesh_shape=(1, 2)):
    """Run the example and return its printed losses of held-out windows."""
    example, single = import_module("fine_tune_several_gpus"), import_module("fine_tune_hugging_face")
    example.transformers.logging.disable_progress_bar()
    changes = {"d_ff": 16, "num_experts": 4, "steps": 6, "held_out_windows": 8, "peak_learning_rate": 1e-2}
    settings, said = replace(single.PRESETS["cpu"], **SIZES, **changes), []
    folder = shared_folder()
    if distributed.get_rank() == 0:
        single.make_model("qwen3_moe", settings).save_pretrained(folder / "base")
    distributed.barrier()
    mesh = init_device_mesh(device.type, mesh_shape, mesh_dim_names=("efsdp", "ep"))
    options = Namespace(lora=lora, implementation=implementation_of(device))
    function = example.fine_tune if lora is None else example.fine_tune_adapters
    with mock.patch.object(example, "say", said.append), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function(small_text(device), settings, mesh, folder, options)
    found = [re.fullmatch(r"(\w+): held out ([\d.]+) nats per byte", line) for line in said]
    return {match[1]: float(match[2]) for match in found if match}


def all_parameters(device):
    """The loss falls, the written model has it, and copies of experts change nothing."""
    found = losses(device, None)
    assert found["after"] < found["before"] - 0.01 and found["loaded"] == found["after"]
    copies = losses(device, None, (2, 1))
    tolerance = 2e-4 if device.type == "cpu" else 2e-3  # GPUs train in bfloat16
    assert copies == pytest.approx(found, abs=tolerance), f"{copies} instead of {found}"


def adapters(device):
    found = losses(device, 4)
    assert found["after"] < found["before"] - 0.001 and found["loaded"] == found["after"]


test_two_processes = make_test([all_parameters, adapters], 2)
