"""What `shard_experts` refuses, on every rank and before it changes anything, and what it says about a model."""

import inspect
import time
import warnings
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from moe_layers.integrations.transformers import disable, enable, reading_shares, save_sharded, shard_experts

from ..processes import gloo_group, make_test, on_cpu
from ..tiers import slow
from .models import build as build_any
from .models import draw_tokens, experts_of, since_5_23, skip_old, step
from .sharded_models import batches, build, here, logits_of, shard, sharded

pytestmark = since_5_23


@pytest.fixture
def mesh(tmp_path):
    with gloo_group(tmp_path, timeout=timedelta(seconds=20)):
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))


def enabled(kind="qwen3_moe", **changes):
    model = build(kind, **changes)
    enable(model, implementation="reference")
    return model


@pytest.mark.parametrize(
    "model_type", ["dbrx", "jetmoe", "step3p7_text", "muse_spark_text", "llama4_text", "nemotron_h"]
)
def test_other_kinds_of_experts(mesh, model_type):
    """Sharded over one rank, each kind computes what it computes whole."""
    skip_old(model_type)
    model, reference = (build_any(model_type, dtype=torch.float64) for _ in range(2))
    tokens = draw_tokens(model)
    for part in (model, reference):
        enable(part, implementation="reference")
    report = shard_experts(model, mesh)
    assert report.num_ranks == 1 and report.kept_bytes > 0 == report.freed_bytes
    assert all(isinstance(p, DTensor) for p in report.experts.popitem()[1].parameters() if p.dim() == 3)
    torch.testing.assert_close(step(model, tokens)[:2], step(reference, tokens)[:2], rtol=0, atol=1e-10)


@pytest.mark.parametrize("zero_experts", [3, 15])  # 15: as many as the other experts
def test_zero_experts_are_refused(mesh, zero_experts):
    model = build_any("longcat_flash", zero_expert_num=zero_experts)
    enable(model, implementation="reference")
    message = r"rank 0: each expert must hold an equal .*for 15 experts; keep .* by FSDP2"
    with unchanged(model), pytest.raises(ValueError, match=message):
        shard_experts(model, mesh)


@slow  # importing bitsandbytes takes seconds
def test_weights_of_bitsandbytes_are_refused(mesh):
    replace = pytest.importorskip("bitsandbytes.nn.parametrize").replace_parameter_4bit
    model = build_any("qwen3_moe")
    for _, experts in experts_of(model):
        replace(experts, "gate_up_proj")
        replace(experts, "down_proj")
    enable(model, implementation="reference")
    with pytest.raises(ValueError, match=r"got nf4 .* of model.layers.0.mlp.experts, whose .*; load the model"):
        shard_experts(model, mesh)


def test_the_report_and_what_a_sharded_model_refuses(mesh, tmp_path):
    model = enabled()
    report = shard_experts(model, mesh)
    assert str(report).startswith("moe_layers shares the experts of 2 blocks among 1 ranks (auto): 8 experts per block")
    assert list(report.experts) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    for function in (disable, enable):
        with pytest.raises(ValueError, match=f"{function.__name__}: the experts must be whole"):
            function(model)
    with pytest.raises(ValueError, match=r"got Qwen3MoeForCausalLM, whose experts .*save_sharded"):
        model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"rank 0: experts must be sharded once, got model.layers.0.mlp.experts"):
        shard_experts(model, mesh)


@contextmanager
def refused(message, kind=ValueError):
    """Expect an error within 20 seconds, so that no rank seems to hang."""
    start = time.monotonic()
    with pytest.raises(kind, match=message):
        yield
    assert time.monotonic() - start < 20


def test_default_limits_leave_time_for_slow_stores():
    for function in (reading_shares, save_sharded, shard_experts):
        assert inspect.signature(function).parameters["seconds"].default == 15


@contextmanager
def unchanged(model):
    before = {name: (id(p), p.shape) for name, p in model.named_parameters()}
    yield
    assert {name: (id(p), p.shape) for name, p in model.named_parameters()} == before


def with_tied_experts(model):
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.down_proj = first.down_proj


def with_mixed_dtypes(model):
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.float())


def with_zero3(model):
    model.lm_head.weight.ds_id = 3


def with_a_dtensor(model):
    mesh = init_device_mesh("cpu", (1,))
    model.lm_head.weight = nn.Parameter(DTensor.from_local(model.lm_head.weight.detach(), mesh))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_tied_experts, "experts must not share parameters, got down_proj of model.layers.0"),
        (with_mixed_dtypes, r"the weights of model.layers.1.mlp.experts must have one dtype"),
        (with_zero3, "got lm_head.weight of DeepSpeed's ZeRO-3"),
        (with_a_dtensor, "got a DTensor lm_head.weight; apply it before fully_shard, and without tensor parallelism"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_models_that_are_refused(mesh, change, message):
    model = enabled()
    change(model)
    with unchanged(model), pytest.raises(ValueError, match=f"shard_experts: rank 0: .*{message}"):
        shard_experts(model, mesh)


def test_arguments_that_are_refused(mesh):
    with pytest.raises(ValueError, match="rank 0: the model must have been given to enable, got Qwen3MoeForCausalLM"):
        shard_experts(build("qwen3_moe"), mesh)
    with pytest.raises(ValueError, match=r"shard_experts: the mesh must have one dimension, as mesh\[\"ep\"\] has"):
        shard_experts(enabled(), init_device_mesh("cpu", (1, 1), mesh_dim_names=("efsdp", "ep")))
    with pytest.raises(ValueError, match="mesh must be a DeviceMesh, got ProcessGroup"):
        shard_experts(enabled(), mesh.get_group())
    with pytest.raises(ValueError, match="dispatcher must be one of"):
        shard_experts(enabled(), mesh, dispatcher="deepep")
    with pytest.raises(NotImplementedError, match="the overlapped dispatcher has none of"):
        shard_experts(enabled("llama4_text"), mesh, dispatcher="overlapped")


def test_adapters_of_pefts_own_are_refused(mesh):
    """Adapters that PEFT computes need whole experts. The adapters are added before or after sharding."""
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def adapted(model, **options):
        config = peft.LoraConfig(r=2, target_parameters=["mlp.experts.gate_up_proj"], target_modules=[], **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return peft.get_peft_model(model, config)

    merged = adapted(build("qwen3_moe"))
    enable(merged, implementation="reference")
    merged.merge_adapter()
    with pytest.raises(ValueError, match=r"rank 0: adapters must be LoRA that the kernels compute, .*it is merged"):
        shard_experts(merged, mesh)
    model = enabled()
    shard_experts(model, mesh)
    model = adapted(model)
    for function in (model.merge_adapter, model.merge_and_unload):  # before any forward
        with pytest.raises(ValueError, match=r"model.layers.0.mlp.experts: adapters .* got gate_up_proj, .*; save"):
            function()
    logits_of(model, *batches((1,))[0])
    with pytest.raises(ValueError, match="must be merged into whole experts"):
        model.merge_adapter()
    wrapper = next(module for module in model.modules() if hasattr(module, "lora_dropout"))
    wrapper.lora_dropout["default"] = nn.Dropout(0.5)
    with pytest.raises(ValueError, match=r"PEFT's own computation of gate_up_proj, because .* has dropout"):
        logits_of(model, *batches((1,))[0])


def experts_that_do_not_divide(device):
    model = enabled(num_experts=7)
    with unchanged(model), refused(r"rank \d: model.layers.0.mlp.experts: num_experts must be a mult"):
        shard(model)


def problems_of_one_rank(device):
    """Each rank learns of the problem, and which rank has the problem."""
    rank = distributed.get_rank()
    sharded_already, partitioned = enabled(), enabled()
    shard(sharded_already)
    with_zero3(partitioned)
    for model, options, message in (
        (partitioned, {}, "parameters must be plain tensors, got lm_head.weight of DeepSpeed's ZeRO-3"),
        (sharded_already, {}, "experts must be sharded once, got model.layers.0.mlp.experts"),
        (build("qwen3_moe"), {}, "the model must have been given to enable, got Qwen3MoeForCausalLM"),
        ("model", {}, "model must be a Module, got str"),
        (enabled(), {"dispatcher": "deepep"}, "ExpertParallel: dispatcher must be one of"),
    ):
        model, options = (model, options) if rank else (enabled(), {})
        with refused(f"shard_experts: rank 1: {message}"):
            shard(model, **options)
    model, message = enabled(), "no call within 1 seconds from rank 1" if rank == 0 else "'other'"
    with unchanged(model), refused(message, (ValueError, KeyError)):
        mesh = init_device_mesh(here().type, (2,), mesh_dim_names=("ep",))
        shard_experts(model, mesh["other" if rank else "ep"], seconds=1.0)


def configurations_that_disagree(device):
    rank = distributed.get_rank()
    rope = {"rope_type": "default", "rope_theta": 10.0 + rank}
    for model, options, message in (
        (enabled(num_experts_per_tok=2 + rank), {}, "config.num_experts_per_tok, got 2 on rank 0 and 3 on rank 1"),
        (enabled(norm_topk_prob=bool(rank)), {}, "config.norm_topk_prob, got False on rank 0 and True on rank 1"),
        (enabled(rope_parameters=rope), {}, "config.rope_p.*_theta, got"),
        (enabled(num_experts=8 + 2 * rank), {}, "model.layers.0.mlp.experts, got 8 experts, gate_up_proj"),
        (enabled(num_hidden_layers=2 + rank), {}, "config.num_hidden_layers, got 2 on rank 0 and 3 on rank 1"),
        (enabled().float() if rank else enabled(), {}, "model.layers.0.mlp.experts, got 8 experts, .*float64.*float32"),
        (enabled(), {"chunks": 1 + rank}, "chunks, got 1 on rank 0 and 2 on rank 1"),
    ):
        with unchanged(model), refused(f"all ranks must agree about {message}"):
            shard(model, **options)
    model = enabled()
    model.config._name_or_path = f"/rank{rank}/model"  # a folder of each rank is no disagreement
    shard(model)


@on_cpu("on a GPU the error ends the process")
def gradients_of_one_rank(device):
    """If the inputs of one rank need no gradient, both ranks get an error that names the experts."""
    rank = distributed.get_rank()
    for dispatcher in ("allgather", "alltoall"):
        model = sharded(build("qwen3_moe").float(), dispatcher=dispatcher)
        with torch.set_grad_enabled(bool(rank)), refused(r"model.layers.0.mlp.* gradients"):
            logits_of(model, *batches((1, 1))[rank])


@on_cpu("the ranks meet without collectives")
def a_rank_that_stays_away(device):
    """The other rank gets an error and does not wait. A later call of all ranks works."""
    model = enabled()
    if distributed.get_rank():
        with unchanged(model), refused("no call within 1 seconds from rank 0; let slower ranks"):
            shard(model, seconds=1.0)
    distributed.barrier()
    shard(model)


test_two_ranks = slow(
    make_test(
        [
            experts_that_do_not_divide,
            problems_of_one_rank,
            configurations_that_disagree,
            gradients_of_one_rank,
            a_rank_that_stays_away,
        ],
        2,
    )
)
