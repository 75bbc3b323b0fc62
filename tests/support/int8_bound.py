"""How far int8 activations may move the logits: a bound, derived.

Activations are rounded in blocks of 32 to multiples of d = max|x| / 127, so each is off by at most
d / 2. With e(W, x) the product of |W| and these halves of d, an expert
out = W_d (silu(W_g x) * (W_u x)) has, writing g, u, h for its exact inner values:

    |dg| <= e(W_g, x)          |du| <= e(W_u, x)
    |dh| <= |silu(g)| |du| + L |dg| (|u| + |du|)        L = 1.1 >= sup |silu'|
    |dout| <= |W_d| (|dh| + d_h / 2)                    d_h from blocks of max(|h| + |dh|)

and the layer's sum the same mixture of these as of the outputs. If nothing but norm and head
follows, with rho = sqrt(mean(r^2) + eps) of the residual r and z = |dr| / sqrt(H) (2-norm):

    |dy| <= |w| (|dr| + |r| z / rho) / (rho - z)        |dlogits| <= |W_head| |dy|

The bound takes the last layer as the only one with quantised weights, where routing is exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 32
SILU_SLOPE = 1.1
FLOAT32_SLACK = 1e-4  # of the largest logit, for float32 arithmetic on both sides


def logit_bound(model: Any, token_ids: list[int]) -> Tensor:
    """float64 [T, vocab] for a one-layer MoE model of transformers whose experts are quantised."""
    layer = model.model.layers[-1]
    seen: dict[str, Tensor] = {}
    hooks = [
        layer.post_attention_layernorm.register_forward_pre_hook(
            lambda _, args: seen.update(residual=args[0][0].double())
        ),
        layer.mlp.gate.register_forward_hook(
            lambda _, args, out: seen.update(x=args[0].double(), weights=out[1], ids=out[2])
        ),
        model.model.norm.register_forward_pre_hook(
            lambda _, args: seen.update(final=args[0][0].double())
        ),
    ]
    with torch.no_grad():
        logits = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    error = torch.stack(
        [
            sum(
                (w * _expert_error(layer.mlp.experts, int(e), x))
                for w, e in zip(weights.double(), ids, strict=True)
            )
            for x, weights, ids in zip(seen["x"], seen["weights"], seen["ids"], strict=True)
        ]
    )
    return _through_head(model, seen["final"], error) + FLOAT32_SLACK * logits.abs().max()


def _half_steps(largest: Tensor) -> Tensor:
    """d / 2 of every element of a vector with magnitudes up to `largest`."""
    blocks = largest.abs().reshape(-1, BLOCK).amax(dim=1) / 127 / 2
    return blocks.repeat_interleave(BLOCK)


def _expert_error(experts: Any, expert: int, x: Tensor) -> Tensor:
    gate, up = experts.gate_up_proj[expert].detach().double().chunk(2)
    down = experts.down_proj[expert].detach().double()
    g, u = gate @ x, up @ x
    dg, du = gate.abs() @ _half_steps(x), up.abs() @ _half_steps(x)
    silu = g * torch.sigmoid(g)
    dh = silu.abs() * du + SILU_SLOPE * dg * (u.abs() + du)
    return down.abs() @ (dh + _half_steps((silu * u).abs() + dh))


def _through_head(model: Any, residual: Tensor, error: Tensor) -> Tensor:
    norm, head = model.model.norm, model.lm_head.weight.detach().double()
    rho = (residual.square().mean(dim=1, keepdim=True) + norm.variance_epsilon).sqrt()
    z = error.norm(dim=1, keepdim=True) / error.shape[1] ** 0.5
    assert bool((z < rho).all())
    weight = norm.weight.detach().double().abs()
    return (weight * (error + residual.abs() * z / rho) / (rho - z)) @ head.abs().T
