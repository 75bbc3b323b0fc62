"""A forked child cannot use the parent's worker threads: it is told so, and ends in peace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.tiny_models import make_model, save_hf, tiny_config

SCRIPT = """
import os, sys
from freetoken import LLM
llm = LLM(sys.argv[1], threads=2)
llm.logits([1, 2, 3])
child = os.fork()
if child == 0:
    try:
        llm.logits(list(range(64)))
    except RuntimeError as error:
        print("child:", error, flush=True)
    llm.close()
    del llm
    sys.exit(0)
status = os.waitpid(child, 0)[1]
llm.logits([1, 2, 3])
llm.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_gets_an_error_and_the_parent_goes_on(tmp_path: Path) -> None:
    # Large enough for its products to be divided among threads.
    config = tiny_config("llama", hidden_size=240, intermediate_size=512, vocab_size=300)
    save_hf(make_model(config), tmp_path / "m", tokenizer=True)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "m")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.returncode == 0, run.stderr
    assert "do not survive a fork" in run.stdout
