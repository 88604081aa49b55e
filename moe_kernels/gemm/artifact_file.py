"""A compiled artifact as a file, for another process on the same kind of GPU with the same software.

    8 bytes    b"MOEKERN1": what the file is, and the version of this layout
    8 bytes    length of the header, little-endian
    header     JSON in UTF-8
    binary     the cubin
    32 bytes   SHA-256 of everything before

The header has `kernel_name`, of the catalog; `triton_version`; `architecture`, such as 90; `static_properties`, the
artifact's, as `_encode` writes them; and for the launch Triton's `signature` and `metadata` of the compiled kernel.
Functions stand in it by name, with a digest of this package's source. A file holds code for the GPU: load none that you
would not run.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..runtime.launch import CompiledArtifact
from ..runtime.triton import HAS_TRITON, INTERPRET, triton
from .selection import get_kernels

_MAGIC = b"MOEKERN1"
_DIGEST_BYTES = 32
_FIELDS = {"kernel_name", "triton_version", "architecture", "static_properties", "signature", "metadata"}
_PACKAGE = __name__.partition(".")[0]
_TYPES = {kind.__name__: kind for kind in (type(None), bool, float)}  # of arguments in static properties


def save_artifact(artifact: CompiledArtifact, path: str | os.PathLike[str]) -> None:
    """Write a file from which another process on the same kind of GPU can load the artifact.

    Raises:
        ValueError: it was made in the interpreter, which compiles nothing.
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
    """Read an artifact that `save_artifact` wrote, for the current GPU, without compiling.

    The file holds code for the GPU: load only what you trust.

    Raises:
        ValueError: another version of Triton or for another architecture wrote it, the catalog lacks its kernel or has
            it with other source, or the file is damaged; the message says which.
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
    if header["architecture"] != (architecture := triton.runtime.driver.active.get_current_target().arch):
        raise _error(f"expected architecture {architecture}, got {header['architecture']}")
    properties = tuple(map(_decode, header["static_properties"]))
    compiled = _compiled_kernel(properties[0], header["signature"], header["metadata"], binary)
    return CompiledArtifact(header["kernel_name"], properties, compiled)


def write_container(path: str | os.PathLike[str], header: dict[str, Any], binary: bytes) -> None:
    encoded = json.dumps(header).encode()
    content = _MAGIC + len(encoded).to_bytes(8, "little") + encoded + binary
    Path(path).write_bytes(content + hashlib.sha256(content).digest())


def read_container(path: str | os.PathLike[str]) -> tuple[dict[str, Any], bytes]:
    """The header and the binary.

    Raises:
        ValueError: the file is none of these, or damaged.
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
        raise _error(f"expected the fields {sorted(_FIELDS)} in the header, got {sorted(header)}")
    return header, content[end:]


def _error(rule: str) -> ValueError:
    return ValueError(f"load_artifact: {rule}")


def _kernel_names() -> set[str]:
    """Those of the catalog, with every epilogue."""
    names = set()
    for kernel in get_kernels():
        names.add(kernel.metadata.kernel_name)
        if kernel.metadata.epilogue is not None:
            names |= {kernel.with_epilogue(name).metadata.kernel_name for name in kernel.epilogues}
    return names


def _compiled_kernel(function: Any, signature: dict[str, Any], metadata: dict[str, Any], binary: bytes) -> Any:
    """What Triton makes of the files in its cache, which it reads here and now."""
    from triton.compiler import ASTSource, CompiledKernel

    source = ASTSource(function, {name: _as_tuples(kind) for name, kind in signature.items()})
    with tempfile.TemporaryDirectory() as folder:
        files = {f"kernel.{extension}": os.path.join(folder, f"kernel.{extension}") for extension in ("json", "cubin")}
        Path(files["kernel.json"]).write_text(json.dumps(metadata))
        Path(files["kernel.cubin"]).write_bytes(binary)
        return CompiledKernel(source, files, metadata["hash"])


def _as_tuples(kind: Any) -> Any:
    return tuple(map(_as_tuples, kind)) if isinstance(kind, list) else kind


def _encode(value: Any) -> Any:
    """A static property as JSON: numbers and strings as they are, others as {kind: value}."""
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
    """Of all files of the package. Triton's own hash of a function depends on which others it hashed before."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _function(name: str, source: str) -> Any:
    """The function of this package, which the catalog has imported."""
    module, _, attribute = name.rpartition(".")
    function = getattr(sys.modules.get(module), attribute, None) if module.startswith(f"{_PACKAGE}.") else None
    if not isinstance(function, triton.JITFunction) or source != _source_digest():
        raise _error(f"expected the source of {name} as installed, got a kernel compiled from another")
    return function
