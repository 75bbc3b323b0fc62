"""What is left of a model that was closed: its stats, and no weights."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from freetoken import LLM, SamplingParams
from freetoken.errors import FreeTokenError
from support.tiny_models import BYTE_VOCAB, make_model, save_hf, tiny_config

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def save(family: str, directory: Path) -> Path:
    config = tiny_config(family, vocab_size=BYTE_VOCAB, max_position_embeddings=64)
    save_hf(make_model(config, seed=1), directory, dtype=torch.bfloat16, tokenizer=True)
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("mixtral", tmp_path_factory.mktemp("mixtral"))


USES: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate("x", GREEDY),
    "generate nothing": lambda llm: llm.generate([]),
    "stream": lambda llm: llm.stream("x"),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "Hi"}]),
    "chat_tokens": lambda llm: llm.chat_tokens([{"role": "user", "content": "Hi"}]),
    "logits": lambda llm: llm.logits([1]),
    "decode_logits": lambda llm: llm.decode_logits([1]),
    "tokenizer": lambda llm: llm.tokenizer,
    "reset_stats": lambda llm: llm.reset_stats(),
}


@pytest.fixture(scope="module")
def closed(directory: Path) -> LLM:
    llm = LLM(directory, threads=1)
    llm.close()
    llm.close()
    return llm


@pytest.mark.parametrize("use", USES)
def test_a_closed_model_says_so(closed: LLM, use: str) -> None:
    with pytest.raises(FreeTokenError, match="this LLM is closed; load"):
        USES[use](closed)


def test_streams_of_a_closed_model_say_so(directory: Path) -> None:
    with LLM(directory, threads=1) as llm:
        new, read, ended = (llm.stream("x", GREEDY) for _ in range(3))
        next(read)
        list(ended)
    for stream in (new, read):
        with pytest.raises(FreeTokenError, match="this LLM is closed; load"):
            next(stream)
    assert list(ended) == []


def test_stats_stay_after_closing(directory: Path) -> None:
    with LLM(directory, "hybrid", threads=1) as llm:
        llm.generate("Hello", GREEDY)
        before = llm.stats()
    assert llm.stats() == before and before.experts.active > 0


def maps_of(directory: Path) -> list[str]:
    """What of a directory is mapped into this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if str(directory) in line]


@pytest.mark.parametrize("strategy", ["dense", "cpu", "fused", "offload", "hybrid"])
def test_closing_frees_the_weights_at_once(tmp_path: Path, strategy: str) -> None:
    """Without the garbage collector, and although a stream is still around."""
    family = "llama" if strategy == "dense" else "mixtral"
    save(family, tmp_path)
    gc.collect()
    gc.disable()
    try:
        llm = LLM(tmp_path, "auto" if strategy == "dense" else strategy, threads=1)
        stream = llm.stream("Hello", GREEDY)
        next(stream)
        engine = llm._model.engine
        held = [weakref.ref(engine), weakref.ref(engine._model), weakref.ref(engine._kv)]
        runtime = llm._model.runtime
        if runtime is not None and runtime.pool is not None:
            held.append(weakref.ref(runtime.pool.bank(0).owners[0]))
        del engine, runtime
        assert maps_of(tmp_path) and all(ref() is not None for ref in held)
        llm.close()
        assert not maps_of(tmp_path) and all(ref() is None for ref in held)
        del stream
    finally:
        gc.enable()
