"""Run the experts of Hugging Face models: `from moe_layers.integrations.transformers import disable, enable`."""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .balancing import balance_routing
from .enabling import EnableReport, disable, enable

if TYPE_CHECKING:
    from .sharded_files import reading_shares, save_sharded
    from .sharding import ShardReport, ignore_in_ddp, shard_experts
    from .trainer_callback import RoutingCallback

__all__ = [
    "EnableReport",
    "RoutingCallback",
    "ShardReport",
    "balance_routing",
    "disable",
    "enable",
    "ignore_in_ddp",
    "reading_shares",
    "save_sharded",
    "shard_experts",
]

# Modules that import the Trainer's part of transformers, or torch.distributed.tensor. They are imported on first use.
_ON_FIRST_USE = {
    "RoutingCallback": "trainer_callback",
    "ShardReport": "sharding",
    "ignore_in_ddp": "sharding",
    "reading_shares": "sharded_files",
    "save_sharded": "sharded_files",
    "shard_experts": "sharding",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_ON_FIRST_USE[name]}", __name__), name)


def _takes_implementations() -> bool:
    """Return whether the expert parallelism of this version of transformers takes other implementations."""
    name = "transformers.distributed.expert_parallel"
    return find_spec(name) is not None and hasattr(importlib.import_module(name), "EPImplementationInterface")


if _takes_implementations():
    importlib.import_module(".expert_parallel", __name__)
