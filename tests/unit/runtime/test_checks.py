"""Checks of operands that run once for all equal calls."""

import ast

import pytest
import torch

from moe_kernels import fused_experts, grouped_gemm
from moe_kernels.errors import first_three
from moe_kernels.runtime import dispatch
from moe_kernels.runtime.checks import check_same_device, check_same_dtype, check_shapes
from moe_kernels.runtime.dispatch import once_per_form
from moe_kernels.runtime.pytorch import assert_on_device
from moe_kernels.testing import CASES, make_inputs, make_permutation

from ...processes import ROOT


@pytest.fixture
def counted():
    """Return a check that counts its calls and returns the number of rows."""

    @once_per_form
    def check(rows, size):
        check.calls += 1
        return check_shapes("op", {"D": size}, rows=(rows, "R D"))["R"]

    check.calls = 0
    return check


def test_errors_show_three_items():
    assert (first_three([]), first_three("abc"), first_three(range(9), " ")) == ("", "a, b, c", "0 1 2 and 6 more")
    tensors = {name: torch.zeros(2, device=("cpu", "meta")[name > "b"]) for name in "abcdefg"}
    with pytest.raises(ValueError, match=r"on one device, got a cpu, c meta, d meta, and 3 more$"):
        check_same_device("op", **tensors)
    with pytest.raises(ValueError, match=r"dtype, got a torch.float32, b torch.float16$"):
        check_same_dtype("op", a=torch.zeros(2), b=torch.zeros(2).half(), c=torch.zeros(2))


def test_errors_join_no_lists():
    """A list inside an error can have any length. `first_three` shows it, except where its length is fixed."""
    fixed = {"list(FORMATS)", "tuple(SCORES)", "tuple(_DTYPES)", "tuple(_DTYPES.values())", "list(_NAMES)"}
    joins = {"sorted", "list", "tuple", "tolist", "dict", "set"}
    for path in (path for package in ("moe_kernels", "moe_layers") for path in (ROOT / package).rglob("*.py")):
        for error in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)):
            for shown in (node.value for node in ast.walk(error) if isinstance(node, ast.FormattedValue)):
                text = ast.unparse(shown)
                is_list = isinstance(shown, ast.Call) and ast.unparse(shown.func).rpartition(".")[2] in joins
                is_shape = "shape" in text or "wanted" in text or "expected" in text or text.startswith("choice[")
                assert not is_list or is_shape or text in fixed, f"{path.name}:{error.lineno}: {text}"


def test_calls_alike_are_checked_once(counted):
    for rows in (torch.zeros(4, 3), torch.ones(4, 3), torch.zeros(3, 4).t(), torch.nn.Parameter(torch.zeros(4, 3))):
        assert counted(rows, 3) == 4
    assert counted.calls == 1


def test_forms_do_not_pile_up(counted, monkeypatch):
    monkeypatch.setattr(dispatch, "_MOST_FORMS", 3)
    for num_rows in range(10):
        assert counted(torch.zeros(num_rows, 3), 3) == num_rows
    assert counted(torch.zeros(9, 3), 3) == 9  # the last form was kept
    assert counted.calls == 10
    assert counted(torch.zeros(0, 3), 3) == 0  # the first form was forgotten
    assert counted.calls == 11


# Functions that make an operand bad: a list, or a tensor of another dtype, device, number of axes or size.
CHANGES = (
    torch.Tensor.tolist,
    lambda tensor: tensor.to(torch.int16),
    lambda tensor: tensor.to("meta"),
    lambda tensor: tensor[None],
    lambda tensor: torch.cat([tensor, tensor], -1),
)


def bad_calls_raise(op, operands, names, **options):
    """Check that bad calls raise after a good call, and again after another one."""
    for _ in range(2):
        op(**operands, **options)
        for name in names:
            for change in CHANGES:
                with pytest.raises(ValueError):
                    op(**{**operands, name: change(operands[name])}, **options)
    op(**operands, **options)


IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["triton", "reference"])


@pytest.fixture
def product(device):
    return {
        "a": torch.randn(40, 16, device=device),
        "b": torch.randn(3, 16, 8, device=device),
        "offsets": offsets_of(10, 20, 38, device=device),
        "bias": torch.randn(3, 8, device=device),
        "row_scale": torch.rand(40, device=device),
    }


def offsets_of(*ends, device):
    return torch.tensor(ends, dtype=torch.int32, device=device)


@IMPLEMENTATIONS
def test_bad_products_raise_after_good_ones(product, implementation):
    bad_calls_raise(grouped_gemm, product, product, implementation=implementation)


@IMPLEMENTATIONS
def test_values_and_options_are_checked_in_every_call(product, implementation, device):
    """Every call checks what forms do not contain: offsets' values on the CPU, requires_grad, and non-tensors."""

    def good():
        return grouped_gemm(**product, implementation=implementation)

    expected = good()
    out = torch.empty_like(expected)
    bad_offsets = [(10, 9, 38), (-1, 20, 38), (10, 20, 41)] if device == "cpu" else []
    bad = [
        *({"offsets": offsets_of(*ends, device=device)} for ends in bad_offsets),
        {"out_dtype": torch.float16},
        {"activation": "tanh"},
        {"activation": "relu"},
        {"implementation": "magic"},
        {"scale_a": product["a"].new_ones(40)},
        {"out": out, "a": product["a"].clone().requires_grad_()},
        {"out": out, "out_dtype": torch.float64},
        {"out": out, "activation": "swiglu"},
    ]
    for change in bad:
        with pytest.raises(ValueError):
            grouped_gemm(**{**product, "implementation": implementation, **change})
        torch.testing.assert_close(good(), expected, rtol=0, atol=0)
    if device == "cpu":
        # With fewer rows, the same offsets are out of range.
        with pytest.raises(ValueError, match="R=37"):
            rows = {"a": product["a"][:37], "row_scale": product["row_scale"][:37]}
            grouped_gemm(**{**product, **rows}, implementation=implementation)


@IMPLEMENTATIONS
def test_bad_experts_raise_after_good_ones(implementation, device):
    inputs = make_inputs(CASES["ordinary"], torch.float32, device)
    weights, permutation = make_permutation(inputs, CASES["ordinary"].top_k)
    operands = {
        "tokens": inputs.tokens,
        "topk_weights": weights,
        "permutation": permutation,
        "w_up": inputs.w_up,
        "w_down": inputs.w_down,
        "b_up": inputs.w_up[:, :, 0],
        "b_down": inputs.w_down[:, :, 0],
    }
    names = ("tokens", "topk_weights", "w_up", "w_down", "b_up", "b_down")
    bad_calls_raise(fused_experts, operands, names, implementation=implementation)
    # The same operands do not fit a plain activation.
    with pytest.raises(ValueError, match="w_down"):
        fused_experts(**operands, activation="relu", implementation=implementation)


def test_messages_of_device_assertions_are_short(monkeypatch):
    """PyTorch refuses long messages, but only on a GPU."""
    messages = []
    monkeypatch.setattr(torch, "_assert_async", lambda condition, message: messages.append(message))
    for message in ("x" * 254, "y" * 255, "é" * 200):
        assert_on_device(torch.tensor(True), message)
    assert messages == ["x" * 254, "y" * 251 + "...", "é" * 125 + "..."]
