"""Which tokens of which requests are computed in the next step."""

from freetoken.scheduler.params import SamplingParams
from freetoken.scheduler.request import FinishReason, Request, RequestState
from freetoken.scheduler.scheduler import Chunk, Scheduler, StepPlan

__all__ = [
    "Chunk",
    "FinishReason",
    "Request",
    "RequestState",
    "SamplingParams",
    "Scheduler",
    "StepPlan",
]
