"""Tables of the fastest measured kernels, one file for each GPU model. `python -m moe_kernels tune` writes a table.

The environment variable MOE_KERNELS_TUNING names the folder of the tables. "off" disables all tables. Default: the
folder `moe_kernels` in the user's cache.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple


class Table(NamedTuple):
    """Measurements of one GPU model."""

    kernels: dict[str, str]  # `Arguments.table_key()` -> name of the fastest kernel
    copies: dict[str, list[bool]]  # `copies_key()` -> for each gather in `Copies`, whether a copy is faster
    milliseconds: dict[str, float] | None = None  # key of `kernels` -> time of the kernel; None: not recorded

    def merged(self, other: Table) -> Table:
        """Return the entries of both tables. For a key in both tables, return the entry of `other`."""
        # Drop the time of a replaced kernel, because the new kernel takes a different time.
        milliseconds = {key: ms for key, ms in (self.milliseconds or {}).items() if key not in other.kernels}
        return Table(
            self.kernels | other.kernels, self.copies | other.copies, milliseconds | (other.milliseconds or {})
        )


def user_folder(setting: str | None, cache_home: str | None) -> Path | None:
    """Return the folder of the tables for these values of MOE_KERNELS_TUNING and XDG_CACHE_HOME. "off" gives None."""
    if setting == "off":
        return None
    if setting:
        return Path(setting).expanduser()
    return Path(cache_home or "~/.cache").expanduser() / "moe_kernels"


# The environment variables are read once, so later changes do not affect the selection in this process.
USER = user_folder(os.environ.get("MOE_KERNELS_TUNING"), os.environ.get("XDG_CACHE_HOME"))


def table_name(gpu: str) -> str:
    """Return the file name of a GPU model's table."""
    return f"{gpu.lower().replace(' ', '_')}.json"


def paths(gpu: str | None = None) -> list[Path]:
    """Return all existing table files. With `gpu`, return only the file of this GPU model, if it exists."""
    return [] if USER is None else sorted(USER.glob("*.json" if gpu is None else table_name(gpu)))


def table_of(gpu: str) -> Table:
    """Return the table of a GPU model, or an empty table if no file exists."""
    return next(map(read, paths(gpu)), Table({}, {}))


def read(path: Path) -> Table:
    """Return the table in a file. Raise ValueError if the file holds no table."""
    try:
        return Table(**json.loads(path.read_text())["table"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"tuning: {path} must hold a table, got {error!r}; delete it or tune anew") from error


def write(path: Path, table: Table, **fields: str) -> None:
    """Write a table and further `fields`, such as versions, to a file. The file is replaced in one step, so that other
    processes read the old or the new table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = {name: value for name, value in table._asdict().items() if value is not None}
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(json.dumps({"table": entries, **fields}, indent=1) + "\n")
    unfinished.replace(path)
