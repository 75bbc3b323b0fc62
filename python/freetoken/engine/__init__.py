"""The engine: schedules, runs, samples and publishes, step by step."""

from freetoken.engine.engine import Engine, EngineLimits, Generation
from freetoken.engine.output import Completion, TextAssembler

__all__ = ["Completion", "Engine", "EngineLimits", "Generation", "TextAssembler"]
