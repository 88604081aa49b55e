"""Facts about compiled code: registers, spills, memory, instructions, and patterns that are known to be miscompiled."""

import re
import subprocess
import tempfile
from pathlib import Path

import triton

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def read_by(tool: str, *options: str, compiled) -> str:
    """Return what one of NVIDIA's tools prints of the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [BIN / tool, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def disassemble(compiled) -> str:
    """Return the machine code with source lines."""
    return read_by("nvdisasm", "-g", "-c", compiled=compiled)


# PTX patterns that known compilers miscompile on Hopper.
MISCOMPILED = {
    # ptxas up to 12.9, as in Triton 3.6 to 3.8: https://github.com/triton-lang/triton/issues/11781
    "wgmma reads A from registers": re.compile(r"wgmma\.mma_async[^;]*\}\s*,\s*\{"),
    # Triton 3.7 and 3.8: https://github.com/triton-lang/triton/issues/11581, /11341, /11356, /9035
    "packed 16-bit integer arithmetic": re.compile(r"\b(add|sub|mul|mad|min|max|abs|neg)(\.\w+)*\.[su]16x2\b"),
    # Triton up to 3.7.0: https://github.com/fla-org/flash-linear-attention/issues/640
    "stmatrix transposes a product": re.compile(r"\bstmatrix\b[^;]*\.trans\b"),
}


def inspect(compiled) -> dict[str, object]:
    """Return registers, spills, shared and scratch memory, instructions, hazards, and accesses of single elements."""
    usage = read_by("cuobjdump", "-res-usage", compiled=compiled)
    found = re.search(r"REG:(\d+).*?STACK:(\d+).*?LOCAL:(\d+)", usage)
    assert found, usage
    tensor_core = re.search(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", compiled.asm["ptx"])
    return {
        "registers": int(found[1]),
        "spilled_bytes": int(found[2]) + int(found[3]),
        "shared_bytes": compiled.metadata.shared,
        "scratch_bytes": compiled.metadata.global_scratch_size,
        "num_warps": compiled.metadata.num_warps,
        "tensor_core": tensor_core[0] if tensor_core else None,
        "narrow_accesses": len(re.findall(r"\b(?:ld|st)\.global(?:\.(?!v\d)[\w:]+)*\.[bsu]16\b", compiled.asm["ptx"])),
        "hazards": [name for name, pattern in MISCOMPILED.items() if pattern.search(compiled.asm["ptx"])],
        "moved": moved_integers(compiled.asm["ttgir"]) if "ttgir" in compiled.asm else [],
    }


def moved_integers(ttgir: str) -> list[bool]:
    """Return, per integer that passes through an assembly `mov`, whether a loop carries it between iterations."""
    moved = re.findall(r'"mov\.b32 \$0, \$1;" \{[^}]*\} (%\w+) : i32 -> i32', ttgir)
    carried = re.findall(r"(%[\w.]+) = %", "".join(re.findall(r"iter_args\((.*?)\) ->", ttgir)))
    return [name in carried for name in moved]
