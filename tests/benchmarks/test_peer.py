"""benchmarks/peer.py with adapters of a few lines of PyTorch."""

from functools import partial

import pytest
import torch

from benchmarks import layer as benchmark
from benchmarks import peer
from benchmarks.common import layers
from moe_layers import MoEFeedForward

from .commands import measure


def adapter(x, router, w_up, w_down, top_k):
    """Compute every expert for every token."""
    chosen, experts = (x @ router.t()).topk(top_k)
    weights = torch.zeros(len(x), len(router)).scatter(1, experts, chosen.softmax(-1))
    gate, up = torch.einsum("td,efd->tef", x, w_up).chunk(2, -1)
    return torch.einsum("tef,edf,te->td", torch.nn.functional.silu(gate) * up, w_down, weights)


def swapped(x, router, w_up, w_down, top_k):
    return adapter(x, router, torch.cat(w_up.chunk(2, 1)[::-1], 1), w_down, top_k)


def frozen(x, router, w_up, w_down, top_k):
    return adapter(x, router.detach(), w_up, w_down, top_k)


def short(x, *others):
    return adapter(x, *others)[1:]


def run(name, tmp_path, monkeypatch, *arguments):
    monkeypatch.setattr(layers, "MoEFeedForward", partial(MoEFeedForward, implementation="reference"))
    monkeypatch.setattr(layers, "fused_experts", partial(layers.fused_experts, implementation="reference"))
    named = ["--adapter", f"{__name__}:{name}", "--peer", "PyTorch", "--peer-version", torch.__version__]
    return measure(peer.main, tmp_path / "peer.json", *named, "--shapes", "tiny", "--device", "cpu", *arguments)


def test_small_run_writes_a_results_file(tmp_path, monkeypatch):
    rows = run("adapter", tmp_path, monkeypatch)
    assert [(row["pass"], row["implementation"]) for row in rows] == [
        (which, implementation) for which in benchmark.PASSES for implementation in ("triton", "PyTorch")
    ]
    for row in rows:
        assert row["share_of_dense_bound"] == row["dense_bound_ms"] / row["ms"] > 0
        assert (row["peer"], row["peer_version"], row["commit"]) == ("PyTorch", torch.__version__, "abc")
        assert {"gpu", "torch", "triton", "peak_mib"} < row.keys()
    found = rows[1]["differences"]
    assert rows[0]["differences"] is None and list(found) == ["out", "x", "router", "w_up", "w_down"]
    assert max(found.values()) < 1e-5
    (line,) = benchmark.compare(rows)
    assert line["speedup forward"] == rows[1]["ms"] / rows[0]["ms"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("swapped", r"must differ from the layer by at most 0\.25, got out 0\.\d+, x 0\."),
        ("frozen", r"differentiable in x, router, w_up and w_down, got no gradient of \['router'\]"),
        ("short", r"must return the shape of x, \[40, 64\], got \[39, 64\]"),
        ("absent", r"--adapter: must name a function as module:function, got .*:absent"),
    ],
)
def test_adapters_of_something_else_are_refused(name, message, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=message):
        run(name, tmp_path, monkeypatch)


def test_plain_activations_are_refused(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=r"--shapes: an adapter computes swiglu, got nemotron-3-nano-t4096, 1 in all"):
        run("adapter", tmp_path, monkeypatch, "--shapes", "nemotron-3-nano-t4096")
