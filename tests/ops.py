"""Ops that PyTorch's dispatcher calls."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode

# Ops that launch no kernel, besides views.
_FREE = {"_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "new_empty"}


class CountedOps(TorchDispatchMode):
    """Counts ops by name, except those that only allocate or return a view. An op inside a registered op is hidden."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and func._opname not in _FREE:
            self.counts[f"{func.namespace}::{func._opname}"] += 1
        return func(*args, **(kwargs or {}))
