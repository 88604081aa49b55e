"""Training with sharded experts: FSDP2, clipping, AdamW, statistics, distributed checkpoints, published layers."""

import tempfile
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from moe_layers import ExpertParallel, MoEFeedForward, clip_grad_norm_, observe
from moe_layers.checkpoint.files.directory import CheckpointFiles

from ..processes import eight_gpus, make_test, shared_folder
from ..tiers import slow
from .expert_parallel_cases import (
    D_MODEL,
    TOKENS,
    Model,
    assert_all_close,
    assert_close,
    assert_gradients,
    data,
    draw,
    expert_mesh,
    full,
    make_layer,
    mesh_of_all_ranks,
    own,
    own_data,
    shard_experts,
    sharded,
    summed,
    train_step,
)


def train_own_part(model, optimizer, device, step):
    return train_step(model, optimizer, *own_data(device, step))


def make_optimizer(model, kind):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, **kind)


def two_steps_equal_one_process(device):
    """Compare gradients, norm, clipping and AdamW, with experts over some or all ranks and FSDP2 over the others."""
    num_processes = distributed.get_world_size()
    for experts_over in (2, num_processes) if num_processes > 2 else (1, 2):
        for dispatcher, kind in (("allgather", {"foreach": True}), ("alltoall", {"fused": True})):
            compare_two_steps(device, experts_over, {"dispatcher": dispatcher}, kind)


def compare_two_steps(device, experts_over, style, kind, **options):
    one = Model(device, **options)
    many = sharded(device, experts_over, style, **options)
    optimizers = make_optimizer(one, kind), make_optimizer(many, kind)
    for step in range(2):
        expected = train_step(one, optimizers[0], *data(device, step), torch.nn.utils.clip_grad_norm_)
        actual = train_own_part(many, optimizers[1], device, step)
        assert expected[0] > 0.05
        assert_close(actual[0], expected[0])
        assert list(actual[1]) == list(expected[1]) == [name for name, _ in one.named_parameters()]
        assert_all_close(actual[1].values(), expected[1].values())
    tolerance = 1e-6 if one.project.weight.dtype == torch.float64 else 1e-3
    for (name, a), b in zip(many.named_parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(full(a), b, rtol=0, atol=tolerance, msg=name)


def outputs_may_change_in_place(device):
    """Outputs behave like those of nn.Linear: FSDP2 finds them before backward, and they have the tokens' axes."""
    mesh = expert_mesh(device)
    x = draw(device, 12, seed=distributed.get_rank()).view(2, 6, D_MODEL)
    for shares_experts in (False, True):
        layer = make_layer(device)
        if shares_experts:
            shard_experts(layer, mesh)
            fully_shard(layer.experts, mesh=mesh["efsdp"])
        fully_shard(layer, mesh=mesh_of_all_ranks(device))
        results = []
        for tokens, routing in ((x, False), (x, True), (x.view(12, -1), False)):
            for in_place in (False, True):
                y = layer(tokens, return_routing=True)[0] if routing else layer(tokens)
                y = y.add_(tokens) if in_place else y + tokens
                y.square().sum().backward()
                results.append([y.view(12, -1), *(parameter.grad.full_tensor() for parameter in layer.parameters())])
                layer.zero_grad()
        for result in results[1:]:
            assert_all_close(result, results[0])


def mixed_precision(device):
    """With FSDP2's policy, parameters and tokens are bfloat16, routing weights and gradients float32."""
    one = make_layer(device).to(torch.bfloat16)
    x = draw(device, 6, seed=distributed.get_rank()).float()
    one(x.to(torch.bfloat16)).float().square().sum().backward()
    kinds = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    for casts in (False, True):
        mesh = expert_mesh(device)
        layer = shard_experts(make_layer(device).float(), mesh, average_gradients=False)
        policy = MixedPrecisionPolicy(**kinds, cast_forward_inputs=casts)
        fully_shard(layer.experts, mesh=mesh["efsdp"], mp_policy=policy)
        fully_shard(layer, mesh=mesh_of_all_ranks(device), mp_policy=MixedPrecisionPolicy(**kinds))
        if casts:
            with pytest.raises(ValueError, match=r"topk_weights must be float32 .*cast_forward_inputs=False"):
                layer(x)
            continue
        y = layer(x)
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
        gradient, expected = full(layer.experts.w_down.grad), summed(one.experts.w_down.grad.float())
        assert gradient.dtype == torch.float32
        error = (gradient - expected).norm() / expected.norm()
        assert error < 0.02, error


def clipping_by_other_norms(device):
    """Clipping mixed meshes and plain parameters together equals PyTorch's clipping where PyTorch supports it."""
    layer, one = shard_experts(make_layer(device), expert_mesh(device)), make_layer(device)
    x = draw(device, 6)  # equal on all ranks, so that all gradients already are the mean
    for norm_type in (1.0, 2.0, "inf"):
        for module in (layer, one):
            module.zero_grad()
            module(x).sum().backward()
        expected = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5, norm_type)
        norm = clip_grad_norm_(layer.parameters(), 0.5, norm_type)
        assert expected > 0.5
        assert_close(norm, expected)
        assert_gradients(layer, one)
    for norm_type in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"norm_type must be positive, got {norm_type}"):
            clip_grad_norm_(layer.parameters(), 0.5, norm_type)
    assert clip_grad_norm_([nn.Parameter(x)], 1.0) == 0
    unreduced = nn.Parameter(x)
    unreduced.grad = DTensor.from_local(x, expert_mesh(device)["ep"], [Partial()])
    with pytest.raises(ValueError, match=r"gradients must be whole sums, got .*Partial"):
        clip_grad_norm_([unreduced], 1.0)
    layer.router.weight.grad.fill_(torch.inf)
    with pytest.raises(RuntimeError, match=r"the norm of order 2\.0 of the gradients must be finite, got inf"):
        clip_grad_norm_(layer.parameters(), 1.0, error_if_nonfinite=True)


def clipping_of_mixed_dtypes(device):
    """A parameter of one row leaves some ranks without data; the norm still has one dtype on all ranks."""
    mesh = expert_mesh(device)["ep"]
    kinds = ((1, torch.float32), (4, torch.bfloat16), (0, torch.float64))
    for chosen in (kinds, kinds[:2], kinds[1::-1]):
        parameters = []
        for num_rows, dtype in chosen:
            whole = torch.full((num_rows, 4), 3.0, dtype=dtype, device=device)
            parameters.append(nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
            parameters[-1].grad = distribute_tensor(whole, mesh, [Shard(0)])
        norm = clip_grad_norm_(parameters, 1.0)
        assert norm.dtype == (torch.float64 if len(chosen) == 3 else torch.float32)
        assert norm.item() == pytest.approx(3 * 20**0.5, rel=1e-2)
        for parameter in parameters:
            assert full(parameter.grad).float().sub(20**-0.5).abs().le(2e-3).all()


def whole_parameters(model):
    """Return a copy of each unsharded parameter by name."""
    return {name: full(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def whole_moments(optimizer_state):
    """Return the optimizer's unsharded state of each parameter by name."""
    return {
        name: {moment: full(value).clone() for moment, value in moments.items()}
        for name, moments in optimizer_state["state"].items()
    }


def distributed_checkpoints(device):
    """A checkpoint of experts over all ranks loads over fewer ranks or one. Weights and optimizer state are bitwise
    equal, and the next step equals that of the first run."""
    num_processes = distributed.get_world_size()
    folder = shared_folder()
    first = sharded(device, num_processes)
    optimizer = make_optimizer(first, {})
    train_own_part(first, optimizer, device, 0)
    states = dict(zip(("model", "optimizer"), get_state_dict(first, optimizer), strict=True))
    distributed_checkpoint.save(states, checkpoint_id=folder)
    saved = whole_parameters(first)
    saved_moments = whole_moments(states["optimizer"])
    assert saved_moments.keys() == saved.keys()
    assert all(moments["step"] == 1 and moments["exp_avg"].any() for moments in saved_moments.values())
    train_own_part(first, optimizer, device, 1)
    expected = whole_parameters(first)
    for fewer, model in ((True, sharded(device, num_processes // 2)), (False, Model(device))):
        for parameter in model.parameters():
            parameter.data.zero_()
        optimizer = make_optimizer(model, {})
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        distributed_checkpoint.load(states, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        loaded = whole_parameters(model), whole_moments(get_state_dict(model, optimizer)[1])
        torch.testing.assert_close(loaded, (saved, saved_moments), rtol=0, atol=0)
        if fewer:
            train_own_part(model, optimizer, device, 1)
        else:
            train_step(model, optimizer, *data(device, 1), torch.nn.utils.clip_grad_norm_)
        tolerance = 1e-6 if device.type == "cpu" else 1e-3
        torch.testing.assert_close(whole_parameters(model), expected, rtol=0, atol=tolerance)


def statistics_of_all_processes(device):
    """Summed statistics equal those of one rank with all tokens; each rank's own statistics do not change."""
    one, many = make_layer(device), shard_experts(make_layer(device), expert_mesh(device))
    x, lengths = data(device, 0)[0], [TOKENS] * distributed.get_world_size()
    (observer,), (whole,) = observe(many).values(), observe(one).values()
    many(own(x, lengths))
    one(x)
    expected, actual = whole.read(), observer.read(group=distributed.group.WORLD)
    assert torch.equal(actual.tokens_per_expert, expected.tokens_per_expert)
    assert (actual.num_calls, actual.num_tokens) == (len(lengths), len(x))
    assert actual.dead_experts == expected.dead_experts
    for name in ("entropy", "margin", "smallest_margin", "max_violation"):
        assert getattr(actual, name) == pytest.approx(getattr(expected, name), rel=1e-5)
    assert observer.read().num_tokens == TOKENS


def layers_of_published_models(device):
    """Each rank reads only its own experts, and the layer computes the same as on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        directory = f"{folder}/layer"
        make_layer(device, shared_d_ff=12).save_checkpoint(directory)
        one = MoEFeedForward.from_checkpoint(directory, device=device)
        style, mesh = ExpertParallel("alltoall"), expert_mesh(device)["ep"]
        with mock.patch.object(CheckpointFiles, "read", autospec=True, side_effect=CheckpointFiles.read) as read:
            many, report = MoEFeedForward.from_checkpoint(
                directory, mesh=mesh, expert_parallel=style, device=device, return_report=True
            )
        first = 4 * distributed.get_rank()
        assert report.experts == range(first, first + 4)
        names = [call.args[1] for call in read.call_args_list]
        experts = {int(name.split(".experts.")[1].split(".")[0]) for name in names if ".experts." in name}
        assert experts == set(report.experts)
        x = draw(device, 6, seed=distributed.get_rank())
        assert type(many.dispatcher).__name__ == "AllToAllDispatcher"
        assert_close(many(x), one(x))
        for op in (many.save_checkpoint, many.save_safetensors):
            with pytest.raises(ValueError, match=r"must be whole|must hold all experts"):
                op(f"{folder}/other")
        with pytest.raises(ValueError, match=r"load_safetensors: tensors must be whole, got a DTensor experts\.w_up"):
            many.load_safetensors(f"{directory}/model.safetensors")
        for wrong in ({"expert_parallel": style}, {"mesh": mesh, "experts": range(4)}):
            with pytest.raises(ValueError, match="expert_parallel needs a mesh, which decides experts, got"):
                MoEFeedForward.from_checkpoint(directory, **wrong)


FOUR = [two_steps_equal_one_process, distributed_checkpoints]
TWO = [
    *FOUR,
    outputs_may_change_in_place,
    mixed_precision,
    clipping_by_other_norms,
    clipping_of_mixed_dtypes,
    statistics_of_all_processes,
    layers_of_published_models,
]

test_two_processes = make_test(TWO, 2)
test_four_processes = slow(make_test(FOUR, 4))
test_eight_processes = eight_gpus(make_test(FOUR, 8))
