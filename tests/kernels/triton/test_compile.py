"""Every Triton kernel compiles for every GPU target, with the oldest and the newest Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests" / "support" / "compile_triton.py"
OTHER_TRITON = "FREETOKEN_OTHER_TRITON"  # a folder with another release of Triton in it


def compile_all(cache: Path, *first: str) -> None:
    """Run the script with `first` before all else on the path, and an empty cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = [*first, *(entry for entry in sys.path if entry)]
    environment |= {"PYTHONPATH": os.pathsep.join(path), "TRITON_CACHE_DIR": str(cache)}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, f"{result.stdout[-8000:]}\n{result.stderr[-4000:]}"


def test_installed_triton(tmp_path: Path) -> None:
    compile_all(tmp_path)


def test_other_triton(tmp_path: Path) -> None:
    other = os.environ.get(OTHER_TRITON)
    if not other:
        pytest.skip(f"{OTHER_TRITON} names no other Triton; `make test-triton` sets it")
    assert (Path(other) / "triton" / "__init__.py").is_file(), f"no triton in {other}"
    compile_all(tmp_path, other)
