"""The device functions of every activation, on float32 values.

An activation is two small functions: `forward(gate, up, limit, alpha)` returns the activated value, and `backward(gate,
up, dactivated, limit, alpha)` returns (activated, dgate, dup). A plain activation uses only its gate and returns zero
for dup. A NaN input gives NaN. To add an activation, write the two functions, an entry in `ACTIVATIONS`, its settings
in `specs.py` and its PyTorch function in `reference.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..runtime.triton import tl, triton


@triton.jit
def exp_negative(x):
    """Return exp(-x) for x >= 0, with an error of a few units in the last place. The hardware's exp2 takes the
    rounded product -x * log2(e). The result is corrected for the product's rounding error."""
    x = tl.minimum(x, 104.0, propagate_nan=tl.PropagateNan.ALL)  # in float32, exp(-x) is zero beyond 104
    scaled = x * -1.4426950408889634
    # `rest` is -x * log2(e) minus `scaled`: the rounding errors of the product and of the float32 constant log2(e).
    rest = tl.fma(x, -1.4426950408889634, -scaled) - x * 1.9259629911e-8
    power = tl.exp2(scaled)
    return tl.fma(power, rest * 0.6931471805599453, power)


@triton.jit
def _sigmoid(x):
    """Return (sigmoid(x), 1 - sigmoid(x)), each accurate to its last places."""
    small = exp_negative(tl.abs(x))
    high = 1.0 / (1.0 + small)
    high += high * tl.fma(-1.0 - small, high, 1.0)  # a Newton step, because the division errs by two ulps
    low = small * high
    return tl.where(x >= 0, high, low), tl.where(x >= 0, low, high)


@triton.jit
def _silu(x):
    """Return (value, derivative) of x * sigmoid(x)."""
    sigmoid, rest = _sigmoid(x)
    value = x * sigmoid
    return value, sigmoid + value * rest


@triton.jit
def _gelu(x):
    """Return (value, derivative) of x * P(z < x) for a standard normal z. A polynomial of t = 1 / (1 + 0.35 |x|)
    approximates P(z > |x|) / exp(-x**2 / 2) with a relative error of 5e-8. Value and derivative share one exponential,
    and small values of P stay precise."""
    t = 1.0 / (1.0 + 0.35 * tl.abs(x))
    total = -0.029157998 * t + 0.144031465
    total = total * t - 0.255840093
    total = total * t + 0.159320891
    total = total * t - 0.0232131407
    total = total * t + 0.105552815
    total = total * t + 0.119821213
    total = total * t + 0.139863521
    total = total * t + 0.139621302
    power = tl.exp(-0.5 * x * x)
    tail = total * t * power
    below = tl.where(x >= 0, 1.0 - tail, tail)
    return x * below, below + x * (0.3989422804014327 * power)


@triton.jit
def _gelu_tanh(x):
    """Return (value, derivative) of x * (1 + tanh(z)) / 2 = x * sigmoid(2 z), z = sqrt(2/pi)(x + 0.044715 x^3)."""
    square = x * x
    # 2 z = c x + 0.044715 c x^3 with c = 2 sqrt(2 / pi). `slope` is the derivative of 2 z: c + 3 * 0.044715 c x^2.
    below, above = _sigmoid(x * (1.5957691216057308 + 0.07135481627260025 * square))
    slope = 1.5957691216057308 + 0.21406444881780075 * square
    return x * below, below + x * below * above * slope


@triton.jit
def _tanh(x):
    """Return (value, derivative) of tanh(x), each accurate to its last places. For |x| < 0.3, a series avoids the
    cancellation in 1 - exp(-2 |x|)."""
    power = exp_negative(2.0 * tl.abs(x))
    inverse = 1.0 / (1.0 + power)
    large = (1.0 - power) * inverse
    square = x * x
    series = square * -0.008863235530 + 0.02186948854
    series = series * square - 0.05396825397
    series = series * square + 0.1333333333
    series = series * square - 0.3333333333
    value = tl.where(tl.abs(x) < 0.3, x + x * square * series, tl.where(x < 0.0, -large, large))
    return value, 4.0 * power * inverse * inverse


@triton.jit
def _relu(x):
    """Return (value, derivative) of max(x, 0)."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL), tl.where(x <= 0.0, 0.0, 1.0)


@triton.jit
def _clamp(x, limit):
    """Return x clamped to [-limit, limit]."""
    return _at_most(tl.maximum(x, -limit, propagate_nan=tl.PropagateNan.ALL), limit)


@triton.jit
def _at_most(x, limit):
    return tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _product_backward(value, derivative, up, dactivated):
    """Return (activated, dgate, dup) of value * up. `derivative` is d(value) / d(gate)."""
    return value * up, dactivated * up * derivative, dactivated * value


@triton.jit
def swiglu(gate, up, limit=None, alpha=None):
    return gate * tl.sigmoid(gate) * up


@triton.jit
def swiglu_backward(gate, up, dactivated, limit=None, alpha=None):
    value, derivative = _silu(gate)
    return _product_backward(value, derivative, up, dactivated)


@triton.jit
def geglu(gate, up, limit=None, alpha=None):
    value, _ = _gelu(gate)
    return value * up


@triton.jit
def geglu_backward(gate, up, dactivated, limit=None, alpha=None):
    value, derivative = _gelu(gate)
    return _product_backward(value, derivative, up, dactivated)


@triton.jit
def geglu_tanh(gate, up, limit=None, alpha=None):
    value, _ = _gelu_tanh(gate)
    return value * up


@triton.jit
def geglu_tanh_backward(gate, up, dactivated, limit=None, alpha=None):
    value, derivative = _gelu_tanh(gate)
    return _product_backward(value, derivative, up, dactivated)


@triton.jit
def reglu(gate, up, limit=None, alpha=None):
    value, _ = _relu(gate)
    return value * up


@triton.jit
def reglu_backward(gate, up, dactivated, limit=None, alpha=None):
    value, derivative = _relu(gate)
    return _product_backward(value, derivative, up, dactivated)


@triton.jit
def clamped_swiglu(gate, up, limit=10.0, alpha=None):
    gate = _at_most(gate, limit)
    return gate * tl.sigmoid(gate) * _clamp(up, limit)


@triton.jit
def clamped_swiglu_backward(gate, up, dactivated, limit, alpha=None):
    value, derivative = _silu(_at_most(gate, limit))
    activated, dgate, dup = _product_backward(value, derivative, _clamp(up, limit), dactivated)
    return activated, tl.where(gate > limit, 0.0, dgate), tl.where(tl.abs(up) > limit, 0.0, dup)


@triton.jit
def swiglu_clamped_after(gate, up, limit=7.0, alpha=None):
    value, _ = _silu(gate)
    return _at_most(value, limit) * _clamp(up, limit)


@triton.jit
def swiglu_clamped_after_backward(gate, up, dactivated, limit, alpha=None):
    value, derivative = _silu(gate)
    clamped = _at_most(value, limit)
    activated, dgate, dup = _product_backward(clamped, derivative, _clamp(up, limit), dactivated)
    return activated, tl.where(value > limit, 0.0, dgate), tl.where(tl.abs(up) > limit, 0.0, dup)


@triton.jit
def clamped_geglu(gate, up, limit=10.0, alpha=None):
    value, _ = _gelu(_at_most(gate, limit))
    return value * _clamp(up, limit)


@triton.jit
def clamped_geglu_backward(gate, up, dactivated, limit, alpha=None):
    value, derivative = _gelu(_at_most(gate, limit))
    activated, dgate, dup = _product_backward(value, derivative, _clamp(up, limit), dactivated)
    return activated, tl.where(gate > limit, 0.0, dgate), tl.where(tl.abs(up) > limit, 0.0, dup)


@triton.jit
def softcapped_swiglu(gate, up, limit=25.0, alpha=4.0):
    gate_tanh, _ = _tanh(gate / alpha)
    up_tanh, _ = _tanh(up / limit)
    sigmoid, _ = _sigmoid(gate)
    return alpha * gate_tanh * sigmoid * (limit * up_tanh)


@triton.jit
def softcapped_swiglu_backward(gate, up, dactivated, limit, alpha):
    gate_tanh, gate_slope = _tanh(gate / alpha)
    up_tanh, up_slope = _tanh(up / limit)
    sigmoid, rest = _sigmoid(gate)
    value = alpha * gate_tanh * sigmoid
    derivative = sigmoid * gate_slope + value * rest
    activated, dgate, dup = _product_backward(value, derivative, limit * up_tanh, dactivated)
    return activated, dgate, dup * up_slope


@triton.jit
def gpt_oss(gate, up, limit=7.0, alpha=1.702):
    gate = _at_most(gate, limit)
    return gate * tl.sigmoid(alpha * gate) * (_clamp(up, limit) + 1.0)


@triton.jit
def gpt_oss_backward(gate, up, dactivated, limit, alpha):
    clamped = _at_most(gate, limit)
    sigmoid, rest = _sigmoid(alpha * clamped)
    value = clamped * sigmoid
    derivative = sigmoid + alpha * value * rest
    activated, dgate, dup = _product_backward(value, derivative, _clamp(up, limit) + 1.0, dactivated)
    return activated, tl.where(gate > limit, 0.0, dgate), tl.where(tl.abs(up) > limit, 0.0, dup)


@triton.jit
def relu_squared(gate, up, limit=None, alpha=None):
    value, _ = _relu(gate)
    return value * value


@triton.jit
def relu_squared_backward(gate, up, dactivated, limit=None, alpha=None):
    value, _ = _relu(gate)
    return value * value, 2.0 * value * dactivated, 0.0


@triton.jit
def relu(gate, up, limit=None, alpha=None):
    value, _ = _relu(gate)
    return value


@triton.jit
def relu_backward(gate, up, dactivated, limit=None, alpha=None):
    value, derivative = _relu(gate)
    return value, derivative * dactivated, 0.0


@triton.jit
def gelu(gate, up, limit=None, alpha=None):
    value, _ = _gelu(gate)
    return value


@triton.jit
def gelu_backward(gate, up, dactivated, limit=None, alpha=None):
    value, derivative = _gelu(gate)
    return value, derivative * dactivated, 0.0


@triton.jit
def gelu_tanh(gate, up, limit=None, alpha=None):
    value, _ = _gelu_tanh(gate)
    return value


@triton.jit
def gelu_tanh_backward(gate, up, dactivated, limit=None, alpha=None):
    value, derivative = _gelu_tanh(gate)
    return value, derivative * dactivated, 0.0


@triton.jit
def silu(gate, up, limit=None, alpha=None):
    value, _ = _silu(gate)
    return value


@triton.jit
def silu_backward(gate, up, dactivated, limit=None, alpha=None):
    value, derivative = _silu(gate)
    return value, derivative * dactivated, 0.0


class ActivationFunctions(NamedTuple):
    """The device functions of one activation."""

    forward: Any
    backward: Any


ACTIVATIONS = {
    "swiglu": ActivationFunctions(swiglu, swiglu_backward),
    "geglu": ActivationFunctions(geglu, geglu_backward),
    "geglu_tanh": ActivationFunctions(geglu_tanh, geglu_tanh_backward),
    "reglu": ActivationFunctions(reglu, reglu_backward),
    "clamped_swiglu": ActivationFunctions(clamped_swiglu, clamped_swiglu_backward),
    "swiglu_clamped_after": ActivationFunctions(swiglu_clamped_after, swiglu_clamped_after_backward),
    "clamped_geglu": ActivationFunctions(clamped_geglu, clamped_geglu_backward),
    "softcapped_swiglu": ActivationFunctions(softcapped_swiglu, softcapped_swiglu_backward),
    "gpt_oss": ActivationFunctions(gpt_oss, gpt_oss_backward),
    "relu_squared": ActivationFunctions(relu_squared, relu_squared_backward),
    "relu": ActivationFunctions(relu, relu_backward),
    "gelu": ActivationFunctions(gelu, gelu_backward),
    "gelu_tanh": ActivationFunctions(gelu_tanh, gelu_tanh_backward),
    "silu": ActivationFunctions(silu, silu_backward),
}

# GEMM kernels apply these gated activations, which most published models use, to a product before storing the product.
# Kernels call `forward(gate, up)` without `limit` and `alpha`, whose defaults are the published values. Kernels that
# gather rows apply only GATHERING_EPILOGUES, because "geglu" and "swiglu_clamped_after" would spill registers there.
GATHERING_EPILOGUES = ("swiglu", "geglu_tanh", "reglu", "clamped_swiglu", "gpt_oss")
EPILOGUES = {name: ACTIVATIONS[name] for name in (*GATHERING_EPILOGUES, "geglu", "swiglu_clamped_after")}

# GEMM kernels apply these plain activations to the product. Grouped kernels also store the rounded product, and apply
# the activation to the rounded values. Kernels that gather rows apply none, because each plain activation would spill
# registers there. Kernels of dense products and of lists of products apply the activation to the float32 product.
PLAIN_EPILOGUES = {name: ACTIVATIONS[name] for name in ("relu", "relu_squared", "gelu", "gelu_tanh", "silu")}


def listed_epilogue(name: str) -> str:
    """Return the activation under which the kernel catalog and its tables list kernels with the activation `name`:
    "relu" for every plain activation, "swiglu" for every gated one."""
    return "relu" if name in PLAIN_EPILOGUES else "swiglu"
