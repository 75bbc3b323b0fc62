"""The gated activations of `freetoken.kernels.activations`, for use inside other kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.errors import CheckpointError
from freetoken.kernels.activations import Activation, ClampedSwiGlu

KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3}
CLAMPED_SWIGLU = 4


def kernel_activation(activation: Activation) -> tuple[int, float, float]:
    """KIND, alpha and limit of `gated`. Raises CheckpointError for one that it lacks."""
    if isinstance(activation, ClampedSwiGlu):
        return CLAMPED_SWIGLU, activation.alpha, activation.limit
    if activation not in KINDS:
        raise CheckpointError(
            "no GPU kernel for this activation",
            found=activation,
            expected=f"one of {', '.join(KINDS)}, or a clamped SwiGLU",
            hint="use a model with one of these activations",
        )
    return KINDS[activation], 0.0, 0.0


@triton.jit
def gated(gate, up, alpha, limit, KIND: tl.constexpr):
    """act(gate) * up of float32 tensors. What is not finite in either is not finite in the result:
    where the function would map an infinity to a number, `0 * gate + 0 * up` makes it NaN."""
    if KIND == 0:
        out = _swish(gate, gate) * up
    elif KIND == 1:  # gate * Phi(gate), without a difference of near numbers on either side
        size = tl.abs(gate)
        out = (tl.where(gate < 0.0, 0.0, gate) - size * _normal_tail(size)) * up
    elif KIND == 2:  # (1 + tanh(z)) / 2 = sigmoid(2 z), z = sqrt(2 / pi) (g + 0.044715 g^3)
        slope = 1.5957691216 * (1.0 + 0.044715 * gate * gate)
        out = _swish(gate, gate * slope) * up
    elif KIND == 3:
        above = tl.where(gate < 0.0, 0.0, gate)
        out = above * above * up + (0.0 * gate + 0.0 * up)
    else:
        clamped = tl.minimum(gate, limit)
        linear = tl.maximum(tl.minimum(up, limit), -limit)
        out = _swish(clamped, alpha * clamped) * (linear + 1.0) + (0.0 * gate + 0.0 * up)
    return out


@triton.jit
def _swish(x, scaled):
    return x / (1.0 + tl.exp(-scaled))


@triton.jit
def _normal_tail(a):
    """The chance that a normal variable exceeds a >= 0, to 1e-6 relative for a < 5:
    e^(-a^2 / 2) t P(t) with t = 1 / (1 + a / 4) and the P of csrc/simd/vector_kernels.inl."""
    t = 1.0 / (1.0 + 0.25 * a)
    p = 1.981222073e-2 * t - 8.101087307e-2
    p = p * t + 9.584389991e-2
    p = p * t - 3.196491990e-2
    p = p * t + 6.384512815e-2
    p = p * t + 5.892360092e-2
    p = p * t + 8.161367505e-2
    p = p * t + 9.346519713e-2
    p = p * t + 9.973648855e-2
    p = p * t + 9.973556591e-2
    return p * t * tl.exp(-0.5 * a * a)
