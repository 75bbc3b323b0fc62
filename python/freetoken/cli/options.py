"""Options that several commands share, each declared once."""

from __future__ import annotations

from typing import Annotated

import typer

from freetoken.config import CpuActivations as CpuActivationsName
from freetoken.config import DeviceName, StrategyChoice

Model = Annotated[
    str,
    typer.Option(
        help="A Hugging Face directory, a hub id, a GGUF file, or a name of `ft models list`."
    ),
]
Chat = Annotated[
    bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
]
MaxTokens = Annotated[
    int | None, typer.Option(help="Most tokens to generate.", metavar="N", show_default="256")
]
DemoMaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.", metavar="N")]
Temperature = Annotated[
    float | None,
    typer.Option(help="0 is greedy; higher is more varied.", metavar="F", show_default="1.0"),
]
DemoTemperature = Annotated[
    float, typer.Option(help="0 is greedy; higher is more varied.", metavar="F")
]
TopP = Annotated[
    float | None,
    typer.Option(help="Keep the likeliest tokens that sum to F.", metavar="F", show_default="1.0"),
]
TopK = Annotated[
    int | None,
    typer.Option(help="Keep the N likeliest tokens; 0 keeps all.", metavar="N", show_default="0"),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Drop tokens less likely than F times the likeliest.",
        metavar="F",
        show_default="0.0",
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        help="Above 1 makes tokens seen before less likely.",
        metavar="F",
        show_default="1.0",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="The same seed gives the same text.", metavar="N", show_default="another each time"
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        help="Stop before this text; may be repeated.", metavar="TEXT", show_default="none"
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option("--ignore-eos", help="Go on past the end-of-text token."),
]
_STRATEGY_HELP = (
    "Where experts are computed: all resident (fused), fetched when missed (offload), by the CPU "
    "(cpu), or both at once (hybrid). auto: what suits the machine."
)
Strategy = Annotated[StrategyChoice | None, typer.Option(help=_STRATEGY_HELP, show_default="auto")]
DemoStrategy = Annotated[
    StrategyChoice | None,
    typer.Option(help=_STRATEGY_HELP, show_default="auto, then hybrid, to compare"),
]
Device = Annotated[DeviceName, typer.Option(help="Where to run.")]
CacheSlots = Annotated[
    int | None,
    typer.Option(
        help="Experts per layer that the cache holds.", metavar="N", show_default="what fits"
    ),
]
MaxFetch = Annotated[
    int | None,
    typer.Option(
        help="Most experts fetched per layer and step; the CPU computes the others (hybrid).",
        metavar="N",
        show_default="no limit",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="CPU threads.",
        metavar="N",
        show_default="one per physical core, or beside a GPU one less of four or more",
    ),
]
CpuActivations = Annotated[
    CpuActivationsName,
    typer.Option(
        help="What quantised weights are multiplied with on the CPU: int8 is fast, exact is not "
        "rounded.",
    ),
]
GpuMemoryFraction = Annotated[
    float,
    typer.Option(help="How much of the GPU's free memory to use, above 0 to 1.", metavar="F"),
]
KvTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens that the key-value cache holds, over all requests.",
        metavar="N",
        show_default="what fits",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, and nothing else, on stdout.")
]
