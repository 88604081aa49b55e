"""Triton's side of compiled kernels that were saved to a file."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from .triton import triton


def current_architecture() -> int:
    """Return the architecture of the current GPU or compilation target, such as 90."""
    return triton.runtime.driver.active.get_current_target().arch


def load_compiled(function: Any, signature: dict[str, Any], metadata: dict[str, Any], binary: bytes) -> Any:
    """Make Triton load the kernel as if from files in its cache; it reads them immediately."""
    from triton.compiler import ASTSource, CompiledKernel

    source = ASTSource(function, {name: _as_tuples(kind) for name, kind in signature.items()})
    with tempfile.TemporaryDirectory() as folder:
        files = {f"kernel.{extension}": os.path.join(folder, f"kernel.{extension}") for extension in ("json", "cubin")}
        Path(files["kernel.json"]).write_text(json.dumps(metadata))
        Path(files["kernel.cubin"]).write_bytes(binary)
        return CompiledKernel(source, files, metadata["hash"])


def _as_tuples(kind: Any) -> Any:
    return tuple(map(_as_tuples, kind)) if isinstance(kind, list) else kind
