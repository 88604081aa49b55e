"""Hypothesis strategies for cases.

A GPU compiles a kernel for each width, dtype and activation, so these are drawn from small sets; everything that needs
no compiler varies freely. The interpreter is slow, so sizes are tiny there. The float64 reference has neither limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st

from moe_kernels.specs import ACTIVATION_KINDS

from .experts import OPERANDS, Experts
from .grouped import GroupedGemm, GroupedWgrad
from .layer import ROUTERS as LAYER_ROUTERS
from .layer import Layer
from .products import BatchedGemm, GemmList, JaggedGemm
from .routing import ROUTERS, RoutingAndCombine
from .tensors import LAYOUTS

Draw = Callable[[st.SearchStrategy], object]


@dataclass(frozen=True)
class Space:
    """Sets to draw cases from; None means any small value."""

    dtypes: tuple[str, ...]
    widths: dict[str, tuple[tuple[int, int], ...]] | None  # by dtype: (d_model, d_ff)
    experts: tuple[tuple[int, int], ...] | None  # (num_experts, top_k)
    most_tokens: int
    most_groups: int
    layouts: tuple[tuple[str, str], ...] | None  # of two operands, repeated
    activations: tuple[str, ...]
    routers: tuple[str, ...]  # for layers

    def two_widths(self, dtype: str) -> st.SearchStrategy[tuple[int, int]]:
        if self.widths is not None:
            return st.sampled_from(self.widths[dtype])
        return st.tuples(st.integers(1, 40), st.integers(1, 24))

    def experts_and_top_k(self) -> st.SearchStrategy[tuple[int, int]]:
        if self.experts is not None:
            return st.sampled_from(self.experts)
        return st.integers(1, 8).flatmap(lambda e: st.tuples(st.just(e), st.integers(1, min(e, 4))))

    def many_layouts(self, number: int) -> st.SearchStrategy[tuple[str, ...]]:
        if self.layouts is None:
            return st.tuples(*[st.sampled_from(LAYOUTS)] * number)
        return st.sampled_from(self.layouts).map(lambda pair: (pair * number)[:number])

    def tokens(self) -> st.SearchStrategy[int]:
        """Draw numbers of tokens, mostly large enough to judge results from one draw."""
        usual = st.integers(self.most_tokens // 2, self.most_tokens)
        return st.one_of(st.integers(0, self.most_tokens), usual, usual)

    def sizes(self) -> st.SearchStrategy[tuple[int, ...]]:
        """Draw rows of groups: some, none, and all in one."""
        each = st.one_of(st.just(0), st.integers(0, self.most_tokens // 2), st.just(self.most_tokens))
        return st.lists(each, min_size=1, max_size=self.most_groups).map(tuple)


REFERENCE = Space(
    dtypes=("float64",),
    widths=None,
    experts=None,
    most_tokens=40,
    most_groups=8,
    layouts=None,
    activations=tuple(ACTIVATION_KINDS),
    routers=tuple(LAYER_ROUTERS),
)
INTERPRETER = Space(
    dtypes=("float32", "float16"),
    widths=dict.fromkeys(("float32", "float16"), ((21, 13), (40, 24), (64, 8), (33, 20))),
    experts=((1, 1), (2, 2), (4, 2), (5, 3)),
    most_tokens=40,
    most_groups=5,
    layouts=None,
    activations=tuple(ACTIVATION_KINDS),
    # Excludes parameters so small that their gradient can only be judged from many draws.
    routers=tuple(name for name in LAYER_ROUTERS if name not in ("logit_bias", "gemma4")),
)
GPU = Space(
    dtypes=("float32", "float16", "bfloat16"),
    widths={"float32": ((21, 13),), "float16": ((64, 32),), "bfloat16": ((256, 128), (41, 24))},
    experts=((1, 1), (4, 2), (8, 2), (5, 3), (16, 4)),
    most_tokens=300,
    most_groups=16,
    layouts=(("rows", "columns"), ("padded", "rows"), ("columns", "gaps")),
    activations=("swiglu", "gpt_oss", "relu_squared"),
    routers=tuple(LAYER_ROUTERS),
)

# Activations that map integers to integers.
EXACT_ACTIVATIONS = ("relu", "relu_squared", "reglu")


def activations(space: Space, exact: bool, *, gated: bool = False) -> st.SearchStrategy[str | None]:
    """Draw activations of the space; where float32 results are judged, only those with exact values."""
    names = EXACT_ACTIVATIONS if exact else space.activations
    return st.sampled_from([name for name in names if ACTIVATION_KINDS[name].gated or not gated])


SEEDS = st.integers(0, 99)
ROUTINGS = st.sampled_from(["random", "even", "zipf", "first"])
# Mostly 0, sometimes 1.
SHARES = st.sampled_from([0.0, 0.0, 0.3, 0.9, 1.0])


def frozen(names: tuple[str, ...]) -> st.SearchStrategy[tuple[str, ...]]:
    """Draw the inputs without a gradient: none, or any of the named ones."""
    return st.one_of(st.just(()), st.lists(st.sampled_from(names), unique=True).map(tuple))


def limits(activation: str, exact_inputs: bool) -> st.SearchStrategy[float | None]:
    """Draw the published limit or, if inputs are exact, one that clamps some values of unit scale."""
    has = ACTIVATION_KINDS[activation].limit is not None
    return st.sampled_from([None, 0.5]) if has and exact_inputs else st.none()


def routed_fields(draw: Draw, space: Space) -> dict[str, object]:
    """Draw the fields that all cases of routed tokens have."""
    num_tokens, (num_experts, top_k) = draw(space.tokens()), draw(space.experts_and_top_k())
    return {
        "num_tokens": num_tokens,
        "num_experts": num_experts,
        "top_k": top_k,
        "routing": draw(ROUTINGS),
        "dropped": draw(SHARES),
        "max_rows": draw(st.one_of(st.none(), st.none(), st.integers(1, num_tokens * top_k + 1))),
        "seed": draw(SEEDS),
    }


@st.composite
def experts(draw: Draw, space: Space) -> Experts:
    dtype = draw(st.sampled_from(space.dtypes))
    activation = draw(activations(space, dtype == "float32"))
    d_model, d_ff = draw(space.two_widths(dtype))
    bias, weight_on_input = draw(st.booleans()), draw(st.booleans())
    return Experts(
        **routed_fields(draw, space),
        d_model=d_model,
        d_ff=d_ff,
        dtype=dtype,
        activation=activation,
        limit=draw(limits(activation, dtype == "float64" or not weight_on_input)),
        bias=bias,
        weight_on_input=weight_on_input,
        recompute=draw(st.sampled_from([None, "up"])),
        frozen=draw(frozen(OPERANDS if bias else OPERANDS[:4])),
        layouts=draw(space.many_layouts(5)),
    )


def grouped_fields(draw: Draw, space: Space) -> dict[str, object]:
    """Draw the fields that all products of rows in groups have."""
    dtype = draw(st.sampled_from(space.dtypes))
    size_k, size_n = draw(space.two_widths(dtype))
    return {
        "sizes": draw(space.sizes()),
        "tail": draw(st.one_of(st.just(0), st.integers(0, 40))),
        "size_k": size_k,
        "size_n": size_n,
        "dtype": dtype,
        "layouts": draw(space.many_layouts(3)),
        "seed": draw(SEEDS),
    }


def result_fields(draw: Draw) -> dict[str, bool]:
    return {"wide": draw(st.booleans()), "into_out": draw(st.sampled_from([False, False, True]))}


@st.composite
def grouped_gemms(draw: Draw, space: Space) -> GroupedGemm:
    fields = grouped_fields(draw, space) | result_fields(draw)
    bias, row_scale = draw(st.booleans()), draw(st.booleans())
    exact = fields["dtype"] != "float64" and (fields["dtype"] == "float32" or fields["wide"] or row_scale)
    activation = draw(st.one_of(st.none(), activations(space, exact, gated=True)))
    fields["size_n"] *= 1 if activation is None else 2
    operands = ("a", "b", *["bias"] * bias, *["row_scale"] * row_scale)
    options = {"bias": bias, "row_scale": row_scale, "activation": activation}
    return GroupedGemm(**fields, **options, frozen=draw(frozen(operands)))


@st.composite
def grouped_wgrads(draw: Draw, space: Space) -> GroupedWgrad:
    return GroupedWgrad(**grouped_fields(draw, space), **result_fields(draw), frozen=draw(frozen(("a", "dout"))))


@st.composite
def gemm_lists(draw: Draw, space: Space) -> GemmList:
    size = st.integers(0, min(space.most_tokens, 80))
    return GemmList(
        problems=tuple(draw(st.lists(st.tuples(size, size, size), min_size=1, max_size=space.most_groups))),
        dtype=draw(st.sampled_from(space.dtypes)),
        wide=draw(st.booleans()),
        frozen=draw(frozen(("a", "b"))),
        layouts=draw(space.many_layouts(4)),
        seed=draw(SEEDS),
    )


@st.composite
def jagged_gemms(draw: Draw, space: Space) -> JaggedGemm:
    return JaggedGemm(
        **grouped_fields(draw, space),
        dtype_b=draw(st.sampled_from(space.dtypes)),
        long_offsets=draw(st.booleans()),
        frozen=draw(frozen(("a", "b"))),
    )


@st.composite
def batched_gemms(draw: Draw, space: Space) -> BatchedGemm:
    dtype = draw(st.sampled_from(space.dtypes))
    size_k, size_n = draw(space.two_widths(dtype))
    return BatchedGemm(
        batch=draw(st.integers(0, 4)),
        shared=draw(st.sampled_from([None, "a", "b", "both"])),
        size_m=draw(space.tokens()),
        size_k=size_k,
        size_n=size_n,
        dtype=dtype,
        wide=draw(st.booleans()),
        frozen=draw(frozen(("a", "b"))),
        layouts=draw(space.many_layouts(3)),
        seed=draw(SEEDS),
    )


def shorter(space: Space) -> st.SearchStrategy[str]:
    """Draw dtypes for cases with routing weights, which are not integers: see `Random`."""
    return st.sampled_from([dtype for dtype in space.dtypes if dtype != "float32"])


def constant(top_k: int, names: tuple[str, ...], chosen: tuple[str, ...]) -> tuple[str, ...]:
    """Return the chosen inputs to freeze. With one expert per token add `names`: its weight may be constantly 1."""
    return tuple(dict.fromkeys((*chosen, *names))) if top_k == 1 else chosen


@st.composite
def routings(draw: Draw, space: Space) -> RoutingAndCombine:
    dtype, fields = draw(shorter(space)), routed_fields(draw, space)
    return RoutingAndCombine(
        **fields,
        d_model=draw(space.two_widths(dtype))[0],
        dtype=dtype,
        router=draw(st.sampled_from(sorted(ROUTERS))),
        normalize=draw(st.booleans()),
        weighted=draw(st.booleans()),
        block_rows=draw(st.sampled_from([16, 128])),
        frozen=constant(fields["top_k"], ("logits",), draw(frozen(("logits", "tokens")))),
        layouts=draw(space.many_layouts(3)),
    )


@st.composite
def layers(draw: Draw, space: Space) -> Layer:
    dtype = draw(shorter(space))
    activation = draw(st.sampled_from(space.activations))
    d_model, d_ff = draw(space.two_widths(dtype))
    num_experts, top_k = draw(space.experts_and_top_k())
    shared_d_ff = draw(st.sampled_from([None, d_ff]))
    num_zero_experts = draw(st.sampled_from([0, 0, 2]))
    latent_dim = None if num_zero_experts else draw(st.sampled_from([None, None, d_ff]))
    router = draw(st.sampled_from(space.routers))
    exact_inputs = dtype == "float64" or (latent_dim is None and not LAYER_ROUTERS[router].weight_on_input)
    capacities = st.sampled_from([None, None, 2, 0.5, 1.5])
    axis = st.integers(0, 4)
    shapes = st.tuples(space.tokens()), st.tuples(axis, space.tokens()), st.tuples(axis, axis, axis)
    return Layer(
        leading=draw(st.one_of(*shapes)),
        d_model=d_model,
        d_ff=d_ff,
        num_experts=num_experts,
        top_k=top_k,
        dtype=dtype,
        router=router,
        activation=activation,
        limit=draw(limits(activation, exact_inputs)),
        bias=draw(st.booleans()),
        shared_d_ff=shared_d_ff,
        shared_gate=shared_d_ff is not None and draw(st.booleans()),
        num_zero_experts=num_zero_experts,
        latent_dim=latent_dim,
        capacity=draw(capacities),
        masked=draw(SHARES),
        recompute=draw(st.sampled_from([None, "up"])),
        losses=dtype != "float64" and draw(st.booleans()),  # the formula has no losses
        frozen=constant(top_k, ("router",), draw(frozen(("x", "router", "experts", "experts.w_up", "shared_expert")))),
        layouts=draw(space.many_layouts(2)),
        seed=draw(SEEDS),
    )


KINDS = {
    "experts": experts,
    "grouped_gemm": grouped_gemms,
    "grouped_gemm_wgrad": grouped_wgrads,
    "grouped_gemm_list": gemm_lists,
    "jagged_gemm": jagged_gemms,
    "batched_gemm": batched_gemms,
    "routing": routings,
    "layer": layers,
}
