"""Draw docs/report.svg: what `ft demo` ends with, on this machine, now.

python docs/report_picture.py
"""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from freetoken.cli import report
from freetoken.cli.run import EngineOptions, Job, SamplingOptions, compared
from freetoken.demo import demo_model_path

WIDTH = 78


def main() -> None:
    """Run the demo's two answers and draw the table that compares them."""
    job = Job(
        "Why is the sky blue?", chat=True, sampling=SamplingOptions(max_tokens=160, temperature=0.0)
    )
    runs = compared(str(demo_model_path()), job, EngineOptions())
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(report.table(runs))
    console.save_svg(str(Path(__file__).parent / "report.svg"), title="make demo")


if __name__ == "__main__":
    main()
