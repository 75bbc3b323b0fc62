"""The native core: worker pool, kernels and the CPU operators."""

import enum
from typing import Any

import numpy.typing
import torch


def detected_isas() -> list[str]:
    """
    Instruction sets with kernels in this build that this host can run, best last.
    """

def physical_cpus() -> list[int]:
    """
    One logical CPU per physical core inside the affinity mask, by NUMA node.
    """

class Format(enum.Enum):
    """A weight format that has native kernels."""

    F32 = 0

    F16 = 1

    BF16 = 2

    Q8_0 = 3

    Q4_0 = 4

    Q4_1 = 5

    Q4_K = 6

    Q5_K = 7

    Q6_K = 8

    MXFP4 = 9

    MXFP4_PAIRS = 10

    NVFP4 = 11

    NVFP4_PAIRS = 12

    DS_FP4 = 13

    FP8_128 = 14

class Activation(enum.Enum):
    """What stands between gate and up of an expert."""

    SiLU = 0

    GELU = 1

    GELUTanh = 2

    ClampedSwiGLU = 3

    ReLUSquared = 4

class Matrix:
    """A weight matrix [rows, cols] over packed bytes, kept alive."""

    def __init__(self, format: Format, data: torch.Tensor | numpy.typing.NDArray[Any], rows: int, cols: int, scales: torch.Tensor | numpy.typing.NDArray[Any] | None = None, factor: float = 1.0) -> None:
        """
        data: uint8 [n], exactly the bytes of the rows. scales: uint8 [n] of a format whose scales lie apart. factor multiplies the whole matrix.
        """

    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...

    @property
    def format(self) -> Format: ...

class ExpertPart:
    """Gate, up or down of every expert, as addresses."""

    def __init__(self, format: Format, rows: int, cols: int, codes: torch.Tensor | numpy.typing.NDArray[Any], scales: torch.Tensor | numpy.typing.NDArray[Any], code_row_stride_bytes: int, code_block_stride_bytes: int, scale_row_stride_bytes: int, scale_block_stride_bytes: int, factors: torch.Tensor | numpy.typing.NDArray[Any] | None = None, biases: torch.Tensor | numpy.typing.NDArray[Any] | None = None) -> None:
        """
        codes, scales: uint64 [E], where each expert's codes and scales begin. factors: uint64 [E], where each expert's float32 factor lies; None: all are one. biases: uint64 [E], where each expert's bias, float32 [rows], begins; None: there is none. The caller vouches for the memory behind them.
        """

    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...

class ExpertBank:
    """The experts of one layer: gate and up [I, H], down [H, I]."""

    def __init__(self, gate: ExpertPart, up: ExpertPart, down: ExpertPart, activation: Activation, owner: object | None, alpha: float = 1.7020000219345093, limit: float = 7.0) -> None:
        """
        alpha, limit: of ClampedSwiGLU. owner: whatever keeps the memory behind the addresses alive.
        """

    @property
    def experts(self) -> int: ...

    @property
    def hidden(self) -> int: ...

class Pending:
    """Expert work under way. Keeps its arrays alive."""

    def wait(self) -> None:
        """Block until the output is written. May be called again."""

    @property
    def done(self) -> bool: ...

class Precision(enum.Enum):
    """How quantised weights read activations."""

    Int8 = 0
    """Rounded to int8 in blocks of 32; products are exact integers."""

    Exact = 1
    """As float32, times dequantised weights."""

class Recording:
    """Operators that ran, to be run again on the same arrays."""

class Context:
    """
    A worker pool and the kernels of one instruction set. The operators write into arrays that the caller gives; freetoken.kernels.base says what each computes.
    """

    def __init__(self, threads: int | None = None, isa: str | None = None, activations: Precision = Precision.Int8) -> None:
        """
        threads: default one per physical core within the affinity mask and the cgroup's quota. isa: default the best of detected_isas().
        """

    @property
    def isa(self) -> str: ...

    @property
    def threads(self) -> int: ...

    @property
    def cpus(self) -> list[int]:
        """The CPU of each thread; -1: not pinned."""

    @property
    def nodes(self) -> list[int]:
        """The NUMA node of each thread; 0 for one that is not pinned."""

    @property
    def formats(self) -> list[str]:
        """Names of the weight formats that have kernels here."""

    def close(self) -> None:
        """Finish what was submitted and end the threads."""

    def place(self, bank: ExpertBank, mapped: bool) -> None:
        """
        Have each page of the experts touched first by a thread of the NUMA node that will read it, where the threads have more than one. mapped: they are a file's bytes, only read here; else memory that nobody else uses yet.
        """

    def place_matrix(self, matrix: Matrix) -> None:
        """The same for a matrix of a mapped file."""

    def linear(self, matrices: tuple[Matrix, ...], x: torch.Tensor | numpy.typing.NDArray[Any], biases: tuple[Any, ...], outs: tuple[Any, ...]) -> None: ...

    def embed(self, w: Matrix, ids: torch.Tensor | numpy.typing.NDArray[Any], out: torch.Tensor | numpy.typing.NDArray[Any]) -> None: ...

    def rms_norm(self, x: torch.Tensor | numpy.typing.NDArray[Any], weight: torch.Tensor | numpy.typing.NDArray[Any], eps: float, out: torch.Tensor | numpy.typing.NDArray[Any]) -> None: ...

    def add_rms_norm(self, x: torch.Tensor | numpy.typing.NDArray[Any], residual: torch.Tensor | numpy.typing.NDArray[Any], weight: torch.Tensor | numpy.typing.NDArray[Any], eps: float, out: torch.Tensor | numpy.typing.NDArray[Any]) -> None: ...

    def gated_activation(self, gate: torch.Tensor | numpy.typing.NDArray[Any], up: torch.Tensor | numpy.typing.NDArray[Any], activation: Activation, alpha: float, limit: float, out: torch.Tensor | numpy.typing.NDArray[Any]) -> None: ...

    def rotary(self, q: torch.Tensor | numpy.typing.NDArray[Any], k: torch.Tensor | numpy.typing.NDArray[Any], cos: torch.Tensor | numpy.typing.NDArray[Any], sin: torch.Tensor | numpy.typing.NDArray[Any], interleaved: bool) -> None: ...

    def write_kv(self, k: torch.Tensor | numpy.typing.NDArray[Any], v: torch.Tensor | numpy.typing.NDArray[Any], k_cache: torch.Tensor | numpy.typing.NDArray[Any], v_cache: torch.Tensor | numpy.typing.NDArray[Any], slots: torch.Tensor | numpy.typing.NDArray[Any]) -> None: ...

    def paged_attention(self, q: torch.Tensor | numpy.typing.NDArray[Any], k_cache: torch.Tensor | numpy.typing.NDArray[Any], v_cache: torch.Tensor | numpy.typing.NDArray[Any], block_table: torch.Tensor | numpy.typing.NDArray[Any], sequence: torch.Tensor | numpy.typing.NDArray[Any], positions: torch.Tensor | numpy.typing.NDArray[Any], scale: float, window: int | None, sinks: torch.Tensor | numpy.typing.NDArray[Any] | None, out: torch.Tensor | numpy.typing.NDArray[Any]) -> None: ...

    def route_topk(self, logits: torch.Tensor | numpy.typing.NDArray[Any], renormalize: bool, weights: torch.Tensor | numpy.typing.NDArray[Any], ids: torch.Tensor | numpy.typing.NDArray[Any]) -> None: ...

    def experts(self, bank: ExpertBank, x: torch.Tensor | numpy.typing.NDArray[Any], weights: torch.Tensor | numpy.typing.NDArray[Any], ids: torch.Tensor | numpy.typing.NDArray[Any], out: torch.Tensor | numpy.typing.NDArray[Any]) -> None: ...

    def to_float32(self, x: torch.Tensor | numpy.typing.NDArray[Any], out: torch.Tensor | numpy.typing.NDArray[Any]) -> None: ...

    def start_recording(self) -> None:
        """
        Remember the operators that run from now on. One thread at a time may use the Context meanwhile.
        """

    def stop_recording(self) -> Recording: ...

    def replay(self, recording: Recording) -> None:
        """
        Run the operators again, in their order, on the arrays they had: they read what these hold now.
        """

    def experts_submit(self, bank: ExpertBank, x: torch.Tensor | numpy.typing.NDArray[Any], weights: torch.Tensor | numpy.typing.NDArray[Any], ids: torch.Tensor | numpy.typing.NDArray[Any], out: torch.Tensor | numpy.typing.NDArray[Any]) -> Pending: ...

    def read_bytes(self, data: torch.Tensor | numpy.typing.NDArray[Any]) -> int:
        """
        Read uint8 [n] once with all threads; the sum of its 64-bit words. For measuring the read bandwidth.
        """

class DriverError(RuntimeError):
    pass

class HandshakeError(RuntimeError):
    pass

class Vendor(enum.Enum):
    """Whose GPU driver."""

    Cuda = 0

    Rocm = 1

class Mechanism(enum.Enum):
    """How a stream and the CPU wait for each other, best first."""

    MemoryOperations = 0

    HostCallbacks = 1

    StreamSynchronization = 2

class HandshakeFinding:
    """What the probe of one mechanism found."""

    @property
    def mechanism(self) -> Mechanism: ...

    @property
    def name(self) -> str: ...

    @property
    def eager(self) -> bool:
        """Whether it works on a stream."""

    @property
    def graph(self) -> bool:
        """Whether it works in a replayed graph."""

    @property
    def reason(self) -> str:
        """Why not both; empty: it does both."""

    @property
    def hung(self) -> bool:
        """Nothing ended it: do no more with this device in this process."""

class HandshakeChoice:
    """The best mechanism of this machine, and what was found."""

    @property
    def mechanism(self) -> Mechanism: ...

    @property
    def capturable(self) -> bool: ...

    @property
    def findings(self) -> list[HandshakeFinding]: ...

class GpuDriver:
    """A GPU driver's library, opened at run time."""

    def __init__(self, vendor: Vendor, path: str = '', device: int = 0) -> None:
        """
        path: the library; empty: the one that is loaded already, else the system's. Raises DriverError.
        """

    @property
    def vendor(self) -> Vendor: ...

    def probe(self, mechanism: Mechanism, layers: int = 60, rounds: int = 4, time_limit_seconds: float = 10.0) -> HandshakeFinding:
        """
        Try one mechanism, eagerly and in a graph of about 7 nodes for each layer.
        """

    def choose(self, layers: int = 60, rounds: int = 4, time_limit_seconds: float = 10.0) -> HandshakeChoice:
        """
        The first mechanism that works in graphs, else the first that works. DriverError if none does, or one hung the device.
        """

class GpuHandshake:
    """
    Experts on the CPU between the operations of a GPU stream. For each slot submits and waits alternate. Destroy graphs that have captured them first.
    """

    def __init__(self, driver: GpuDriver, context: Context, mechanism: Mechanism, capturable: bool, stall_limit_seconds: float = 30.0) -> None: ...

    @property
    def name(self) -> str: ...

    @property
    def capturable(self) -> bool: ...

    @property
    def slots(self) -> int: ...

    def add_experts(self, bank: ExpertBank, x: torch.Tensor | numpy.typing.NDArray[Any], weights: torch.Tensor | numpy.typing.NDArray[Any], ids: torch.Tensor | numpy.typing.NDArray[Any], out: torch.Tensor | numpy.typing.NDArray[Any], name: str) -> int:
        """
        A slot whose job reads x float32 [T, H], weights float32 [T, K], ids int32 [T, K] and writes out float64 [T, H], all in pinned memory. Not while a stream is captured. Returns its number.
        """

    def submit(self, slot: int, stream: int) -> None:
        """
        The job may start when the stream gets here. Raises HandshakeError after a failure.
        """

    def wait(self, slot: int, stream: int) -> None:
        """What the stream does from here on comes after the job."""

    def announce(self, handshakes: int) -> None:
        """
        A graph with so many submits is about to be launched: the watchdog looks for them.
        """

    def check(self) -> None:
        """
        Raise HandshakeError if a job failed or nothing moves. Call when the stream is synchronised, before its results are used.
        """

    def clear(self) -> None:
        """Forget a failed job. The streams must be idle."""

    def close(self) -> None:
        """
        Let the device and the workers finish. RuntimeError if a job never ends.
        """
