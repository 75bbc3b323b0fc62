"""What was measured and counted, as plain data."""

from freetoken.telemetry.stats import ConfigReport, ExpertCounts, Stats, StepTimer, Timing

__all__ = ["ConfigReport", "ExpertCounts", "Stats", "StepTimer", "Timing"]
