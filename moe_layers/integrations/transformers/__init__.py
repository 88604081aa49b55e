"""Computes the experts of Hugging Face models with `moe_kernels`. `enable` and `disable` are the main functions."""

import importlib
from typing import TYPE_CHECKING, Any

from .enabling import EnableReport, disable, enable, transformers_has
from .routers.balance import balance_routing

if TYPE_CHECKING:
    from .experts.mxfp4 import keep_mxfp4
    from .routers.trainer_callback import RoutingCallback
    from .sharding.shard_model import ShardReport, ignore_in_ddp, shard_experts
    from .sharding.sharded_files import reading_shares, save_sharded

__all__ = [
    "EnableReport",
    "RoutingCallback",
    "ShardReport",
    "balance_routing",
    "disable",
    "enable",
    "ignore_in_ddp",
    "keep_mxfp4",
    "reading_shares",
    "save_sharded",
    "shard_experts",
]

# Import these modules on first use, because they import transformers' Trainer, quantisers or torch.distributed.tensor.
_ON_FIRST_USE = {
    "RoutingCallback": "routers.trainer_callback",
    "ShardReport": "sharding.shard_model",
    "ignore_in_ddp": "sharding.shard_model",
    "keep_mxfp4": "experts.mxfp4",
    "reading_shares": "sharding.sharded_files",
    "save_sharded": "sharding.sharded_files",
    "shard_experts": "sharding.shard_model",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_ON_FIRST_USE[name]}", __name__), name)


if transformers_has("distributed.expert_parallel", "EPImplementationInterface"):
    importlib.import_module(".sharding.ep_implementation", __name__)
