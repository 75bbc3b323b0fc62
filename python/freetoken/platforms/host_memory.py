"""Host memory for experts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from freetoken.errors import CapacityError

ALIGNMENT_BYTES = 256
_PACKED = "a layer's packed experts, all of which a GPU may fetch; free some memory"


def allocate(size_bytes: int, *, slots: bool = False) -> npt.NDArray[np.uint8]:
    """Zeroed, uint8 [size_bytes], aligned to 256 bytes; the system provides pages when they are
    first touched. Raises CapacityError if there is too little, for `slots` or for all experts."""
    try:
        memory = np.zeros(size_bytes + ALIGNMENT_BYTES, dtype=np.uint8)
    except MemoryError:
        raise CapacityError(
            f"cannot allocate {size_bytes / 2**30:.1f} GiB of host memory for "
            + ("the expert slots of a layer; use fewer (--cache-slots)" if slots else _PACKED)
            + ", or --strategy cpu, which needs none of it: it reads experts where the file of the "
            "checkpoint is mapped"
        ) from None
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + size_bytes]
