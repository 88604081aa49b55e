import json

from benchmarks.checkpoint import main


def test_small_run_writes_a_results_file(tmp_path, capsys):
    main(["--shape", "tiny", "--rounds", "1", "--commit", "abc", "--output", str(tmp_path / "results.json")])
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["commit"] == "abc" and record["results"][0]["device"] == "cpu"
    assert record["results"][0]["share"] > 0
    assert "tiny to cpu" in capsys.readouterr().out
