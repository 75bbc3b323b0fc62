"""Memory for experts on a machine with a GPU: slots there, records pinned here."""

from __future__ import annotations

import contextlib
import weakref

import torch
from torch import Tensor

from freetoken.errors import CapacityError

_MAPPED = 2  # cudaHostRegisterMapped, and hipHostRegisterMapped


def free_and_total(device: torch.device) -> tuple[int, int]:
    """Bytes of a device's memory that nobody has, and all. What torch keeps of memory that this
    process no longer uses is given back first."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return free, total


def allocate_slots(size_bytes: int, device: torch.device) -> Tensor:
    """Zeroed memory of a device, uint8 [size_bytes]; torch aligns it to 512 bytes. Raises
    CapacityError if there is too little."""
    try:
        return torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        raise CapacityError(
            f"cannot allocate {size_bytes / 2**30:.1f} GiB of memory on {device} for experts; use "
            "fewer cache slots (--cache-slots)"
        ) from None


def pin(memory: Tensor) -> bool:
    """Let the GPU read host memory, uint8 [size_bytes], at its own address, until the memory is
    freed. False where the system refuses: a limit on locked memory, as a rule.

    Not by torch's allocator of pinned memory, which rounds sizes up to powers of two. CUDA and
    ROCm have the call under the same name there.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    storage = memory.untyped_storage()
    address = memory.data_ptr()
    if int(runtime.cudaHostRegister(address, memory.nbytes, _MAPPED)) != 0:
        with contextlib.suppress(
            RuntimeError
        ):  # the refusal is reported once more, to whoever asks
            torch.zeros(1, device="cuda")
        return False
    weakref.finalize(storage, runtime.cudaHostUnregister, address)
    return True
