"""How a GPU's memory is divided. Plain arithmetic over sizes; knows no strategy and no tensor."""

from __future__ import annotations

from dataclasses import dataclass

FLOAT_BYTES = 4
DOUBLE_BYTES = 8
# What the allocator's rounding and the many small tensors of a step take, beside the large ones.
SMALL_TENSORS_BYTES = 32 << 20
# Decode divides each token's attention into at most so many shares, each with a result of its own.
ATTENTION_SHARES = 64


@dataclass(frozen=True)
class DecoderSizes:
    """Widths of a decoder, in numbers a token.

    `query` and `key` are of all heads together; `dense` is the widest intermediate size of the
    dense layers, `expert` that of an expert; 0 where there are none.
    """

    hidden: int
    vocab: int
    query: int
    key: int
    dense: int = 0
    expert: int = 0
    experts: int = 0
    top_k: int = 0


def prefill_bytes(sizes: DecoderSizes, tokens: int, logit_rows: int) -> int:
    """An upper bound on what a prefill step allocates at once, beside weights and cache."""
    return _step_bytes(sizes, tokens, logit_rows, shares=0)


def decode_bytes(sizes: DecoderSizes, tokens: int) -> int:
    """The same of a decode step of so many sequences."""
    return _step_bytes(sizes, tokens, tokens, shares=ATTENTION_SHARES)


def _step_bytes(sizes: DecoderSizes, tokens: int, logit_rows: int, shares: int) -> int:
    """Each layer frees what it took, so the widest kind of layer counts, once.

    A sum over what the operators return and keep meanwhile, in float32 unless it says otherwise:
    through all layers the residual, the layer's input, its norm and output, cos and sin;
    in attention queries, keys and values, their norms, the result (and of each share), a copy of
    the input that is rounded to FP8; in experts the router's logits, ids and weights in a few
    copies, the input rounded, the intermediate and its rounded copy and a term of each route,
    the sum in float64; in dense layers gate, up, their product, a rounded copy; for the logits
    the last rows, the logits and a copy.
    """
    h, k = sizes.hidden, sizes.top_k
    through = 5 * h + 2 * sizes.key
    attention = 3 * sizes.query + 3 * sizes.key + 2 * h + shares * (sizes.query + sizes.key)
    experts = sizes.experts + 16 * k + 2 * h + k * (2 * sizes.expert + h)
    experts += (2 * DOUBLE_BYTES // FLOAT_BYTES + 1) * h
    dense = 4 * sizes.dense + 2 * h
    widest = max(attention, experts if k else 0, dense)
    floats = tokens * (through + widest) + logit_rows * (4 * h + 2 * sizes.vocab)
    return FLOAT_BYTES * floats + SMALL_TENSORS_BYTES


@dataclass(frozen=True)
class GpuNeeds:
    """What is to lie on the GPU, in bytes, and how little and how much of the rest is of use.

    `slot_bytes` is one slot in every layer. Pages are of the key-value cache, page 0 included.
    """

    weight_bytes: int
    activation_bytes: int
    buffer_bytes: int
    slot_bytes: int
    least_slots: int
    most_slots: int
    page_bytes: int
    least_pages: int
    most_pages: int

    @property
    def slots_bytes(self) -> int:
        """Of the fewest slots."""
        return self.least_slots * self.slot_bytes

    @property
    def cache_bytes(self) -> int:
        """Of the fewest pages."""
        return self.least_pages * self.page_bytes

    @property
    def total_bytes(self) -> int:
        """The least that will do."""
        fixed = self.weight_bytes + self.activation_bytes + self.buffer_bytes
        return fixed + self.cache_bytes + self.slots_bytes


@dataclass(frozen=True)
class GpuShares:
    """Slots per layer, and pages."""

    slots: int
    pages: int


def divide(needs: GpuNeeds, budget_bytes: int) -> GpuShares | None:
    """First the least of everything, then slots, the remainder to pages. None: it does not fit."""
    left = budget_bytes - needs.total_bytes
    if left < 0:
        return None
    more_slots = _of_use(left, needs.slot_bytes, needs.most_slots - needs.least_slots)
    left -= more_slots * needs.slot_bytes
    more_pages = _of_use(left, needs.page_bytes, needs.most_pages - needs.least_pages)
    return GpuShares(needs.least_slots + more_slots, needs.least_pages + more_pages)


def _of_use(left_bytes: int, each_bytes: int, most: int) -> int:
    return most if each_bytes == 0 else max(0, min(most, left_bytes // each_bytes))
