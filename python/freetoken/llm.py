"""The Python interface: load a model once, generate text with it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from freetoken.config import GPU_MEMORY_FRACTION, EngineConfig
from freetoken.engine.engine import Engine, Generation
from freetoken.engine.interrupts import deferred_interrupts
from freetoken.engine.loading import LoadedModel, load_model
from freetoken.engine.output import Completion
from freetoken.engine.prompts import (
    Prompt,
    as_batch,
    as_ids,
    one_params,
    params_per_prompt,
)
from freetoken.errors import FreeTokenError
from freetoken.models.batch import Phase
from freetoken.scheduler import SamplingParams
from freetoken.telemetry import ExpertCounts, Stats, StepTimer
from freetoken.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A loaded model.

        with LLM("path/to/model.gguf") as llm:
            print(llm.generate("Once upon a time", SamplingParams(max_tokens=40))[0].text)

    model: a Hugging Face directory, a hub id, or a GGUF file. strategy: "auto", "fused", "offload",
    "cpu" or "hybrid". device: "auto", "cpu", "cuda" or "rocm". cache_slots: experts per layer that
    the cache holds (offload, hybrid); None: what fits. max_fetch: experts fetched per layer and
    step at most (hybrid); None: no limit. threads: CPU threads; None: one per physical core.
    cpu_activations: what quantised weights are multiplied with on the CPU, "int8" blocks of 32 or
    "exact" float32. gpu_memory_fraction: how much of the GPU's free memory is used, above 0 to 1.
    kv_tokens: tokens that the key-value cache holds, over all requests; None: what fits.

    Threads may share it: they take turns, step by step. Raises ConfigError for options that cannot
    be used, CheckpointError for a checkpoint that cannot, CapacityError if it does not fit.
    """

    def __init__(
        self,
        model: str | Path,
        strategy: str = "auto",
        device: str = "auto",
        cache_slots: int | None = None,
        max_fetch: int | None = None,
        threads: int | None = None,
        cpu_activations: str = "int8",
        gpu_memory_fraction: float = GPU_MEMORY_FRACTION,
        kv_tokens: int | None = None,
    ) -> None:
        started = time.perf_counter()
        config = EngineConfig(
            strategy=strategy,
            device=device,
            cache_slots=cache_slots,
            max_fetch=max_fetch,
            threads=threads,
            cpu_activations=cpu_activations,
            gpu_memory_fraction=gpu_memory_fraction,
            kv_tokens=kv_tokens,
        )
        self._loaded: LoadedModel | None = load_model(model, config)
        self._load_s = time.perf_counter() - started
        self._final_stats: Stats | None = None
        for note in self._model.config.notes:
            warnings.warn(note, stacklevel=2)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._model.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete prompts, all together; results in the order of the prompts.

        prompts: a text, a list of token ids, or a sequence of these. params: one for all, or one
        per prompt. Raises RequestError, before anything runs, for a prompt that cannot be served.
        Ctrl-C and errors drop the requests; the model stays usable.
        """
        engine = self._model.engine
        batch = as_batch(prompts)
        each = params_per_prompt(params, len(batch))
        ids = [self._encode(prompt) for prompt in batch]
        for tokens, one in zip(ids, each, strict=True):
            engine.check_prompt(tokens, new_tokens=0 if one.max_tokens == 0 else 1)
        generations: list[Generation] = []
        with deferred_interrupts() as interrupts:
            try:
                for tokens, one in zip(ids, each, strict=True):
                    generations.append(engine.submit(tokens, one))
                while any(generation.request.is_live for generation in generations):
                    interrupts.deliver()
                    engine.step()
                return [generation.completion() for generation in generations]
            finally:
                _cancel(engine, generations)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Pieces of the completion's text as they come; joined, they are what `generate` returns.

        Closing the iterator, or dropping it, cancels the request. Several may be read in turn, and
        then run together. Raises RequestError at once for a prompt that cannot be served.
        """
        engine = self._model.engine
        chosen = one_params(params)
        tokens = self._encode(prompt)
        engine.check_prompt(tokens, new_tokens=0 if chosen.max_tokens == 0 else 1)
        return self._stream(tokens, chosen)

    def chat(self, messages: Messages, params: SamplingParams | None = None) -> Completion:
        """The model's answer to a conversation: dicts with "role" and "content".

        Raises RequestError if the model has no chat template, or its template refuses; and for
        what is no conversation.
        """
        return self.generate([self.chat_tokens(messages)], params)[0]

    def chat_tokens(self, messages: Messages) -> list[int]:
        """A conversation as the model's chat template puts it, in token ids: for `stream`."""
        text = self.tokenizer.apply_chat(messages)
        return self.tokenizer.encode(text, add_special=False)

    def logits(self, token_ids: Iterable[int]) -> Tensor:
        """Logits after every token, float32 [T, vocab], computed in one prefill."""
        return self._model.engine.score(as_ids(token_ids), Phase.PREFILL)

    def decode_logits(self, token_ids: Iterable[int]) -> Tensor:
        """The same, one token at a time through the decode path."""
        return self._model.engine.score(as_ids(token_ids), Phase.DECODE)

    def stats(self) -> Stats:
        """Times and counts since loading or the last `reset_stats`, and the configuration; of a
        closed model, as they were when it was closed."""
        if self._final_stats is not None:
            return self._final_stats
        runtime = self._model.runtime
        experts = ExpertCounts() if runtime is None else runtime.stats().total
        timing = self._model.engine.timer.timing(self._load_s)
        return Stats(timing=timing, experts=experts, config=self._model.report)

    def reset_stats(self) -> None:
        """Start counting and timing again. What is cached stays cached."""
        self._model.engine.timer = StepTimer()
        if self._model.runtime is not None:
            self._model.runtime.reset_stats()

    def close(self) -> None:
        """Drop requests, stop the workers and free the weights; only `stats` can be asked for
        afterwards. May be called again."""
        with deferred_interrupts():
            if self._loaded is not None:
                self._final_stats = self.stats()
                loaded, self._loaded = self._loaded, None
                loaded.engine.drop_all()
                loaded.resources.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _model(self) -> LoadedModel:
        if self._loaded is None:
            raise FreeTokenError("this LLM is closed; load the model again to use it")
        return self._loaded

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else as_ids(prompt)

    def _stream(self, tokens: list[int], params: SamplingParams) -> Iterator[str]:
        """Holds neither the engine nor weights while it waits, so that `close` frees them."""
        generations: list[Generation] = []
        try:
            with deferred_interrupts():
                generations.append(self._model.engine.submit(tokens, params))
            while self._advance(generations[0]):
                if piece := generations[0].take_new_text():
                    yield piece
            generations[0].completion()  # raises if the request was dropped
            if piece := generations[0].take_new_text():
                yield piece
        finally:
            if self._loaded is not None:
                _cancel(self._loaded.engine, generations)

    def _advance(self, generation: Generation) -> bool:
        """Compute a step; False if the request has left. FreeTokenError if the LLM is closed."""
        engine = self._model.engine
        if generation.request.is_live:
            engine.step()
            return True
        return False


def _cancel(engine: Engine, generations: Sequence[Generation]) -> None:
    with deferred_interrupts():
        for generation in generations:
            engine.cancel(generation)
