"""All strategies on the demo model, greedy: the same token ids for every cache size and fetch cap?

    python benchmarks/strategies_agree.py [--tokens 200] [--every-size]

Prints a line per setting, with decode speed and where experts were found, and exits with 1 if any
setting gives other tokens than the first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from freetoken import LLM, SamplingParams
from freetoken.demo import demo_model_path

EXPERTS, TOP_K = 8, 2
CAPS = (0, 1, 2, None)
QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]


def settings(every_size: bool) -> Iterator[dict[str, Any]]:
    """Strategies with cache sizes from the least to all experts, hybrid with every cap too."""
    yield {"strategy": "cpu"}
    yield {"strategy": "fused"}
    sizes = range(1, EXPERTS + 1) if every_size else (1, 2, 5, EXPERTS)
    for slots in sizes:
        if slots >= TOP_K:
            yield {"strategy": "offload", "cache_slots": slots}
        for cap in CAPS:
            yield {"strategy": "hybrid", "cache_slots": slots, "max_fetch": cap}


def main() -> None:
    """Run every setting and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--every-size", action="store_true")
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    expected: list[int] | None = None
    differing = 0
    for setting in settings(args.every_size):
        with LLM(demo_model_path(), **setting) as llm:
            tokens = list(llm.generate([llm.chat_tokens(QUESTION)], params)[0].token_ids)
            stats = llm.stats()
        expected = expected or tokens
        same = tokens == expected
        differing += not same
        found = stats.experts
        print(
            f"{setting!s:75} {'same' if same else 'DIFFERENT':10}"
            f"{stats.timing.decode_tokens_per_s:6.1f} tok/s   "
            f"hits {found.hits:6} fetched {found.fetched:6} cpu {found.cpu:6}",
            flush=True,
        )
    raise SystemExit(1 if differing else 0)


if __name__ == "__main__":
    main()
