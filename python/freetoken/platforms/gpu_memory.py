"""Memory for experts on a machine with a GPU: slots there, records pinned here."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from freetoken.errors import CapacityError, FreeTokenError

_MAPPED = 2  # cudaHostRegisterMapped, and hipHostRegisterMapped
# What registering memory is documented to answer, by CUDA and by HIP with the same numbers:
# invalid value, out of memory (which a limit on locked memory is too), already registered, and not
# supported. Anything else comes from work before.
_REFUSALS = frozenset((1, 2, 712, 801))


def free_bytes(device: torch.device) -> int:
    """Bytes of a device's memory that nobody has. What torch keeps of memory that this
    process no longer uses is given back first."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return free


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
    freed. False where the system refuses: a limit on locked memory, as a rule. Raises
    FreeTokenError for what is no refusal, such as a device that is lost.

    Not by torch's allocator of pinned memory, which rounds sizes up to powers of two. CUDA and
    ROCm have the call under the same name there.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    storage = memory.untyped_storage()
    address = memory.data_ptr()
    code = runtime.cudaHostRegister(address, memory.nbytes, _MAPPED)
    if int(code) == 0:
        weakref.finalize(storage, runtime.cudaHostUnregister, address)
        return True
    said = str(runtime.cudaGetErrorString(code))
    if int(code) not in _REFUSALS:
        raise FreeTokenError(
            f"the GPU's driver answered {int(code)} ({said}) when {memory.nbytes / 2**30:.1f} GiB "
            "of experts were to be pinned; expected success or a refusal. Work before it has "
            "failed, or the device is lost: see what `ft doctor` says, or use --device cpu"
        )
    try:
        torch.zeros(1, device="cuda")  # the refusal is reported once more, to whoever calls next
    except RuntimeError as error:
        if said not in str(error):
            raise
    return False
