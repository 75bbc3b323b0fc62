"""Draw docs/report.svg: what `ft demo` ends with, on this machine, now.

python docs/report_picture.py
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from freetoken.cli import report
from freetoken.cli.run import EngineOptions, Job, SamplingOptions, compared
from freetoken.demo import demo_model_path

WIDTH = 78
WITHOUT_WEB_FONTS = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def main() -> None:
    """Run the demo's two answers and draw the table that compares them."""
    job = Job(
        "Why is the sky blue?", chat=True, sampling=SamplingOptions(max_tokens=160, temperature=0.0)
    )
    runs = compared(str(demo_model_path()), job, EngineOptions())
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(report.table(runs))
    picture = console.export_svg(title="make demo", code_format=WITHOUT_WEB_FONTS)
    (Path(__file__).parent / "report.svg").write_text(picture)


if __name__ == "__main__":
    main()
