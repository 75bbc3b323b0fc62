"""The experts of two models with random weights, and reproducible routes to them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle, islice

import numpy as np
import numpy.typing as npt

from freetoken.bench.blocks import random_matrix
from freetoken.formats import by_name
from freetoken.kernels.activations import Activation, ClampedSwiGlu
from freetoken.moe.store import ExpertTensor, LayerExperts, RecordLayout

Ids = npt.NDArray[np.int32]

# What differs between the experts of a layer; the others repeat their bytes, in memory of their
# own. It makes loading quick.
_DISTINCT_EXPERTS = 4

# Popularity of a layer's experts: the r-th most popular one is asked for in proportion to
# r ** -ZIPF. STICKINESS: the chance that a token asks again for an expert of the token before.
ZIPF = 0.8
STICKINESS = 0.3


@dataclass(frozen=True)
class Geometry:
    """The experts of one model: gate and up [intermediate, hidden], down [hidden, intermediate]."""

    model: str
    format: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    activation: Activation = "silu"
    biased: bool = False

    @property
    def name(self) -> str:
        return f"{self.model} {self.format}"


_QWEN = Geometry("Qwen3-30B-A3B", "Q4_0", 2048, 768, 128, 8)
MODELS = (
    _QWEN,
    Geometry("gpt-oss-20b", "MXFP4_PAIRS", 2880, 2880, 32, 4, ClampedSwiGlu(), biased=True),
    replace(_QWEN, format="BF16"),
)
# For the interpreter.
DRY_MODELS = (
    Geometry("tiny", "Q4_0", 64, 32, 6, 2),
    Geometry("tiny with biases", "MXFP4_PAIRS", 64, 32, 4, 2, ClampedSwiGlu(), biased=True),
)


def make_layers(geometry: Geometry, layers: int) -> list[LayerExperts]:
    """`layers` MoE layers over the same random bytes. A packed store gives each its own."""
    rng = np.random.default_rng(0)
    inner, hidden = geometry.intermediate, geometry.hidden
    gate, up, down = (
        _part(geometry, name, rows, cols, rng)
        for name, rows, cols in (
            ("gate", inner, hidden),
            ("up", inner, hidden),
            ("down", hidden, inner),
        )
    )
    return [LayerExperts(i, gate, up, down, geometry.activation) for i in range(layers)]


def _part(
    geometry: Geometry, name: str, rows: int, cols: int, rng: np.random.Generator
) -> ExpertTensor:
    fmt = by_name(geometry.format)
    distinct = min(_DISTINCT_EXPERTS, geometry.experts)
    made = [random_matrix(fmt, rows, cols, rng) for _ in range(distinct)]
    repeated = list(islice(cycle(made), geometry.experts))
    biases = None
    if geometry.biased:
        biases = rng.normal(0, 0.1, (geometry.experts, rows)).astype(np.float32)
    return ExpertTensor(
        name,
        fmt,
        rows,
        cols,
        experts=tuple(matrix.codes for matrix in repeated),
        scales=tuple(m.scales for m in repeated if m.scales is not None),
        biases=biases,
    )


def expert_bytes(layer: LayerExperts) -> int:
    """What a kernel reads of one expert: its planes, without the padding between them."""
    planes = [
        plane
        for part in RecordLayout.of(layer).parts
        for plane in (part.codes, part.scales, part.factor, part.bias)
    ]
    return sum(plane.bytes for plane in planes)


def routes_with_locality(
    geometry: Geometry, *, steps: int, layers: int, tokens: int, seed: int = 1
) -> Ids:
    """Ids int32 [steps, layers, tokens, K], distinct in each row, of `tokens` sequences that go
    on from step to step. Every layer has popular experts of its own."""
    rng = np.random.default_rng(seed)
    experts, top_k = geometry.experts, geometry.top_k
    by_rank = -ZIPF * np.log(np.arange(1, experts + 1))
    popularity = np.stack([rng.permuted(by_rank) for _ in range(layers)])[:, None, :]
    ids = np.empty((steps, layers, tokens, top_k), np.int32)
    for step in range(steps):
        # The top_k largest of log p + Gumbel noise are a sample without replacement.
        score = popularity + rng.gumbel(size=(layers, tokens, experts))
        if step:
            keeps = rng.random((layers, tokens, top_k)) < STICKINESS
            bonus = np.where(keeps, np.inf, 0.0)
            np.put_along_axis(
                score, ids[step - 1], np.take_along_axis(score, ids[step - 1], -1) + bonus, -1
            )
        ids[step] = np.argsort(-score, axis=-1, kind="stable")[..., :top_k]
    return ids


def uniform_routes(
    geometry: Geometry, *, steps: int, layers: int, tokens: int, seed: int = 2
) -> Ids:
    """The same, every expert as likely as any other and nothing remembered."""
    rng = np.random.default_rng(seed)
    score = rng.random((steps, layers, tokens, geometry.experts))
    return np.ascontiguousarray(np.argsort(score, axis=-1)[..., : geometry.top_k], np.int32)


def distinct_experts(ids: Ids) -> float:
    """Mean over steps and layers of the different experts asked for."""
    rows = ids.reshape(-1, ids.shape[-2] * ids.shape[-1])
    return float(np.mean([len(np.unique(row)) for row in rows]))


def slots_for(share: float, geometry: Geometry) -> int:
    """Slots per layer: a share of the experts, but enough for one token."""
    return min(geometry.experts, max(geometry.top_k, round(share * geometry.experts)))
