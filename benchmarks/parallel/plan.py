"""Predicted memory and speed of whole models whose experts 8 ranks share, from the parts that a benchmark measured.

The measured parts are FLOP/s of one GPU, without communication, and bytes per second of the all-to-all. Both come from
rows of `benchmarks.whole_model_parallel`; without rows, they are the assumptions below. Then

    time = FLOPs / rate + bytes of the experts' all-to-alls / bandwidth + the part of FSDP2's bytes that is not hidden

Nothing else is hidden: the prediction is for the "alltoall" dispatcher without overlap. Layers are checkpointed, so
that the forward and its all-to-alls count twice. FSDP2 shards the rest of the model over all GPUs, and each expert over
the GPUs that hold it. FSDP2's transfers overlap with compute: only the time beyond compute counts. Between hosts, they
run at the bandwidth of the network. Memory counts `STATE_BYTES` per parameter, all sharded, the inputs of all layers,
the activations of one layer, the logits and, with several hosts, gathered experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..common.results_file import Row

RATE = 400e12  # assumed FLOP/s of a GPU over a whole step, without communication
BANDWIDTH = 300e9  # assumed bytes/s of an all-to-all in one host, per direction
NETWORK = 45e9  # bytes/s of a GPU between hosts
PER_HOST = 8
LENGTH = 4096
TOKENS = 4 * LENGTH  # tokens of each GPU
STATE_BYTES = 2 + 2 + 4 + 4 + 4  # bytes per parameter: parameter, gradient, master weight and two moments
COLUMNS = ("model", "gpus", "ep", "parameters_b", "active_b", "gib", "tokens_per_s_per_gpu", "published")
COLUMNS += ("compute_ms", "all_to_all_ms", "exposed_fsdp_ms")
EXCHANGES = 4  # all-to-alls of a layer: tokens and outputs, and their gradients
RECOMPUTED = 2  # all-to-alls of the recomputation: tokens and outputs


@dataclass(frozen=True)
class Model:
    """Sizes of a published model. Numbers of parameters are per layer unless a comment says otherwise."""

    name: str
    layers: int
    d_model: int
    d_ff: int
    num_experts: int
    top_k: int
    attention: int
    vocabulary: int
    heads: tuple[int, int]  # number and width
    shared_experts: int = 0
    dense: int = 0  # parameters of feed-forwards without experts, of all layers
    dense_layers: int = 0
    published: str = ""  # tokens/s per GPU that others report, 8 H100, 4096 tokens

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def expert(self) -> int:
        return 3 * self.d_model * self.d_ff

    @property
    def experts(self) -> int:
        """Return the number of parameters in all routed experts of the model."""
        return self.moe_layers * self.num_experts * self.expert

    @property
    def rest(self) -> int:
        shared = self.moe_layers * (self.shared_experts * self.expert + self.num_experts * self.d_model)
        return self.layers * self.attention + shared + self.dense + 2 * self.vocabulary * self.d_model

    @property
    def active(self) -> int:
        """Return the number of parameters that multiply a token's values. The input embedding is not among them."""
        return self.moe_layers * self.top_k * self.expert + self.rest - self.vocabulary * self.d_model

    @property
    def flops(self) -> float:
        """Return a token's FLOPs in two forwards and a backward. On average, a token attends to half the sequence."""
        number, width = self.heads
        return 8 * (self.active + self.layers * number * width * LENGTH)


MODELS = (
    Model("qwen3-30b-a3b", 48, 2048, 768, 128, 8, 18_874_368, 151_936, (32, 128), published="12,040 (NeMo Automodel)"),
    Model("gpt-oss-20b", 24, 2880, 2880, 32, 4, 26_542_080, 201_088, (64, 64), published="13,058 (NeMo Automodel)"),
    Model("gpt-oss-120b", 36, 2880, 2880, 128, 4, 26_542_080, 201_088, (64, 64)),
    Model(
        "deepseek-v3", 61, 7168, 2048, 256, 8, 187_107_328, 129_280, (128, 160), shared_experts=1,
        dense=3 * 3 * 7168 * 18432, dense_layers=3,
    ),
)  # fmt: skip


def basis(rows: list[Row]) -> str:
    rate, bandwidth = measured_rate(rows), measured_bandwidth(rows)
    parts = [f"{(rate or RATE) / 1e12:.0f} TFLOP/s per GPU ({'measured' if rate else 'assumed'})"]
    parts.append(f"{(bandwidth or BANDWIDTH) / 1e9:.0f} GB/s all-to-all ({'measured' if bandwidth else 'assumed'})")
    return "; ".join(parts)


def predictions(rows: list[Row]) -> list[Row]:
    rate, bandwidth = measured_rate(rows) or RATE, measured_bandwidth(rows) or BANDWIDTH
    return [_predict(model, gpus, rate, bandwidth) for model in MODELS for gpus in (8, 64)]


def _predict(model: Model, gpus: int, rate: float, bandwidth: float) -> Row:
    ep, copies = PER_HOST, gpus // PER_HOST
    compute = TOKENS * model.flops / rate
    row_bytes = TOKENS * model.top_k * model.d_model * 2 * (ep - 1) / ep
    all_to_all = (EXCHANGES + RECOMPUTED) * model.moe_layers * row_bytes / bandwidth
    # FSDP2 gathers parameters in forward and in backward, and reduces gradients: three times the parameters' bytes.
    slowest = NETWORK if copies > 1 else bandwidth
    rest = 3 * 2 * model.rest * (gpus - 1) / gpus / slowest
    of_experts = 3 * 2 * model.experts / ep * (copies - 1) / copies / NETWORK
    exposed = max(0.0, rest + of_experts - compute)
    gathered = 2 * (model.num_experts // ep * model.expert if copies > 1 else 0) * 2
    layer = TOKENS * (model.top_k * (2 * model.d_model + 3 * model.d_ff) + 8 * model.d_model) * 2
    logits = TOKENS * model.vocabulary * 4
    inputs = model.layers * TOKENS * model.d_model * 2
    states = STATE_BYTES * (model.experts + model.rest) / gpus
    return {
        "model": model.name,
        "gpus": gpus,
        "ep": ep,
        "parameters_b": (model.experts + model.rest) / 1e9,
        "active_b": model.active / 1e9,
        "gib": (states + gathered + layer + logits + inputs) / 2**30,
        "tokens_per_s_per_gpu": TOKENS / (compute + all_to_all + exposed),
        "published": model.published if gpus == 8 else "",
        "compute_ms": 1e3 * compute,
        "all_to_all_ms": 1e3 * all_to_all,
        "exposed_fsdp_ms": 1e3 * exposed,
    }


def _rows_of(rows: list[Row], way: str) -> list[Row]:
    plain = [row for row in rows if row["model"] in _BY_NAME and not (row.get("checkpointing") or row.get("compiled"))]
    return [row for row in plain if row["way"] == way and row["ms"]]


_BY_NAME = {model.name: model for model in MODELS}
_VOCABULARY = 32000  # vocabulary of the measured models


def measured_rate(rows: list[Row]) -> float | None:
    """Return the FLOP/s of one GPU in the last row without communication."""
    for row in reversed(_rows_of(rows, "one_gpu")):
        model, layers = _BY_NAME[row["model"]], row["layers"]
        number, width = model.heads
        layer = model.attention + model.top_k * model.expert + model.num_experts * model.d_model
        per_token = 6 * (layers * (layer + number * width * row["length"]) + _VOCABULARY * model.d_model)
        return row["batch"] * row["length"] * per_token / row["ms"] * 1e3
    return None


def measured_bandwidth(rows: list[Row]) -> float | None:
    """Return the bytes per second of the all-to-alls in the last row of "shard_experts/alltoall".

    The row's collectives include FSDP2's, so that this is a lower bound.
    """
    for row in reversed(_rows_of(rows, "shard_experts/alltoall")):
        model, ranks = _BY_NAME[row["model"]], row["processes"]
        if ranks > 1 and row["comm_ms"]:
            num_rows = row["batch"] * row["length"] * model.top_k * (ranks - 1) / ranks
            return EXCHANGES * row["layers"] * num_rows * model.d_model * 2 / row["comm_ms"] * 1e3
    return None
