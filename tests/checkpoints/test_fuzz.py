"""Damaged files: each target runs in a child process with a memory and a time limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = int(os.environ.get("FREETOKEN_FUZZ_EXAMPLES", "100"))
TIMEOUT_S = 120 + EXAMPLES


@pytest.mark.parametrize("target", ["gguf", "safetensors", "quantized", "split", "index"])
def test_only_checkpoint_errors_come_out(tmp_path: Path, target: str) -> None:
    """And what opens holds tensors that lie inside their files. See support/fuzz_readers.py."""
    command = [sys.executable, "-m", "support.fuzz_readers", target, str(tmp_path), str(EXAMPLES)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert child.returncode == 0, child.stderr[-4000:]
    outcomes = json.loads(child.stdout)
    assert outcomes["refused"] > EXAMPLES / 2, "the damage does reach what is checked"
    assert outcomes["opened"] > 0, "and some of it leaves a valid file"
