"""One configuration of `benchmarks.expert_parallel`: its implementations are compared, then timed."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, distributed, nn
from torch.distributed import DeviceMesh

from moe_layers import MoEFeedForward
from moe_layers.parallel.collectives import Ranks, wait

from ..common.layers import PASSES, make_tokens
from ..common.shapes import Shape
from ..common.timing import Timing
from .grouped_mm import held
from .implementations import BASELINE, STYLES, local_layer, make_implementation, make_layer, passes, results
from .rank_timing import largest, time_together


def differing(modules: dict[str, nn.Module], tokens: Tensor, dout: Tensor) -> dict[str, str]:
    """Return the implementations that differ from the first one in outputs or gradients of a few experts, and by how
    much.

    Differences are relative norms, on the rank where they are largest. If each token's weights are zeros and a one, the
    router's gradient holds only rounding errors. So the divisor of its error is at least 1e-6 of `_product_of_norms` of
    tokens, output and `dout`.
    """
    expected: list[Tensor] = []
    least = [0.0] * 5
    found, first = {}, next(iter(modules))
    for name, module in modules.items():
        out, dtokens, *gradients = results(module, tokens, dout)
        actual = [out, dtokens, *(held(gradient)[:4].clone() for gradient in gradients)]
        if not expected:
            expected, least[2] = actual, 1e-6 * _product_of_norms(tokens, out, dout)
        del out, dtokens, gradients
        tolerance = 1e-4
        if tokens.dtype == torch.bfloat16:
            tolerance = 0.15 if name == BASELINE else 0.02  # the baseline also rounds its logits
        errors = [_relative_error(*each) for each in zip(actual, expected, least, strict=True)]
        errors = largest(errors, tokens.device).tolist()
        if max(errors) > tolerance:
            found[name] = f"differs from {first}, result by result, by {[float(f'{error:.2g}') for error in errors]}"
    return found


def _product_of_norms(*tensors: Tensor) -> float:  # [T, D] each
    """Multiply the tensors' norms for each token. Return the norm of these products."""
    norms = torch.stack([tensor.detach().float().norm(dim=1) for tensor in tensors])  # [tensors, T]
    return norms.prod(0).norm().item()


def _relative_error(actual: Tensor, expected: Tensor, least: float) -> float:
    """Return the error relative to the expected norm, or to `least` if larger. Non-finite values give a huge error."""
    size = expected.float().norm().clamp(min=max(least, torch.finfo(torch.float32).tiny))
    return ((actual.float() - expected.float()).norm() / size).nan_to_num(nan=torch.inf).item()


def rows_between(layer: MoEFeedForward, tokens: Tensor, ranks: Ranks) -> tuple[list[int], list[int]]:
    """Return the number of rows that this rank sends to each rank, and the number that it receives from each rank."""
    with torch.no_grad():
        choices = layer.router(tokens).topk_experts
    sent = torch.bincount(choices.flatten().long(), minlength=layer.num_experts).view(ranks.size, -1).sum(1)
    ones = [1] * ranks.size
    received = wait(ranks.all_to_all(sent, ones, ones))
    return sent.tolist(), received.tolist()


def token_collectives(
    tokens: Tensor, sent: list[int], received: list[int], ranks: Ranks
) -> dict[str, Callable[[], object]]:
    """Return, by dispatcher, the collectives that move tokens in a forward, with this routing's sizes."""
    leaving, arriving = (tokens.new_zeros(sum(rows), tokens.shape[1]) for rows in (sent, received))
    everyones = tokens.new_zeros(ranks.size * len(tokens), tokens.shape[1])

    def alltoall() -> None:
        wait(ranks.all_to_all(leaving, received, sent))
        wait(ranks.all_to_all(arriving, sent, received))

    def allgather() -> None:
        wait(ranks.all_gather(tokens))
        wait(ranks.reduce_scatter(everyones))

    return {"alltoall": alltoall, "allgather": allgather}


def bench_layer(
    shape: Shape, mesh: DeviceMesh, routing: str, options: argparse.Namespace, device: torch.device
) -> list[dict]:
    """Return result rows for one shape, number of ranks and routing. Wrong implementations are not timed."""
    ranks, layer = Ranks.of(mesh.get_group()), make_layer(shape, mesh, options.dtype)
    tokens = make_tokens(layer, shape, routing).roll(distributed.get_rank(), 0)
    dout = torch.randn_like(tokens)
    modules = {name: make_implementation(name, layer, mesh) for name in options.implementations}
    wrong = differing(modules, tokens, dout)
    modules = {name: module for name, module in modules.items() if name not in wrong}
    functions = {
        f"{name}/{which}": run for name, m in modules.items() for which, run in passes(m, tokens, dout).items()
    }
    local = local_layer(layer)
    local_tokens = make_tokens(local, shape.of_one_process(ranks.size), "even")
    runs = passes(local, local_tokens, torch.randn_like(local_tokens))
    functions |= {f"local/{which}": run for which, run in runs.items()}
    sent, received = rows_between(layer, tokens, ranks)
    functions |= {f"comm/{name}": run for name, run in token_collectives(tokens, sent, received, ranks).items()}
    timings = time_together(functions, device, options)
    busiest = largest([sum(received) / shape.num_rows], device).item()
    rows = [row for which in PASSES for row in _rows_of(which, list(modules), timings, busiest)]
    return rows + [{"implementation": name, "skipped": reason} for name, reason in wrong.items()]


def _rows_of(which: str, names: list[str], timings: dict[str, Timing], busiest: float) -> list[dict]:
    """Return result rows. `busiest`: rows of the busiest rank over the mean of all ranks."""
    rows, baseline = [], timings.get(f"{BASELINE}/{which}")
    for name in names:
        timing = timings[f"{name}/{which}"]
        trip = timings[f"comm/{'allgather' if name.startswith(('allgather', 'overlapped')) else 'alltoall'}"].ms
        comm_ms, local_ms = trip if which == "forward" else 2 * trip, timings[f"local/{which}"].ms
        rows.append(
            {
                "pass": which,
                "implementation": name,
                **timing._asdict(),
                "comm_ms": comm_ms,
                "local_ms": local_ms,
                "model_ms": comm_ms + local_ms,
                "share_of_model": (comm_ms + local_ms) / timing.ms,
                "busiest": busiest,
                "share_of_busiest": (comm_ms + busiest * local_ms) / timing.ms,
                "times_baseline": baseline and baseline.ms / timing.ms,
            }
        )
    best = best_form({row["implementation"]: row["ms"] for row in rows})
    return [row | {"best": best} for row in rows]


BEST_COLUMNS = ("shape", "ep", "pass", "best", "times_whole", "times_baseline")
AS_FAST = 1.02  # times up to this multiple of the fastest time count as equal


def best_form(times: dict[str, float]) -> str | None:
    """Return the simplest of our implementations whose time is within 2 % of the fastest of them."""
    ours = [name for name in STYLES if name in times]
    fastest = min((times[name] for name in ours), default=0.0)
    return next((name for name in ours if times[name] <= AS_FAST * fastest), None)


def best_forms(rows: list[dict]) -> list[dict]:
    """Return a row per shape, EP and pass: the `best_form` of times summed over routings, and its speed-ups over
    unchunked forms and the baseline. Ignore forms not timed for every routing, because their sum would be too small."""

    def key(row: dict) -> tuple:
        return row["shape"], row["ep"], row["pass"]

    chosen = []
    timed = sorted((row for row in rows if "ms" in row and "pass" in row), key=key)
    for about, group in itertools.groupby(timed, key):
        by_routing: dict[str, dict[str, float]] = {}
        for row in group:
            by_routing.setdefault(row["routing"], {})[row["implementation"]] = row["ms"]
        in_all = set.intersection(*map(set, by_routing.values()))
        times = {name: sum(ms[name] for ms in by_routing.values()) for name in in_all}
        best = best_form(times)
        if best is None:
            continue
        whole = best_form({name: ms for name, ms in times.items() if "/" not in name})
        of_best = {
            "best": best,
            "times_whole": whole and times[whole] / times[best],
            "times_baseline": times[BASELINE] / times[best] if BASELINE in times else None,
        }
        chosen.append(dict(zip(("shape", "ep", "pass"), about, strict=True)) | of_best)
    return chosen
