"""What else works on experts that ranks share: stored and quantised weights, kernels, and services of the routers."""

import warnings
from unittest import mock

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from moe_kernels.runtime.pytorch import is_in_backward
from moe_layers import BalanceLosses, RoutingReplay, observe, save_routing, update_selection_bias
from moe_layers.integrations.transformers import balance_routing, enable, reading_shares, save_sharded
from moe_layers.parallel.alltoall import AllToAllDispatcher

from ..processes import make_test, shared_folder
from ..tiers import slow
from .models import since_5_23
from .sharded_models import (
    all_in_float64,
    assert_close,
    batches,
    build,
    gradients_of,
    here,
    logits_of,
    loss_of,
    own,
    shard,
    whole,
)

pytestmark = [slow, since_5_23]  # each process imports transformers


def enabled(model, **options):
    enable(model, **{"implementation": "reference", **options})
    return model


def assert_same_steps(model, reference, sizes=(2, 1), tolerance=2e-5):
    """Compare outputs, and all gradients of the sum over the ranks, relative to the largest value."""
    data = [(ids % model.config.vocab_size, mask) for ids, mask in batches(sizes)]
    _, expected = gradients_of(reference, data)
    _, gradients = gradients_of(model, [own(data)])
    assert gradients.keys() == expected.keys() and gradients
    pairs = {"logits": (logits_of(model, *own(data)).detach(), logits_of(reference, *own(data)).detach())}
    for name, gradient in gradients.items():
        if not isinstance(gradient, DTensor):
            distributed.all_reduce(gradient)
        pairs[name] = whole(gradient), expected[name]
    for name, (actual, wanted) in pairs.items():
        torch.testing.assert_close(actual, wanted, rtol=0, atol=tolerance * wanted.abs().max().item(), msg=name)


def fp8_experts(device):
    """Shard transformers' FP8 experts, whose stored bytes and scales are split alike."""
    from .test_quantized_models import pair

    stored, reference = (pair()[0].to(here()).train() for _ in range(2))
    report = shard(enabled(stored), average_gradients=False)
    assert report.kept_bytes == report.freed_bytes > 0
    assert_same_steps(stored, enabled(reference))


def mxfp4_and_adapters(device):
    """Shard gpt-oss in its published blocks, save the model again, and add adapters over the blocks."""
    from .peft_models import adapt, lora
    from .test_mxfp4 import load_stored

    folder = shared_folder()
    expected, actual = folder / "expected", folder / "actual"
    stored, reference = (load_stored(dtype=torch.float32).to(here()) for _ in range(2))
    if distributed.get_rank() == 0:
        reference.save_pretrained(expected)
    shard(enabled(stored), average_gradients=False)
    save_sharded(stored, actual)
    distributed.barrier()
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (expected, actual)]
    assert files[0] == files[1]
    names = [f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = [adapt(model.train(), lora(targets=names)) for model in (stored, enabled(reference))]
    assert_same_steps(*models)
    with pytest.raises(ValueError, match=r"save_sharded: rank \d: adapters must be unloaded"):
        save_sharded(stored, actual)
    mesh = init_device_mesh(here().type, (2,))
    with reading_shares(mesh), pytest.raises(ValueError, match="must not be quantised, got Gp"):
        load_stored()


def fp8_precision(device):
    for dispatcher in ("allgather", "alltoall"):
        model, reference = (enabled(build("qwen3_moe", torch.float32), precision="fp8") for _ in range(2))
        shard(model, dispatcher=dispatcher, average_gradients=False)
        assert_same_steps(model, reference, tolerance=0.1)  # w_up's gradient reads the tokens as they were sent


def kernels(device):
    """Compare all dispatchers with kernels, on a CPU in the interpreter."""
    for dispatcher in ("alltoall", "allgather", "overlapped"):
        model, reference = (build("gpt_oss", torch.float32, num_hidden_layers=1) for _ in range(2))
        enabled(model, implementation="triton")
        shard(model, dispatcher=dispatcher, average_gradients=False, chunks=2)
        assert_same_steps(model, reference, (1, 1))


def balancing(device):
    """Losses of the whole batch, counts, bias updates and statistics equal those of one process."""
    data = batches((2, 2))
    joined = tuple(torch.cat(parts) for parts in zip(*data, strict=True))
    with all_in_float64():
        model, reference = enabled(build("deepseek_v3")), enabled(build("deepseek_v3"))
        shard(model, average_gradients=True)
        group = distributed.group.WORLD
        balance_routing(model, BalanceLosses(global_batch=0.5, group=group))
        alone = [distributed.new_group([rank]) for rank in range(2)][distributed.get_rank()]
        balance_routing(reference, BalanceLosses(global_batch=0.5, group=alone))
        observed = [observe(model), observe(reference)]
        loss_of(reference, *joined).div(2).backward()
        loss_of(model, *own(data)).backward()
        for name, parameter in model.named_parameters():
            gradient = whole(parameter.grad)
            if not isinstance(parameter.grad, DTensor):
                distributed.all_reduce(gradient)
                gradient /= 2
            assert_close(gradient, reference.get_parameter(name).grad, name)
        update_selection_bias(model, rate=0.1, group=group)
        update_selection_bias(reference, rate=0.1, group=alone)
        for name, buffer in reference.named_buffers():
            assert torch.equal(model.get_buffer(name), buffer), name
        for name, observer in observed[0].items():
            actual, expected = observer.read(group=group), observed[1][name].read(group=alone)
            assert torch.equal(actual.tokens_per_expert, expected.tokens_per_expert)


def replay(device):
    """Recorded choices of another router apply to the ranks' own tokens."""
    donor, model, reference = (enabled(build("qwen3_moe", torch.float32)) for _ in range(3))
    shard(model)
    ids, record = own(batches((2, 1))), RoutingReplay()
    with torch.no_grad():
        for layer in donor.model.layers:
            layer.mlp.gate.weight.neg_()
        with record.capture(donor):
            logits_of(donor, *ids)
        before = logits_of(model, *ids)
        outs = []
        for part in (model, reference):
            with record.replay(part):
                outs.append(logits_of(part, *ids))
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(outs[0], before, rtol=1e-2, atol=1e-2)


def recomputed_choices(device):
    """A checkpointed layer keeps its router's choice, even if the recomputed logits differ."""
    noise, sort, sent = torch.randn(24, 32).to(here()), AllToAllDispatcher._sort, {False: [], True: []}

    def disturb(module, args):
        return (args[0] + noise[: len(args[0])] * float(is_in_backward()),)

    def watch(self, tokens, slots, experts):
        sent[is_in_backward()].append(slots.topk_experts)
        return sort(self, tokens, slots, experts)

    model = enabled(build("qwen3_moe", torch.float32))
    shard(model, dispatcher="alltoall")
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_pre_hook(disturb)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": save_routing})
    with mock.patch.object(AllToAllDispatcher, "_sort", watch):
        loss_of(model, *own(batches((2, 1)))).backward()
    assert len(sent[False]) == len(sent[True]) == 2
    assert all(map(torch.equal, sent[False], reversed(sent[True])))


def compiled_layers(device):
    """A compiled decoder layer breaks its graph at the dispatcher."""
    model, reference = (enabled(build("qwen3_moe", torch.float32)) for _ in range(2))
    shard(model, average_gradients=False)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    assert_same_steps(model, reference)


test_two_processes = make_test(
    [fp8_experts, mxfp4_and_adapters, fp8_precision, kernels, balancing, replay, recomputed_choices, compiled_layers], 2
)
