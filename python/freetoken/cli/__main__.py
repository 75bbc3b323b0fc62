"""`python -m freetoken.cli` is `ft`."""

from freetoken.cli import main

main()
