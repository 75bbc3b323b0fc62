"""How large the steps of an engine are, which its memory must have room for."""

from __future__ import annotations

from freetoken.config.facts import CheckpointFacts
from freetoken.config.sizes import pages_for

MAX_RUNNING = 64
# A prefill step of this many tokens keeps all cores busy; longer prompts are cut into several.
PREFILL_BUDGET_TOKENS = 512
# On a GPU a step may bring every expert over the bus, whatever its tokens: fewer, longer steps.
GPU_PREFILL_BUDGET_TOKENS = 2048


def useful_pages(facts: CheckpointFacts) -> int:
    """What `MAX_RUNNING` full contexts use."""
    return MAX_RUNNING * (pages_for(facts.context_tokens) - 1) + 1
