"""The Python interface end to end, on tiny checkpoints, with every strategy."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import freetoken
from freetoken import LLM, SamplingParams
from freetoken.errors import CapacityError, ConfigError, RequestError
from support.tiny_gguf import write_gguf
from support.tiny_models import (
    BYTE_VOCAB,
    FAMILIES,
    make_model,
    reference_logits,
    save_hf,
    tiny_config,
)

CONTEXT = 64
TOKENS = [72, 5, 200, 13, 13, 99, 0, 257, 41, 7, 150, 33, 72, 5, 61]
PROMPTS: list[Any] = ["Hello", "a", "The quick brown fox", TOKENS, "zz" * 15, "0123"]
GREEDY = SamplingParams(temperature=0, max_tokens=12)

# strategy, cache_slots, max_fetch: from the least that works to everything resident.
SETTINGS = [
    ("cpu", None, None),
    ("fused", None, None),
    ("offload", 2, None),
    ("offload", 5, None),
    ("hybrid", 1, None),
    ("hybrid", 2, 0),
    ("hybrid", 3, 1),
    ("hybrid", 4, 2),
    ("hybrid", 5, None),
]


class Made:
    """A checkpoint on disk and the transformers model with the same weights."""

    def __init__(self, path: Path, reference: Any) -> None:
        self.path = path
        self.reference = reference


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    made = {}
    for seed, family in enumerate(FAMILIES):
        config = tiny_config(family, vocab_size=BYTE_VOCAB, max_position_embeddings=CONTEXT)
        model = make_model(config, seed=seed, bf16_exact=True)
        directory = tmp_path_factory.mktemp(family)
        save_hf(model, directory, dtype=torch.bfloat16, tokenizer=True)
        made[family] = Made(directory, model)
    return made


@pytest.fixture(scope="module")
def llm(checkpoints: dict[str, Made]) -> Iterator[LLM]:
    with LLM(checkpoints["mixtral"].path, threads=2) as loaded:
        yield loaded


@pytest.fixture(autouse=True)
def no_pages_are_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did with the shared model, it holds no pages afterwards."""
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm")._model.engine
        engine.check_integrity()
        assert not engine.has_work


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(checkpoints: dict[str, Made], family: str) -> None:
    made = checkpoints[family]
    expected = reference_logits(made.reference, TOKENS)
    with LLM(made.path, threads=2) as llm:
        found, decoded = llm.logits(TOKENS), llm.decode_logits(np.array(TOKENS))
    assert found.dtype == torch.float32 and found.shape == (len(TOKENS), BYTE_VOCAB)
    assert relative_error(found, expected) < 1e-4
    assert relative_error(decoded, found) < 1e-5


@pytest.mark.parametrize(("strategy", "slots", "fetch"), SETTINGS)
def test_every_strategy_computes_the_same(
    checkpoints: dict[str, Made], strategy: str, slots: int | None, fetch: int | None
) -> None:
    made = checkpoints["mixtral"]
    expected = reference_logits(made.reference, TOKENS)
    with LLM(made.path, strategy, "cpu", slots, fetch, threads=2) as llm:
        assert relative_error(llm.logits(TOKENS), expected) < 1e-4
        assert relative_error(llm.decode_logits(TOKENS), expected) < 1e-4
        stats = llm.stats()
    assert stats.config.strategy == strategy
    assert stats.experts.steps == len(TOKENS)
    assert stats.experts.active == 2 * 3 * len(TOKENS)


@pytest.mark.parametrize(("strategy", "slots", "fetch"), SETTINGS)
def test_a_batch_gives_each_what_it_gets_alone(
    checkpoints: dict[str, Made],
    llm: LLM,
    strategy: str,
    slots: int | None,
    fetch: int | None,
) -> None:
    expected = [llm.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
    assert len({completion.text for completion in expected}) == len(PROMPTS)
    with LLM(checkpoints["mixtral"].path, strategy, "cpu", slots, fetch, threads=2) as other:
        assert other.generate(PROMPTS, GREEDY) == expected
        assert [other.generate([prompt], GREEDY)[0] for prompt in PROMPTS] == expected


@pytest.mark.parametrize("strategy", ["cpu", "hybrid"])
def test_prompts_cut_into_several_steps_give_the_same(
    checkpoints: dict[str, Made], llm: LLM, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.setattr("freetoken.config.steps.PREFILL_BUDGET_TOKENS", 7)
    slots = 2 if strategy == "hybrid" else None
    with LLM(checkpoints["mixtral"].path, strategy, cache_slots=slots, threads=2) as other:
        assert other.generate(PROMPTS, GREEDY) == llm.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize("family", ["qwen3_moe", "llama", "qwen3"])
def test_batches_of_the_other_families(checkpoints: dict[str, Made], family: str) -> None:
    with LLM(checkpoints[family].path, threads=2) as llm:
        together = llm.generate(PROMPTS, GREEDY)
        assert together == [llm.generate([prompt], GREEDY)[0] for prompt in PROMPTS]


def test_greedy_tokens_are_those_of_transformers(checkpoints: dict[str, Made], llm: LLM) -> None:
    made = checkpoints["mixtral"]
    found = llm.generate([TOKENS], GREEDY)[0].token_ids
    following = reference_logits(made.reference, TOKENS + found).argmax(dim=-1)
    assert found == following[len(TOKENS) - 1 : -1].tolist()


def test_quantised_experts_agree_between_strategies(tmp_path: Path) -> None:
    config = tiny_config("mixtral", hidden_size=64, intermediate_size=96, vocab_size=BYTE_VOCAB)
    made = write_gguf(make_model(config, seed=4), tmp_path / "tiny.gguf")
    prompts = [TOKENS, TOKENS[:4], TOKENS[2:9]]
    expected = reference_logits(made.reference, TOKENS)
    results = []
    for strategy, slots, fetch in SETTINGS:
        with LLM(made.path, strategy, "cpu", slots, fetch, threads=2) as llm:
            results.append(llm.generate(prompts, GREEDY))
            assert relative_error(llm.logits(TOKENS), expected) < 0.05
            assert llm.stats().config.format == "Q8_0"
    assert all(result == results[0] for result in results)


def test_seeded_sampling_does_not_depend_on_the_batch(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=1.5, seed=i, max_tokens=10, top_p=(1.0, 0.9)[i % 2])
        for i in range(len(PROMPTS))
    ]
    together = llm.generate(PROMPTS, params)
    alone = [llm.generate(p, q)[0] for p, q in zip(PROMPTS, params, strict=True)]
    assert together == alone
    other = llm.generate(PROMPTS[0], SamplingParams(temperature=1.5, seed=99, max_tokens=10))[0]
    assert other.token_ids != together[0].token_ids


@pytest.mark.parametrize(("temperature", "max_tokens"), [(0.0, 12), (1.2, 20), (1.0, 0)])
def test_streaming_gives_what_generate_gives(llm: LLM, temperature: float, max_tokens: int) -> None:
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=max_tokens)
    pieces = list(llm.stream("Hello", params))
    assert "".join(pieces) == llm.generate("Hello", params)[0].text
    assert all(pieces)


def test_streams_read_in_turn_run_together(llm: LLM) -> None:
    expected = [llm.generate(prompt, GREEDY)[0].text for prompt in ("one", "two")]
    streams = [llm.stream("one", GREEDY), llm.stream("two", GREEDY)]
    texts = ["", ""]
    for first, second in itertools.zip_longest(*streams, fillvalue=""):
        texts[0] += first
        texts[1] += second
    assert texts == expected


def test_closing_a_stream_early_frees_its_pages(llm: LLM) -> None:
    engine = llm._model.engine
    stream = llm.stream("Hello", GREEDY)
    assert not engine.has_work
    next(stream)
    assert engine.has_work
    stream.close()  # type: ignore[attr-defined]
    assert not engine.has_work
    for _ in llm.stream("Hello", GREEDY):
        break
    assert not engine.has_work


def test_stop_strings_cut_the_text(llm: LLM) -> None:
    whole = llm.generate("Hello", GREEDY)[0].text
    stop = whole[3:6]
    params = SamplingParams(temperature=0, max_tokens=12, stop=stop)
    done = llm.generate("Hello", params)[0]
    assert done.text == whole[: whole.index(stop)] and done.finish_reason == "stop"
    assert done.completion_tokens == len(done.token_ids) < 12
    assert "".join(llm.stream("Hello", params)) == done.text


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_few_tokens(llm: LLM, max_tokens: int) -> None:
    done = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=max_tokens))[0]
    assert done.completion_tokens == len(done.token_ids) == max_tokens
    assert done.prompt_tokens == 5 and done.finish_reason == "length"


def test_prompts_take_many_forms(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Hello")
    expected = llm.generate("Hello", GREEDY)
    assert len(expected) == 1
    assert llm.generate(["Hello"], GREEDY) == llm.generate(ids, GREEDY) == expected
    assert llm.generate([ids, "Hello"], [GREEDY, GREEDY]) == expected * 2
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_sequences_of_any_kind_are_prompts(llm: LLM, kind: Callable[[list[int]], Any]) -> None:
    expected = [llm.generate([prompt], GREEDY)[0] for prompt in ([72], [101])]
    assert llm.generate([kind([72]), kind([101])], GREEDY) == expected
    assert llm.generate([kind([72])], GREEDY) == expected[:1]
    one = llm.generate([[72, 101]], GREEDY)
    assert llm.generate(kind([72, 101]), GREEDY) == one
    assert llm.generate([kind([72, 101])], GREEDY) == one
    assert llm.generate(list(kind([72, 101])), GREEDY) == one  # whole numbers of that kind
    assert "".join(llm.stream(kind([72, 101]), GREEDY)) == one[0].text


@pytest.mark.parametrize("rows", [np.array, torch.tensor])
def test_each_row_of_a_matrix_is_a_prompt(llm: LLM, rows: Callable[[Any], Any]) -> None:
    expected = llm.generate([[72, 1], [101, 2]], GREEDY)
    assert llm.generate(rows([[72, 1], [101, 2]]), GREEDY) == expected


@pytest.mark.parametrize(
    "prompts",
    [
        [1.5],
        [72, "text"],
        [72, [101]],
        [None],
        torch.tensor(72),
        torch.tensor([1.5]),
        np.array([1.5]),
        [[torch.tensor([72]), torch.tensor([101])]],
    ],
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="a text or a list of token ids"):
        llm.generate(prompts, GREEDY)


def test_chat_uses_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert llm.chat(messages, GREEDY) == llm.generate("user: Hi\nassistant: ", GREEDY)[0]
    assert llm.chat_tokens(messages) == llm.tokenizer.encode("user: Hi\nassistant: ")


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ("", "no tokens"),
        ([1, 2, BYTE_VOCAB], f"token 2 of the prompt is {BYTE_VOCAB}"),
        ("x" * CONTEXT, f"{CONTEXT} tokens and the model's context is {CONTEXT}"),
        ([1.5], "a text or a list of token ids"),
    ],
)
def test_prompts_that_cannot_be_served(llm: LLM, prompt: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        llm.generate(["fine", prompt], GREEDY)
    with pytest.raises(RequestError, match=problem):
        llm.stream(prompt, GREEDY)


def test_params_and_prompts_must_match(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 SamplingParams for 1 prompts"):
        llm.generate("x", [GREEDY, GREEDY])


def test_the_context_is_a_limit(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    done = llm.generate([TOKENS], params)[0]
    assert done.completion_tokens == CONTEXT - len(TOKENS) and done.finish_reason == "length"
    assert llm.logits([1] * CONTEXT).shape[0] == CONTEXT
    with pytest.raises(RequestError, match=f"at most {CONTEXT}"):
        llm.logits([1] * (CONTEXT + 1))


def test_an_interrupt_leaves_the_model_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate(PROMPTS, GREEDY)
    engine = llm._model.engine
    step, steps = engine.step, itertools.count()

    def interrupted_step() -> None:
        if next(steps) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        step()

    monkeypatch.setattr(engine, "step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    engine.check_integrity()
    assert not engine.has_work
    assert llm.generate(PROMPTS, GREEDY) == expected


def test_stats_count_this_models_work(checkpoints: dict[str, Made]) -> None:
    with LLM(checkpoints["mixtral"].path, "hybrid", cache_slots=2, max_fetch=1, threads=1) as llm:
        llm.generate(["Hello", "Hi"], GREEDY)
        stats = llm.stats()
        assert stats.timing.prefill_tokens == 7 and stats.timing.decode_tokens == 22
        assert stats.timing.load_s > 0 and stats.timing.decode_tokens_per_s > 0
        experts = stats.experts
        assert experts.steps == 11 and experts.hits > 0 and experts.fetched > 0 and experts.cpu > 0
        assert experts.active == experts.hits + experts.misses
        assert experts.misses == experts.fetched + experts.cpu
        config = stats.config
        assert (config.slots, config.experts, config.top_k, config.max_fetch) == (2, 5, 2, 1)
        assert (config.device, config.format, config.threads) == ("cpu", "BF16", 1)
        llm.reset_stats()
        assert llm.stats().experts.active == 0 and llm.stats().timing.decode_tokens == 0


@pytest.mark.parametrize(("setting", "overlap"), [(None, True), ("1", True), ("0", False)])
def test_overlap_is_what_the_environment_says(
    checkpoints: dict[str, Made],
    monkeypatch: pytest.MonkeyPatch,
    setting: str | None,
    overlap: bool,
) -> None:
    monkeypatch.delenv("FREETOKEN_HYBRID_OVERLAP", raising=False)
    if setting is not None:
        monkeypatch.setenv("FREETOKEN_HYBRID_OVERLAP", setting)
    with LLM(checkpoints["mixtral"].path, "hybrid", threads=1) as llm:
        runtime = llm._model.runtime
        assert runtime is not None and runtime.hybrid.overlap is overlap
        assert llm._model.config.overlap is overlap


def test_auto_without_a_gpu_is_cpu(llm: LLM) -> None:
    assert llm.stats().config.strategy == "cpu" and llm.stats().config.slots is None


def test_a_dense_model_warns_of_options_without_effect(checkpoints: dict[str, Made]) -> None:
    with (
        pytest.warns(UserWarning, match="dense"),
        LLM(checkpoints["llama"].path, strategy="hybrid") as llm,
    ):
        assert llm.stats().config.strategy == "dense"
        assert llm.generate("x", GREEDY)[0].completion_tokens > 0
        assert llm.stats().experts.active == 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"strategy": "quick"}, "choose one of"),
        ({"strategy": "offload", "cache_slots": 1}, "2 to 5"),
        ({"strategy": "hybrid", "cache_slots": 6}, "1 to 5"),
        ({"device": "cuda"}, "cpu"),
    ],
)
def test_options_that_cannot_be_used(
    checkpoints: dict[str, Made], options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        LLM(checkpoints["mixtral"].path, **options)


def test_too_little_memory_is_refused(
    checkpoints: dict[str, Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    from freetoken.config import Hardware
    from freetoken.engine import loading

    monkeypatch.setattr(loading, "detect_hardware", lambda **_: Hardware(memory_bytes=1000))
    with pytest.raises(CapacityError, match="free some memory"):
        LLM(checkpoints["mixtral"].path)


def test_importing_the_package_is_cheap() -> None:
    code = (
        "import sys, freetoken; freetoken.__version__;"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_names_what_it_has() -> None:
    assert set(freetoken.__all__) <= set(dir(freetoken))
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        _ = freetoken.LLMs  # type: ignore[attr-defined]
