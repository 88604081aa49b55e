"""Figures of results files. matplotlib is imported only to draw a figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .results_file import Row


def read(path: Path) -> list[Row]:
    return json.loads(path.read_text())


def panels(num_rows: int, num_columns: int, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """Return a figure of this size in inches, and its array of axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(num_rows, num_columns, **options)


def save(figure: Any, path: Path, title: str) -> None:
    """Write the figure next to the results file."""
    figure.suptitle(title, fontsize=10)
    figure.savefig(path.with_suffix(".png"), dpi=90)
    print(path.with_suffix(".png"))
