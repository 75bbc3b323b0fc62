"""`ft convert`: a checkpoint to GGUF, with a progress bar on stderr."""

from __future__ import annotations

from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from freetoken.cli.models import find_model
from freetoken.cli.run import notes
from freetoken.convert import convert
from freetoken.writing import tidy_ends


def run(model: str, out: Path, experts: str, dense: str | None) -> None:
    """Convert, and say what was written."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with (
        tidy_ends(),
        Progress(*columns, TimeRemainingColumn(), console=notes, transient=True) as bar,
    ):
        task = bar.add_task("reading the headers", total=None)

        def show(tensor: str, done_bytes: int, total_bytes: int) -> None:
            bar.update(task, description=tensor, completed=done_bytes, total=total_bytes)

        made = convert(find_model(model), out, experts=experts, dense=dense, progress=show)
    formats = ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in made.formats.items())
    notes.print(
        f"{made.path}: {made.tensors} tensors, {made.bytes / 1e6:,.1f} MB ({formats})",
        soft_wrap=True,
        markup=False,
    )
