"""The experts of a layer as they lie on disk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from freetoken.errors import CheckpointError
from freetoken.formats.base import Bytes, WeightFormat
from freetoken.kernels.activations import Activation


@dataclass(frozen=True)
class ExpertTensor:
    """One part ("gate", "up" or "down") of every expert of a layer, as it lies on disk.

    `experts` has for each expert a uint8 view of rows * format.row_bytes(cols) bytes: contiguous,
    or [rows, row bytes] with contiguous rows at any stride. Of a format with a `scale_block`,
    `scales` has the same of the planes of scales; else it is empty. `factors` float32 [E]
    multiplies each expert's weights (None: one); `biases` float32 [E, rows] is added to each
    expert's product (None: nothing).
    """

    name: str
    format: WeightFormat
    rows: int
    cols: int
    experts: tuple[Bytes, ...]
    scales: tuple[Bytes, ...] = ()
    factors: npt.NDArray[np.float32] | None = None
    biases: npt.NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        size = (self.rows, self.format.row_bytes(self.cols))
        for expert, data in enumerate(self.experts):
            self._check(f"weights of expert {expert}", data, *size)
        size = self.format.scale_plane(self.rows, self.cols)
        for expert, data in enumerate(self.scales):
            self._check(f"scales of expert {expert}", data, *size)
        apart = len(self.experts) if self.format.scale_block else 0
        counts = len(self.scales), len(self.experts if self.factors is None else self.factors)
        if counts != (apart, len(self.experts)):
            raise CheckpointError(
                f"the {self.name} weights of {len(self.experts)} experts lack scales or factors",
                found=f"scales of {counts[0]} experts, factors of {counts[1]}",
                expected=f"{apart} and {len(self.experts)} for {self.format.name}",
                hint="the checkpoint does not match its own config; download it again",
            )

        if self.biases is not None and (
            self.biases.shape != (len(self.experts), self.rows)
            or self.biases.dtype != np.float32
            or not self.biases.flags.c_contiguous
        ):
            raise CheckpointError(
                f"the {self.name} biases do not fit the experts",
                found=f"{self.biases.dtype} {list(self.biases.shape)}",
                expected=f"contiguous float32 {[len(self.experts), self.rows]}",
                hint="the checkpoint does not match its own config; download it again",
            )

    def _check(self, what: str, data: Bytes, rows: int, row_bytes: int) -> None:
        strided = data.shape == (rows, row_bytes) and (row_bytes == 1 or data.strides[1:] == (1,))
        whole = data.nbytes == rows * row_bytes and data.flags.c_contiguous
        if data.dtype != np.uint8 or not (strided or whole):
            raise CheckpointError(
                f"the {self.name} {what} have the wrong size",
                found=f"{data.nbytes} bytes of {data.dtype}",
                expected=f"{rows * row_bytes} contiguous bytes: {self.rows} rows of {self.cols} "
                f"{self.format.name} numbers",
                hint="the checkpoint does not match its own config; download it again",
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all experts on disk."""
        return sum(data.nbytes for data in (*self.experts, *self.scales))


@dataclass(frozen=True)
class LayerExperts:
    """All experts of one MoE layer: gate and up [I, H], down [H, I].

    `layer_id` numbers the MoE layers alone, from 0 without gaps.
    """

    layer_id: int
    gate: ExpertTensor
    up: ExpertTensor
    down: ExpertTensor
    activation: Activation

    def __post_init__(self) -> None:
        shapes = [(part.rows, part.cols, len(part.experts)) for part in self.parts]
        rows, cols, experts = shapes[0]
        if experts == 0 or shapes != [shapes[0], shapes[0], (cols, rows, experts)]:
            raise CheckpointError(
                f"the experts of MoE layer {self.layer_id} do not fit together",
                found=", ".join(
                    f"{part.name} {count} x [{r}, {c}]"
                    for part, (r, c, count) in zip(self.parts, shapes, strict=True)
                ),
                expected="gate and up E x [I, H] and down E x [H, I], with at least one expert",
                hint="the checkpoint does not match its own config; download it again",
            )

    @property
    def parts(self) -> tuple[ExpertTensor, ExpertTensor, ExpertTensor]:
        return self.gate, self.up, self.down

    @property
    def experts(self) -> int:
        return len(self.gate.experts)
