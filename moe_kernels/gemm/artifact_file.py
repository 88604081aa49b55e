"""A compiled artifact as a file, for another process on the same GPU model with the same software.

    8 bytes    b"MOEKERN1": file type and version of this layout
    8 bytes    length of the header, little-endian
    header     JSON in UTF-8
    binary     the cubin
    32 bytes   SHA-256 of everything before

Header fields: `kernel_name` in the catalog; `triton_version`; `architecture`, such as 90; `static_properties` of the
artifact, as written by `_encode`; and, for the launch, Triton's `signature` and `metadata` of the compiled kernel.
Functions are stored by name, with a digest of this package's source. A file contains GPU code: load only files that you
would run.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from ..errors import first_three
from ..runtime.artifact import current_architecture, load_compiled
from ..runtime.launch import CompiledArtifact
from ..runtime.triton import HAS_TRITON, INTERPRET, triton
from .selection import get_kernels

_MAGIC = b"MOEKERN1"
_DIGEST_BYTES = 32
_FIELDS = {"kernel_name", "triton_version", "architecture", "static_properties", "signature", "metadata"}
_PACKAGE = __name__.partition(".")[0]
_TYPES = {kind.__name__: kind for kind in (type(None), bool, float)}  # argument types in static properties


def save_artifact(artifact: CompiledArtifact, path: str | os.PathLike[str]) -> None:
    """Write a file from which another process on the same GPU model can load the artifact.

    Raises:
        ValueError: the artifact was made in the interpreter, which compiles nothing.
    """
    compiled = artifact.compiled
    if compiled is None:
        raise ValueError(f"save_artifact: the interpreter compiles nothing, got {artifact.kernel_name}")
    metadata = compiled.metadata
    header = {
        "kernel_name": artifact.kernel_name,
        "triton_version": metadata.triton_version,
        "architecture": metadata.target.arch,
        "static_properties": [_encode(value) for value in artifact.static_properties],
        "signature": compiled.src.signature,
        "metadata": {**metadata._asdict(), "target": vars(metadata.target)},
    }
    write_container(path, header, compiled.asm["cubin"])


def load_artifact(path: str | os.PathLike[str]) -> CompiledArtifact:
    """Read an artifact written by `save_artifact` for the current GPU, without compiling.

    The file contains GPU code: load only files that you trust.

    Raises:
        ValueError: the file was written by another Triton version or for another architecture, its kernel is not in the
            catalog or has other source, or the file is damaged. The message says which.
        RuntimeError: there is no GPU.
    """
    header, binary = read_container(path)
    version = triton.__version__ if HAS_TRITON else "none"
    if header["triton_version"] != version:
        raise _error(f"expected Triton {version}, got Triton {header['triton_version']}")
    if header["kernel_name"] not in _kernel_names():
        raise _error(f"expected a kernel of the catalog, got {header['kernel_name']}")
    if INTERPRET:
        raise _error("expected a GPU, got Triton's interpreter")
    if header["architecture"] != (architecture := current_architecture()):
        raise _error(f"expected architecture {architecture}, got {header['architecture']}")
    properties = tuple(map(_decode, header["static_properties"]))
    compiled = load_compiled(properties[0], header["signature"], header["metadata"], binary)
    return CompiledArtifact(header["kernel_name"], properties, compiled)


def write_container(path: str | os.PathLike[str], header: dict[str, Any], binary: bytes) -> None:
    encoded = json.dumps(header).encode()
    content = _MAGIC + len(encoded).to_bytes(8, "little") + encoded + binary
    Path(path).write_bytes(content + hashlib.sha256(content).digest())


def read_container(path: str | os.PathLike[str]) -> tuple[dict[str, Any], bytes]:
    """Return the header and the binary.

    Raises:
        ValueError: the file is not an artifact file, or is damaged.
    """
    whole = Path(path).read_bytes()
    if not whole.startswith(_MAGIC):
        raise _error(f"expected a file that starts with {_MAGIC}, got {whole[: len(_MAGIC)]}")
    content, digest = whole[:-_DIGEST_BYTES], whole[-_DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        raise _error(f"the file is damaged: its checksum is wrong, got {len(whole)} bytes")
    end = 16 + int.from_bytes(content[8:16], "little")
    header = json.loads(content[16:end])
    if header.keys() != _FIELDS:
        expected, got = (first_three(map(repr, sorted(names))) for names in (_FIELDS, header))
        raise _error(f"expected the fields [{expected}] in the header, got [{got}]")
    return header, content[end:]


def _error(rule: str) -> ValueError:
    return ValueError(f"load_artifact: {rule}")


def _kernel_names() -> set[str]:
    """Return the kernel names of the catalog, with every epilogue."""
    names = set()
    for kernel in get_kernels():
        names.add(kernel.metadata.kernel_name)
        if kernel.metadata.epilogue is not None:
            names |= {kernel.with_epilogue(name).metadata.kernel_name for name in kernel.epilogues}
    return names


def _encode(value: Any) -> Any:
    """Return a static property as JSON: numbers and strings unchanged, others as {kind: value}."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return {"tuple": [_encode(item) for item in value]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)[6:]}
    if isinstance(value, torch.device):
        return {"device": value.type}
    if isinstance(value, type):
        return {"type": value.__name__}
    if isinstance(value, triton.language.dtype):
        return {"triton_dtype": value.name}
    if isinstance(value, triton.JITFunction):
        return {"function": f"{value.__module__}.{value.__name__}", "source": _source_digest()}
    assert type(value).__name__ == "NVMMASharedLayout", value
    return {"shared_memory_layout": dataclasses.asdict(value)}


def _decode(value: Any) -> Any:
    match value:
        case {"tuple": items}:
            return tuple(map(_decode, items))
        case {"dtype": name}:
            return getattr(torch, name)
        case {"device": kind}:
            return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        case {"type": name}:
            return _TYPES[name]
        case {"triton_dtype": name}:
            return triton.language.dtype(name)
        case {"function": name, "source": source}:
            return _function(name, source)
        case {"shared_memory_layout": fields}:
            from triton.experimental.gluon.language import NVMMASharedLayout

            return NVMMASharedLayout(**fields)
    return value


@functools.cache
def _source_digest() -> str:
    """Return a digest of all files of the package. Triton's hash of a function depends on which it hashed before."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _function(name: str, source: str) -> Any:
    """Return a function of this package by name. The catalog has already imported it."""
    module, _, attribute = name.rpartition(".")
    function = getattr(sys.modules.get(module), attribute, None) if module.startswith(f"{_PACKAGE}.") else None
    if not isinstance(function, triton.JITFunction) or source != _source_digest():
        raise _error(f"expected the source of {name} as installed, got a kernel compiled from another")
    return function
