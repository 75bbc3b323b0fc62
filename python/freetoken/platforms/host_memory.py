"""Host memory for experts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from freetoken.errors import CapacityError

ALIGNMENT_BYTES = 256


def allocate(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed, uint8 [size_bytes], aligned to 256 bytes; the system provides pages when they are
    first touched. Raises CapacityError if there is too little."""
    try:
        memory = np.zeros(size_bytes + ALIGNMENT_BYTES, dtype=np.uint8)
    except MemoryError:
        raise CapacityError(
            f"cannot allocate {size_bytes / 2**30:.1f} GiB of host memory for experts; use "
            "fewer cache slots (--cache-slots), or --strategy cpu, which needs none"
        ) from None
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + size_bytes]
