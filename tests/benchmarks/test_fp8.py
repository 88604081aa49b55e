"""benchmarks/fp8.py on small sizes."""

import json

import torch

from benchmarks import fp8

from ..tiers import slow

FORMS = ("bf16", "fp8", "fp8 new weights", "fp8_saved")


@slow
def test_benchmark_of_small_sizes(tmp_path, capsys):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = tmp_path / "results.json"
    sizes = ["--shapes", "tiny", "--device", device, "--rounds", "1", "--round-ms", "1", "--output", str(path)]
    fp8.main(sizes)
    rows = json.loads(path.read_text())
    assert all(row["ms"] > 0 for row in rows)
    layer = [row for row in rows if row["case"] == "layer"]
    assert [(row["implementation"], row["pass"]) for row in layer] == [
        (form, which) for which in ("forward", "forward+backward") for form in FORMS
    ]
    assert all(0.01 < row["error_of_plain"] < 0.09 for row in layer if row["implementation"] != "bf16")
    gemms = {row["op"]: row for row in rows if row["case"] == "gemm" and row["implementation"] == "fp8"}
    assert list(gemms) == list(fp8.PRODUCTS) and all("block_scaled" in row["kernel"] for row in gemms.values())
    assert sum(row["case"] == "pass" for row in rows) == 8
    fp8.main([*sizes, "--resume"])
    assert json.loads(path.read_text()) == rows
