"""Fast activations for epilogues with 16-bit results. An activation takes a few instructions per value. Except in
`_gelu`, errors are far below the error of rounding the result to 16 bits.

A consumer warpgroup must compute a piece of the activation within one step of the reduction. The functions of
`activation/functions.py` are exact to the last places of float32, but take longer. The activations below use only the
hardware's exp2 and reciprocal, with a relative error of at most 2**-22 each. NaN stays NaN.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....activation.functions import ACTIVATIONS, _at_most, _clamp

_MINUS_LOG2_E = gl.constexpr(-1.4426950408889634)


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _inverse_of_one_plus_exp2(x):
    """Return sigmoid(y) for x = -log2(e) * y."""
    return _reciprocal(1.0 + _exp2(x))


@gluon.jit
def _silu(x):
    return x * _inverse_of_one_plus_exp2(x * _MINUS_LOG2_E)


@gluon.jit
def _gelu_tanh(x):
    # Compute x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x**3)). The constants below include the factor -log2(e).
    return x * _inverse_of_one_plus_exp2(x * (-2.302208198 - 0.1029432396 * (x * x)))


@gluon.jit
def _gelu(x):
    """Return x * P(z < x) for a standard normal z. An odd polynomial in x approximates the natural logarithm of
    P(z < x) / P(z > x). The polynomial's error is at most 2.9e-4 for |x| <= 5.6 and grows beyond. The smaller of the
    two probabilities has a relative error as large as the polynomial's error."""
    square = x * x
    total = -8.17412255e-10 * square + 9.19358523e-08
    total = total * square - 3.90990847e-06
    total = total * square + 6.55560611e-05
    total = total * square + 0.000668091037
    total = total * square - 0.106346285
    total = total * square - 2.30106925
    return x * _inverse_of_one_plus_exp2(x * total)


@gluon.jit
def silu(gate, up):
    return _silu(gate)


@gluon.jit
def gelu(gate, up):
    return _gelu(gate)


@gluon.jit
def gelu_tanh(gate, up):
    return _gelu_tanh(gate)


@gluon.jit
def swiglu(gate, up):
    return _silu(gate) * up


@gluon.jit
def geglu(gate, up):
    return _gelu(gate) * up


@gluon.jit
def geglu_tanh(gate, up):
    return _gelu_tanh(gate) * up


@gluon.jit
def clamped_swiglu(gate, up, limit=10.0):
    return _silu(_at_most(gate, limit)) * _clamp(up, limit)


@gluon.jit
def swiglu_clamped_after(gate, up, limit=7.0):
    return _at_most(_silu(gate), limit) * _clamp(up, limit)


@gluon.jit
def gpt_oss(gate, up, limit=7.0, alpha=1.702):
    gate = _at_most(gate, limit)
    return gate * _inverse_of_one_plus_exp2(gate * (alpha * _MINUS_LOG2_E)) * (_clamp(up, limit) + 1.0)


@gluon.jit
def _product_backward(value, slope, up, dactivated):
    """Return value * up, and the gradients of gate and up. `slope` is d value / d gate."""
    return value * up, dactivated * up * slope, dactivated * value


@gluon.jit
def swiglu_backward(gate, up, dactivated):
    sigmoid = _inverse_of_one_plus_exp2(gate * _MINUS_LOG2_E)
    value = gate * sigmoid
    return _product_backward(value, sigmoid + value * (1.0 - sigmoid), up, dactivated)


@gluon.jit
def geglu_tanh_backward(gate, up, dactivated):
    square = gate * gate
    below = _inverse_of_one_plus_exp2(gate * (-2.302208198 - 0.1029432396 * square))
    value = gate * below
    slope = below + value * (1.0 - below) * (1.5957691216 + 0.2140644488 * square)
    return _product_backward(value, slope, up, dactivated)


@gluon.jit
def clamped_swiglu_backward(gate, up, dactivated, limit=10.0):
    clamped = _at_most(gate, limit)
    activated, dgate, dup = swiglu_backward(clamped, _clamp(up, limit), dactivated)
    return activated, gl.where(gate > limit, 0.0, dgate), gl.where(_magnitude(up) > limit, 0.0, dup)


@gluon.jit
def gpt_oss_backward(gate, up, dactivated, limit=7.0, alpha=1.702):
    clamped = _at_most(gate, limit)
    sigmoid = _inverse_of_one_plus_exp2(clamped * (alpha * _MINUS_LOG2_E))
    value = clamped * sigmoid
    slope = sigmoid + alpha * value * (1.0 - sigmoid)
    activated, dgate, dup = _product_backward(value, slope, _clamp(up, limit) + 1.0, dactivated)
    return activated, gl.where(gate > limit, 0.0, dgate), gl.where(_magnitude(up) > limit, 0.0, dup)


@gluon.jit
def _magnitude(x):
    return gl.maximum(x, -x)


FORWARD = {name: functions.forward for name, functions in ACTIVATIONS.items()} | {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "swiglu": swiglu,
    "geglu": geglu,
    "geglu_tanh": geglu_tanh,
    "clamped_swiglu": clamped_swiglu,
    "swiglu_clamped_after": swiglu_clamped_after,
    "gpt_oss": gpt_oss,
}

# Gradients of gated activations. A consumer computes a tile's gradients while the tensor cores multiply the next tile.
BACKWARD = {
    "swiglu": swiglu_backward,
    "geglu_tanh": geglu_tanh_backward,
    "clamped_swiglu": clamped_swiglu_backward,
    "gpt_oss": gpt_oss_backward,
}
