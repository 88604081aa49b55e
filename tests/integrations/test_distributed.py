"""Enabled models under the parallelism of transformers itself: tensor, expert and data parallelism, and combinations.

Each case loads a model with transformers' `DistributedConfig`, enables it, and compares one step with the same model on
one rank with its own experts: logits, loss with the router's auxiliary loss, and the gradient of every parameter.
"""

import pytest
import torch
import transformers
from packaging.version import Version

from moe_layers.integrations.transformers import enable

from ..checkpoint.golden import FASTEST
from ..processes import make_test
from ..tiers import slow
from .models import QWEN3_MOE, assert_close_gradients, initialise, since_5_23
from .sharded_models import saved, whole

pytestmark = [slow, since_5_23]  # each process imports transformers
gathers_strided_shards = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.12"), reason="PyTorch 2.11 gathers no gradient of packed projections"
)


def step(model, device):
    """Return logits, the loss and the whole gradient of every parameter."""
    tokens = (torch.arange(48, device=device) * 7 % 61).view(2, 24)
    result = model(input_ids=tokens, labels=tokens, output_router_logits=True, use_cache=False)
    result.loss.backward()
    gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    return result.logits.detach(), result.loss.detach(), gradients


def assert_same_step(device, **sizes):
    transformers.logging.disable_progress_bar()
    auto = transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    own = auto.from_config(transformers.Qwen3MoeConfig(**QWEN3_MOE), experts_implementation="eager")
    own = initialise(own).to(device).train()
    config = transformers.distributed.DistributedConfig(**sizes)
    model = auto.from_pretrained(saved(own), distributed_config=config).train()
    report = enable(model, implementation=FASTEST)
    assert report.blocks == 2 and model.config._experts_implementation == "moe_layers"
    logits, loss, gradients = step(model, device)
    expected_logits, expected_loss, expected = step(own, device)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
    assert_close_gradients(gradients, expected, 1e-4)


@gathers_strided_shards
def tensor_parallel(device):
    assert_same_step(device, tp_size=2, tp_plan="auto")


def expert_parallel(device):
    assert_same_step(device, tp_size=2, ep_size=2)


def fsdp2(device):
    assert_same_step(device, fsdp_size=2)


def fsdp2_and_expert_parallel(device):
    assert_same_step(device, fsdp_size=2, ep_size=2)


@gathers_strided_shards
def fsdp2_and_tensor_parallel(device):
    assert_same_step(device, fsdp_size=2, tp_size=2)


@gathers_strided_shards
def all_three(device):
    assert_same_step(device, fsdp_size=2, tp_size=2, ep_size=4)


test_two_processes = make_test([tensor_parallel, expert_parallel, fsdp2, fsdp2_and_expert_parallel], 2)
test_four_processes = make_test([fsdp2_and_tensor_parallel, all_three], 4)
