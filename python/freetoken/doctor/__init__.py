"""What FreeToken sees on this machine, what it would use, and what is broken."""

from freetoken.doctor.examine import Sources, examine
from freetoken.doctor.report import (
    CpuReport,
    DriverReport,
    GpuReport,
    MechanismReport,
    MemoryReport,
    Report,
    SoftwareReport,
)

__all__ = [
    "CpuReport",
    "DriverReport",
    "GpuReport",
    "MechanismReport",
    "MemoryReport",
    "Report",
    "SoftwareReport",
    "Sources",
    "examine",
]
