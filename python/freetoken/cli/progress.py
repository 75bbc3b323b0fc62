"""Progress on stderr while the demo model is built."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from freetoken.demo import demo_model_path, ensure_demo_model


def build_demo_model(console: Console) -> Path:
    """The demo model, built first with a progress bar if it is not in the cache yet."""
    if demo_model_path().is_file():
        return demo_model_path()
    console.print(
        f"Building the demo model, once: {demo_model_path()}", soft_wrap=True, markup=False
    )
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        tasks = {}

        def show(step: str, done_bytes: int, total_bytes: int) -> None:
            if step not in tasks:
                tasks[step] = bar.add_task(step, total=total_bytes)
            bar.update(tasks[step], completed=done_bytes)

        return ensure_demo_model(show)
