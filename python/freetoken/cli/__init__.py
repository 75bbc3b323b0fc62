"""The `ft` command. Answers `--version` before anything heavy is imported."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point. Ctrl-C ends it without a traceback while it imports, too."""
    try:
        _main()
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        sys.exit(130)


def _main() -> None:
    if sys.stdout is None:  # started with stdout closed
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for the life of the process)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show every character
    if sys.argv[1:] in (["--version"], ["-V"]):
        from freetoken import __version__

        print(f"freetoken {__version__}")
        return
    from freetoken.cli.app import app

    app()
