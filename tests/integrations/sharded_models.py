"""Tiny transformers models in float64 for several ranks, and the results of one process on all their tokens."""

import warnings
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
import transformers
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from moe_layers.integrations.transformers import enable, shard_experts

from ..checkpoint.tiny_models import LATENT_ATTENTION
from ..processes import shared_folder
from .models import SIZES

CONFIGS = {
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 8, "norm_topk_prob": True},
    "gpt_oss": {"num_local_experts": 8},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "deepseek_v3": {
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        **LATENT_ATTENTION,
    },
    "llama4_text": {
        "intermediate_size_mlp": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 64,
    },
}
LENGTH = 12
FLOAT32 = torch.float32


@contextmanager
def all_in_float64():
    """Let routers and norms that ask for float32 compute in float64, so that results compare to 1e-10."""
    with ExitStack() as stack:
        for name in ("float32", "float"):
            stack.enter_context(mock.patch.object(torch, name, torch.float64))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(FLOAT32)


@dataclass(frozen=True)
class Case:
    """A case of `make_test` in float64: a function, and its arguments if it serves several kinds of models."""

    run: Callable
    arguments: tuple = ()

    @property
    def __name__(self):
        return self.run.__name__

    @property
    def pytestmark(self):
        return getattr(self.run, "pytestmark", [])

    def __call__(self, device):
        with all_in_float64(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers and PEFT warn about tiny models
            transformers.logging.disable_progress_bar()
            self.run(*self.arguments)


def here():
    """Return this rank's device: its GPU if the group is one of NCCL."""
    is_gpu = distributed.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")


def build(kind, dtype=torch.float64, **changes):
    """Return a model in training mode with its own experts and weights of unit scale."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**{**SIZES, **CONFIGS[kind], **changes})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model.to(here(), dtype).train()


def shard(model, mesh=None, **options):
    """Share the experts of an enabled model, by default among all ranks. Return the report."""
    mesh = init_device_mesh(here().type, (distributed.get_world_size(),)) if mesh is None else mesh
    return shard_experts(model, mesh, **options)


def sharded(model, mesh=None, **options):
    """Enable a model and share its experts."""
    enable(model, implementation="reference")
    shard(model, mesh, **options)
    return model


def adapted(model, kind="qwen3_moe"):
    """Return a model with random adapters of experts and attention, which are equal on all ranks."""
    from peft import LoraConfig, get_peft_model

    experts = "feed_forward.experts" if kind == "llama4_text" else "mlp.experts"
    weights = [f"{experts}.gate_up_proj", f"{experts}.down_proj"]
    attention = "q_a_proj" if kind == "deepseek_v3" else "q_proj"
    config = LoraConfig(r=4, lora_alpha=8, target_modules=[attention], target_parameters=weights)
    model = get_peft_model(model, config)
    torch.manual_seed(5)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def batches(sizes, pad=0, seed=100):
    """Return a batch (ids, mask) of each rank, with these numbers of sequences. The last `pad` ids are padding."""
    made = []
    for rank, size in enumerate(sizes):
        ids = torch.randint(0, 64, (size, LENGTH), generator=torch.Generator().manual_seed(seed + rank))
        mask = torch.ones_like(ids)
        if pad and size:
            mask[:, -pad:] = 0
        made.append((ids.to(here()), mask.to(here())))
    return made


def logits_of(model, ids, mask):
    return model(input_ids=ids, attention_mask=mask, use_cache=False).logits


def loss_of(model, ids, mask):
    """Return the sum of the tokens' losses, so that ranks with any number of tokens add up.

    transformers' attention takes no batch of zero sequences. A rank without data runs one sequence without labels.
    """
    if not len(ids):
        return logits_of(model, *batches((1,))[0]).sum() * 0
    logits = logits_of(model, ids, mask)
    labels = ids.masked_fill(mask == 0, -100)
    logits, labels = logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1)
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients_of(model, data, scale=1):
    """Return loss and gradients, by name, of the sum over several batches."""
    model.zero_grad()
    losses = [loss_of(model, *batch) for batch in data]
    (sum(losses) * scale).backward()
    return sum(losses).detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(actual, expected, message=""):
    scale = expected.abs().max().clamp(min=1e-30)
    error = ((actual - expected).abs().max() / scale).item()
    assert error < 1e-10, f"{message}: {error:.1e}"


def own(data):
    """Return this rank's part of the data."""
    return data[distributed.get_rank()]


def saved(model, **options):
    """Return the folder in which the first rank saves a model that each rank has."""
    folder = shared_folder()
    if distributed.get_rank() == 0:
        model.save_pretrained(folder, **options)
    distributed.barrier()
    return folder
