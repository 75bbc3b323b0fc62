"""The attention layer: the order of its operators, and that it stores what it rotated."""

from __future__ import annotations

import torch

from freetoken.layers.attention import PagedAttention, QkNorm
from freetoken.layers.linear import Linear
from freetoken.layers.mlp import GatedMlp
from freetoken.models import AttentionSpec, ForwardBatch, Phase
from support.reference_ops import ReferenceMatrix, ReferenceOps

HIDDEN, HEADS, KV_HEADS, DIM = 12, 4, 2, 6


def linear(ops: ReferenceOps, rows: int, cols: int, bias: bool = True) -> tuple[Linear, object]:
    from freetoken.formats import F32

    weight = torch.randn(rows, cols, dtype=torch.float64)
    offset = torch.randn(rows) if bias else None

    def apply(x: torch.Tensor) -> torch.Tensor:
        product = x.double() @ weight.T
        return product if offset is None else product + offset.double()

    return Linear(ops, ReferenceMatrix(F32, weight), offset), apply


def test_one_token_attends_to_itself_and_its_past() -> None:
    torch.manual_seed(3)
    ops = ReferenceOps()
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, 0.3, True, True, True)
    query, q_of = linear(ops, HEADS * DIM, HIDDEN)
    key, k_of = linear(ops, KV_HEADS * DIM, HIDDEN)
    value, v_of = linear(ops, KV_HEADS * DIM, HIDDEN)
    output, o_of = linear(ops, HIDDEN, HEADS * DIM)
    q_norm, k_norm = torch.rand(DIM) + 0.5, torch.rand(DIM) + 0.5
    layer = PagedAttention(
        ops,
        spec,
        query=query,
        key=key,
        value=value,
        output=output,
        norm=QkNorm(q_norm, k_norm, 1e-6),
        interleaved=False,
    )
    x = torch.randn(2, HIDDEN)
    angles = torch.tensor([[0.0, 0.0, 0.0], [0.4, 0.1, 0.7]])
    keys, values = torch.zeros(3, 2, KV_HEADS, DIM), torch.zeros(3, 2, KV_HEADS, DIM)
    batch = ForwardBatch(
        phase=Phase.PREFILL,
        token_ids=torch.zeros(2, dtype=torch.int64),
        positions=torch.tensor([0, 1], dtype=torch.int32),
        sequence=torch.zeros(2, dtype=torch.int32),
        kv_slots=torch.tensor([4, 5]),
        block_table=torch.tensor([[2]], dtype=torch.int32),
        logit_rows=torch.tensor([1]),
    )
    found = layer.forward(x, (angles.cos(), angles.sin()), batch, keys, values)

    def normed(t: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return t * torch.rsqrt(t.square().mean(-1, keepdim=True) + 1e-6) * weight.double()

    def rotated(t: torch.Tensor) -> torch.Tensor:
        cos, sin = angles.cos().double()[:, None], angles.sin().double()[:, None]
        a, b = t.split(DIM // 2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    q = rotated(normed(q_of(x).view(2, HEADS, DIM), q_norm))
    k = rotated(normed(k_of(x).view(2, KV_HEADS, DIM), k_norm))
    v = v_of(x).view(2, KV_HEADS, DIM)
    assert torch.allclose(keys[2].double(), k, atol=1e-5)
    assert torch.allclose(values[2].double(), v, atol=1e-5)
    assert not keys[:2].any()
    wide_k, wide_v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, wide_k) * 0.3
    scores[:, 0, 1] = -torch.inf
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide_v)
    assert torch.allclose(found.double(), o_of(attended.reshape(2, -1)), atol=1e-5)


def test_the_gated_mlp() -> None:
    torch.manual_seed(4)
    ops = ReferenceOps()
    gate, g_of = linear(ops, 10, HIDDEN)
    up, u_of = linear(ops, 10, HIDDEN, bias=False)
    down, d_of = linear(ops, HIDDEN, 10)
    x = torch.randn(3, HIDDEN)
    g = g_of(x)
    expected = d_of(g * torch.sigmoid(g) * u_of(x))
    mlp = GatedMlp(ops, gate=gate, up=up, down=down, activation="silu")
    for phase in Phase:
        found = mlp.forward(x, phase, None)
        assert torch.allclose(found.double(), expected, atol=1e-5)
