"""FreeToken: mixture-of-experts language models on the machine that you have.

    from freetoken import LLM, SamplingParams

Importing the package costs nothing: torch is loaded when `LLM` is first used.
"""

from __future__ import annotations

# Not from typing, which takes a while to import: Ctrl-C meanwhile would show a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from freetoken.engine.output import Completion as Completion
    from freetoken.llm import LLM as LLM
    from freetoken.scheduler.params import SamplingParams as SamplingParams

_HOMES = {
    "LLM": "freetoken.llm",
    "Completion": "freetoken.engine.output",
    "SamplingParams": "freetoken.scheduler.params",
}

__all__ = ["LLM", "Completion", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from freetoken._version import __version__

        return __version__
    if name not in _HOMES:
        raise AttributeError(f"module 'freetoken' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
