"""Experts of transformers models shared by two ranks, against one process on all tokens, in float64."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from moe_layers import clip_grad_norm_, save_communication
from moe_layers.integrations.transformers import enable, ignore_in_ddp, shard_experts

from ..ops import CountedOps
from ..parallel.expert_parallel_cases import summed
from ..processes import make_test
from ..tiers import slow
from .models import since_5_23
from .sharded_models import (
    Case,
    adapted,
    assert_close,
    batches,
    build,
    gradients_of,
    here,
    logits_of,
    loss_of,
    own,
    sharded,
    whole,
)

pytestmark = [slow, since_5_23]  # each process imports transformers
# Numbers of sequences by rank; two ranks use the first two.
UNEVEN, EVEN, NO_LABELS = (3, 1, 2, 2), (2, 2, 2, 2), (3, 0, 1, 2)
STEPS, ACCUMULATED, CLIP, RATE = 3, 2, 5.0, 0.05


def drawn(sizes, **options):
    return batches(sizes[: distributed.get_world_size()], **options)


def assert_same_gradients(model, data, reference, *, average=False):
    """Compare loss, outputs and all gradients with those of a model with its own experts."""
    expected_loss, expected = gradients_of(reference, [batch for batch in data if len(batch[0])])
    loss, gradients = gradients_of(model, [own(data)])
    assert_close(summed(loss), expected_loss, "loss")
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        # The gradient of a shard is complete. Each rank has only its own tokens' part of every other gradient.
        is_shard = isinstance(gradient, DTensor)
        actual = whole(gradient) * (distributed.get_world_size() if average else 1) if is_shard else summed(gradient)
        assert_close(actual, expected[name], name)
    with torch.no_grad():
        if len(own(data)[0]):
            assert_close(logits_of(model, *own(data)), logits_of(reference, *own(data)), "logits")
        else:
            loss_of(model, *own(data))


def uneven_tokens_and_padding(kind):
    """Compare both dispatchers and "auto", with ranks of different lengths, padding, and a rank without labels."""
    for dispatcher in ("allgather", "alltoall", "auto"):
        for average, data in ((False, drawn(UNEVEN, pad=4)), (True, drawn(EVEN)), (False, drawn(NO_LABELS))):
            model = sharded(build(kind), dispatcher=dispatcher, average_gradients=average)
            assert_same_gradients(model, data, build(kind), average=average)


def frozen_parts(kind):
    """Only the experts learn, or all but the experts."""
    for experts_learn in (True, False):
        model, reference = build(kind), build(kind)
        for part in (model, reference):
            for name, parameter in part.named_parameters():
                parameter.requires_grad_((".experts." in name) == experts_learn)
        assert_same_gradients(sharded(model, dispatcher="alltoall", average_gradients=False), drawn(UNEVEN), reference)


def checkpointing(kind):
    """Checkpointed layers send everything again, or nothing with `save_communication`."""
    counts = []
    for options in (None, {}, {"context_fn": save_communication}):
        model = sharded(build(kind), dispatcher="alltoall", average_gradients=False)
        if options is not None:
            model.gradient_checkpointing_enable({"use_reentrant": False, **options})
        with CountedOps() as ops:  # a checkpoint's own mode returns kept results before this one
            assert_same_gradients(model, drawn(UNEVEN, pad=2), build(kind))
        counts.append(ops.counts["_c10d_functional::all_to_all_single"])
    none, plain, saved = counts
    assert 0 < none == saved < plain


def lora(kind):
    """Add adapters of experts and attention, which are whole on every rank, before or after sharding."""
    for before, average in ((True, True), (False, True), (False, False)):
        model = sharded(adapted(build(kind), kind) if before else build(kind), average_gradients=average)
        model = model if before else adapted(model, kind)
        assert_same_gradients(model, drawn(UNEVEN), adapted(build(kind), kind), average=average)
        with pytest.raises(
            ValueError, match=r"layers.*: adapters must be merged into whole experts, got .* which ranks share"
        ):
            model.merge_adapter()


def part_of(step, accumulated):
    return drawn(UNEVEN if (step + accumulated) % 2 else EVEN, seed=1000 + 100 * step + 10 * accumulated)


def train(model, backward, clip):
    """Return the gradient norms of three steps, each of several accumulated batches.

    `foreach`, the default on GPUs, accepts no DTensors together with other tensors in a group.
    """
    groups = [[p for p in model.parameters() if isinstance(p, DTensor) == is_shard] for is_shard in (True, False)]
    optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=RATE, momentum=0.9, foreach=True)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for accumulated in range(ACCUMULATED):
            backward(part_of(step, accumulated), accumulated == ACCUMULATED - 1)
        norms.append(clip(model.parameters(), CLIP).item())
        optimizer.step()
    return torch.tensor(norms)


def trained(kind):
    """Return parameters and norms of one process, which trains on the mean over the ranks."""
    model = build(kind)

    def backward(data, is_last):
        (sum(loss_of(model, *batch) for batch in data) / len(data)).backward()

    norms = train(model, backward, torch.nn.utils.clip_grad_norm_)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, norms


def by_ddp(model, report, meshes):
    ignore_in_ddp(model)
    wrapped = DistributedDataParallel(model)
    return wrapped, lambda is_last: setattr(wrapped, "require_backward_grad_sync", is_last)


def by_fsdp(model, report, meshes, rows=False, ignored=False):
    experts, everyone = meshes
    held = {parameter for module in report.experts.values() for parameter in module.parameters()}
    options = {"ignored_params": held} if ignored else {}
    for layer in model.model.layers:
        for module in () if ignored else set(report.experts.values()) & set(layer.modules()):
            placement = {"shard_placement_fn": lambda _: Shard(1)} if rows else {}
            fully_shard(module, mesh=experts["efsdp"], **placement)
        fully_shard(layer, mesh=everyone, **options)
    fully_shard(model, mesh=everyone, **options)
    return model, model.set_requires_gradient_sync


def by_accelerate(model, report, meshes):
    """Call what `Accelerator.prepare` calls with FSDP2, which it selects on accelerators alone."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    for module in report.experts.values():  # accelerate leaves modules alone that are under FSDP2 already
        fully_shard(module, mesh=meshes[0]["efsdp"])
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
        transformer_cls_names_to_wrap=[type(model.model.layers[0]).__name__],
    )
    settings = {"torch_device_mesh": None, "mixed_precision": "no", "is_main_process": True}
    state = SimpleNamespace(fsdp_plugin=plugin)
    wrapped = fsdp2_prepare_model(SimpleNamespace(state=state, device=here(), **settings), model)
    return wrapped, wrapped.set_requires_gradient_sync


WRAPPINGS = {
    "accelerate": by_accelerate,
    "ddp": by_ddp,
    "fsdp": by_fsdp,
    "rows": partial(by_fsdp, rows=True),
    "ignored": partial(by_fsdp, ignored=True),
}


def three_steps(kind, wrappings=("ddp", "fsdp"), checkpointing=None, compiled=False, **options):
    """Compare parameters and norms after three steps with accumulation and clipping, under PyTorch's wrappers.

    Args:
        checkpointing: options of checkpointed layers.
        compiled: compile each decoder layer.
        options: of `shard_experts`.
    """
    expected, norms = trained(kind)
    for wrapping in wrappings:
        model = build(kind)
        enable(model, implementation="reference")
        size = distributed.get_world_size()
        experts = init_device_mesh(here().type, (size // 2, 2), mesh_dim_names=("efsdp", "ep"))
        meshes = experts, init_device_mesh(here().type, (size,))
        report = shard_experts(model, meshes[0]["ep"], **options)
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": False, **checkpointing})
        for layer in model.model.layers if compiled else ():
            layer.compile(backend="aot_eager")
        wrapped, sync = WRAPPINGS[wrapping](model, report, meshes)

        def backward(data, is_last, wrapped=wrapped, sync=sync):
            sync(is_last)
            loss_of(wrapped, *own(data)).backward()

        assert_close(train(model, backward, clip_grad_norm_), norms, f"{wrapping}: norms")
        for name, parameter in model.named_parameters():
            assert_close(whole(parameter.detach()), expected[name], f"{wrapping}: {name}")


def copies_of_experts(kind):
    """Two ranks share the experts, and two others hold copies of them."""
    three_steps(kind, ("fsdp", "rows"))


def other_wrappings(kind):
    three_steps(kind, ("rows", "ignored", "accelerate"))


def checkpointed_and_compiled_steps(kind):
    """Train checkpointed layers that send again or not, and compiled layers, with accumulation and clipping."""
    settings = {"wrappings": ("fsdp",), "dispatcher": "alltoall"}
    three_steps(kind, checkpointing={}, **settings)
    three_steps(kind, checkpointing={"context_fn": save_communication}, **settings)
    three_steps(kind, compiled=True, **settings)
    three_steps(kind, checkpointing={"context_fn": save_communication}, compiled=True, **settings)


def outputs_changed_in_place(kind):
    """Some models add to the experts' output in place. A hook of the experts does so here."""
    model, reference = sharded(build(kind), average_gradients=True), build(kind)
    for part in (model, reference):
        for layer in part.model.layers:
            layer.mlp.experts.register_forward_hook(lambda module, args, out: out.mul_(2))
    assert_same_gradients(model, drawn(UNEVEN), reference, average=True)


def copies(kind):
    """A copy of a sharded model shares no memory with it."""
    model = sharded(build(kind))
    ids = own(drawn(EVEN))
    before = logits_of(model, *ids)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(logits_of(other, *ids), before)


FAMILY = (uneven_tokens_and_padding, frozen_parts, checkpointing, lora, three_steps)
MORE = {
    "qwen3_moe": (other_wrappings, outputs_changed_in_place, copies),
    "gpt_oss": (other_wrappings, checkpointed_and_compiled_steps),
    # The shared experts run after the routed ones, so FSDP2 labels more work in a recomputation than in forward.
    "deepseek_v3": (checkpointed_and_compiled_steps,),
}


def cases(kind):
    return [Case(run, (kind,)) for run in (*FAMILY, *MORE.get(kind, ()))]


test_qwen3_moe = make_test(cases("qwen3_moe"), 2)
test_gpt_oss = make_test(cases("gpt_oss"), 2)
test_mixtral = make_test(cases("mixtral"), 2)
test_olmoe = make_test(cases("olmoe"), 2)
test_deepseek_v3 = make_test(cases("deepseek_v3"), 2)
test_llama4 = make_test(cases("llama4_text"), 2)
test_four_processes = make_test(
    [
        Case(uneven_tokens_and_padding, ("qwen3_moe",)),
        Case(lora, ("qwen3_moe",)),
        Case(copies_of_experts, ("gpt_oss",)),
    ],
    4,
)
