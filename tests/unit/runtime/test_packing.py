"""Operands packed by name and as leaves."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from moe_kernels.quantization.quantize import quantize
from moe_kernels.runtime.packing import PackedSignature, Packing
from moe_kernels.types import Weight


class Inner(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    scale: float = 1.0


class Outer(NamedTuple):
    tokens: Tensor
    inner: Inner
    is_last: bool


class Clash(NamedTuple):
    weight: Tensor
    inner: Inner


def make():
    return Outer(torch.ones(2), Inner(torch.zeros(3), None, 2.0), True)


def test_leaves_and_back():
    packing, outer = Packing({"outer": Outer}), make()
    leaves = packing.flatten(outer)
    assert leaves == (outer.tokens, outer.inner.weight, None, 2.0, True)
    assert list(packing.types) == ["tokens", "weight", "bias", "scale", "is_last"]
    assert packing.pack(*leaves) == (outer,)


def test_names_are_distinct():
    with pytest.raises(AssertionError, match="weight"):
        Packing({"clash": Clash})


class Weights(NamedTuple):
    up: Weight
    down: Weight


@pytest.mark.parametrize("nested", [False, True])
def test_weights_that_may_be_quantised(nested):
    stored = quantize(torch.randn(2, 3, 64), "nf4_nested" if nested else "mxfp4")
    packing, weights = Packing({"weights": Weights}), Weights(torch.zeros(1), stored)
    leaves = packing.flatten(weights)
    names = list(packing.types)
    assert len(leaves) == len(names) == 16 and names[:3] == ["up", "up_values", "up_scales"]
    assert leaves[0] is weights.up and leaves[1:9] == (None,) * 8 and leaves[9] is stored.values
    # Scales, the table of 16 codes, three tensors of nested scales, and the layout.
    assert [leaf is None for leaf in leaves[10:]] == [False, not nested, *[not nested] * 3, False]
    (packed,) = packing.pack(*leaves)
    assert packed.up is weights.up and packed.down.tensors.keys() == stored.tensors.keys()
    assert packed.down.format == stored.format and packed.down.shape == stored.shape
    assert all(a is b for a, b in zip(packed.down.tensors.values(), stored.tensors.values(), strict=True))


class Result(NamedTuple):
    scale: Tensor
    bias: Tensor | None


def run(dout: Tensor, outer: Outer, num: int) -> Result:
    return Result(num * dout, outer.inner.bias)


def test_schema_of_packed_parameters_has_the_tensors_that_exist():
    signature, given = PackedSignature(run), (torch.ones(1), make(), 3)
    assert signature.schema == "(Tensor[] tensors, str others) -> (Tensor, Tensor)"
    leaves = signature.flatten(*given)
    tensors, others = signature.to_schema(leaves)
    assert tensors == [given[0], given[1].tokens, given[1].inner.weight]
    assert others == "..., ..., ..., None, 2.0, True, 3"
    back = signature.pack(*signature.from_schema(tensors, others))
    assert back == given
    result = run(*given)
    assert result.bias is None
    assert signature.name_results(tuple(result)) == result
