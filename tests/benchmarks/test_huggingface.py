import json

import pytest

from benchmarks import huggingface


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT's
@pytest.mark.parametrize("rank", [None, 2])
def test_small_run_writes_a_results_file(rank, tmp_path, capsys):
    if rank is not None:
        pytest.importorskip("peft", reason="needs peft")
    path = tmp_path / "results.json"
    quick = ["--shape", "tiny", "--device", "cpu", "--rounds", "1", "--round-ms", "1", "--implementation", "reference"]
    quick += ["--routing"] if rank is None else ["--lora", str(rank)]
    huggingface.main([*quick, "--commit", "abc", "--output", str(path)])
    rows = json.loads(path.read_text())
    assert [row["pass"] for row in rows[:4]] == ["block forward+backward"] * 2 + ["training step"] * 2
    assert [row["implementation"] for row in rows[:4]][1::2] == ["moe_layers"] * 2
    of_routing = ["moe_layers observed", "moe_layers replayed"] if rank is None else []
    assert [(row["pass"], row["implementation"]) for row in rows[4:]] == [("training step", x) for x in of_routing]
    assert all(row["lora_rank"] == rank for row in rows)
    assert all(row["commit"] == "abc" and row["ms"] > 0 and row["transformers"] for row in rows)
    printed = capsys.readouterr().out
    assert "the experts of 2 blocks" in printed and "training step" in printed
