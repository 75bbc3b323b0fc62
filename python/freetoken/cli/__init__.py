"""The `ft` command. Answers `--version` before anything heavy is imported."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point."""
    if sys.argv[1:] in (["--version"], ["-V"]):
        from freetoken import __version__

        print(f"freetoken {__version__}")
        return
    from freetoken.cli.app import app

    app()
