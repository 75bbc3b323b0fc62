"""The other end of llama_worker.py's pipe."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

_WORKER = Path(__file__).with_name("llama_worker.py")


class LlamaProcess:
    """llama.cpp in a process of its own, started with the Python that has llama-cpp-python."""

    def __init__(self, python: Path, model: Path, threads: int, context: int) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [python, _WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.description: dict[str, Any] = self.ask(
            "load", model=str(model.resolve()), threads=threads, context=context
        )

    def ask(self, action: str, **arguments: Any) -> dict[str, Any]:
        """Raises RuntimeError with what the worker says."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": action, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the llama.cpp process ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> LlamaProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
