"""llama.cpp behind a pipe: one JSON request a line on stdin, one JSON answer a line on stdout.

Runs in a Python that has llama-cpp-python and need not have FreeToken. Times llama_decode alone.

    {"do": "load", "model": PATH, "threads": N, "context": N} -> {"version": ..., "system": ...}
    {"do": "run", "tokens": [...], "decode": [...]} -> {"prefill_s": ..., "decode_s": ...}
    {"do": "logits", "tokens": [...], "out": PATH.npy} -> {"shape": [T, vocab]}
    {"do": "tokenize", "text": ...} -> {"tokens": [...]}
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as api

_UBATCH = 512


@api.llama_log_callback
def _quiet(_level: int, _text: bytes, _data: Any) -> None:
    pass


class Worker:
    def load(self, model: str, threads: int, context: int) -> dict[str, Any]:
        api.llama_log_set(_quiet, ctypes.c_void_p(0))
        api.llama_backend_init()
        model_options = api.llama_model_default_params()
        model_options.n_gpu_layers = 0
        self._model = api.llama_model_load_from_file(model.encode(), model_options)
        if not self._model:
            raise RuntimeError(f"llama.cpp could not load {model}")
        options = api.llama_context_default_params()
        options.n_ctx = context
        options.n_batch = context
        options.n_ubatch = _UBATCH
        options.n_threads = options.n_threads_batch = threads
        self._context = api.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError("llama.cpp could not make a context")
        self._vocab = api.llama_model_get_vocab(self._model)
        return {
            "version": llama_cpp.__version__,
            "system": api.llama_print_system_info().decode(),
        }

    def run(self, tokens: list[int], decode: list[int]) -> dict[str, float]:
        """Prefill `tokens`, then `decode` one at a time."""
        self._clear()
        start = time.perf_counter()
        self._decode(tokens)
        prefill_s = time.perf_counter() - start
        start = time.perf_counter()
        for token in decode:
            self._decode([token])
        return {"prefill_s": prefill_s, "decode_s": time.perf_counter() - start}

    def logits(self, tokens: list[int], out: str) -> dict[str, Any]:
        """Logits after every token, float32 [T, vocab], to a file."""
        self._clear()
        count = api.llama_vocab_n_tokens(self._vocab)
        batch = api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = 1
        if api.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        rows = [
            np.ctypeslib.as_array(api.llama_get_logits_ith(self._context, i), (count,)).copy()
            for i in range(len(tokens))
        ]
        api.llama_batch_free(batch)
        np.save(out, np.stack(rows))
        return {"shape": [len(tokens), count]}

    def tokenize(self, text: str) -> dict[str, list[int]]:
        data = text.encode()
        tokens = (api.llama_token * (len(data) + 8))()
        count = api.llama_tokenize(self._vocab, data, len(data), tokens, len(tokens), True, False)
        return {"tokens": list(tokens[:count])}

    def _clear(self) -> None:
        api.llama_memory_clear(api.llama_get_memory(self._context), True)

    def _decode(self, tokens: list[int]) -> None:
        array = (api.llama_token * len(tokens))(*tokens)
        if api.llama_decode(self._context, api.llama_batch_get_one(array, len(tokens))):
            raise RuntimeError("llama_decode failed")


def main() -> None:
    worker = Worker()
    actions = {
        "load": worker.load,
        "run": worker.run,
        "logits": worker.logits,
        "tokenize": worker.tokenize,
    }
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = actions[request.pop("do")](**request)
        except RuntimeError as error:
            answer = {"error": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
