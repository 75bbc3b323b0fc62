"""What is no prompt, no chat, no parameter and no model: an error of ours that says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freetoken import LLM, SamplingParams
from freetoken.config import EngineConfig
from freetoken.errors import CheckpointError, ConfigError, RequestError
from support.tiny_models import BYTE_VOCAB, make_model, save_hf, tiny_config

GREEDY = SamplingParams(temperature=0, max_tokens=1)


class Unreadable:
    def __index__(self) -> int:
        raise RuntimeError("not today")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = tmp_path_factory.mktemp("llama")
    config = tiny_config("llama", vocab_size=BYTE_VOCAB, max_position_embeddings=64)
    with LLM(save_hf(make_model(config), directory, tokenizer=True), threads=1) as loaded:
        yield loaded


NO_PROMPTS: list[tuple[Any, str]] = [
    (None, r"found None \(NoneType\)"),
    (5, r"found 5 \(int\)"),
    (5.0, r"found 5.0 \(float\)"),
    (True, r"found True \(bool\)"),
    (b"abc", r"found b'abc' \(bytes\); bytes are decoded first"),
    (bytearray(b"abc"), r"\(bytearray\); bytes are decoded first"),
    (memoryview(b"abc"), r"\(memoryview\)"),
    ({1: 2}, r"found {1: 2} \(dict\)"),
    ({1, 2}, r"found {1, 2} \(set\)"),
    (Path("x"), r"\(PosixPath\)"),
    ([1, "a"], r"found 'a' \(str\) as its item 1; give texts in a list"),
    ([1, 2.0], r"found 2.0 \(float\) as its item 1"),
    ([1, True], r"found True \(bool\) as its item 1"),
    ([1, None], r"found None \(NoneType\) as its item 1"),
    ([1, [2]], r"found \[2\] \(list\) as its item 1"),
    ([-1], r"token 0 of the prompt is -1; the model's ids are 0 to 257"),
    ([10**12], r"token 0 of the prompt is 1000000000000; the model's ids are 0 to 257"),
    ([1, Unreadable()], r"cannot be read: not today"),
    (torch.ones(2), r"\(Tensor\)"),
    (torch.ones(2, dtype=torch.bool), r"\(Tensor\)"),
    (np.array([True]), r"\(bool"),
    (np.array([1.5]), r"\(float64\)"),
]


@pytest.mark.parametrize(("prompt", "said"), NO_PROMPTS)
def test_what_is_no_prompt_is_refused(llm: LLM, prompt: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        llm.generate(["a", prompt], GREEDY)
    with pytest.raises(RequestError, match=said):
        llm.stream(prompt, GREEDY)
    for score in (llm.logits, llm.decode_logits):
        with pytest.raises(RequestError, match=said):
            score(prompt)


@pytest.mark.parametrize("prompts", [prompt for prompt, _ in NO_PROMPTS])
def test_nor_is_it_a_batch(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="prompt"):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize("empty", ["", []])
def test_a_prompt_without_tokens_is_refused(llm: LLM, empty: Any) -> None:
    with pytest.raises(RequestError, match="no tokens"):
        llm.generate(["a", empty], GREEDY)


def test_a_text_has_no_logits(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"found 'abc' \(str\).*tokenizer.encode"):
        llm.logits("abc")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["\ud800", "fine until \udfff here"])
def test_lone_surrogates_are_refused_everywhere(llm: LLM, text: str) -> None:
    chat = [{"role": "user", "content": text}]
    for use in (
        lambda: llm.generate(text, GREEDY),
        lambda: llm.generate(["a", text], GREEDY),
        lambda: llm.stream(text, GREEDY),
        lambda: llm.chat(chat, GREEDY),
        lambda: llm.chat_tokens(chat),
        lambda: llm.tokenizer.encode(text),
    ):
        with pytest.raises(RequestError, match="lone surrogate"):
            use()


@pytest.mark.parametrize("text", [None, 5, b"abc", ["a"], Path("x")])
def test_what_is_no_text_is_not_encoded(llm: LLM, text: Any) -> None:
    with pytest.raises(RequestError, match=rf"the text to encode is .*{type(text).__name__}"):
        llm.tokenizer.encode(text)


@pytest.mark.parametrize(
    "ids",
    [None, 5, "1", b"1", {1: 2}, {1, 2}, [1, "a"], [1.5], [None], [[1]], [True], [Unreadable()]],
)
def test_what_are_no_ids_is_not_decoded(llm: LLM, ids: Any) -> None:
    with pytest.raises(RequestError, match="to decode"):
        llm.tokenizer.decode(ids)


def test_whole_numbers_of_any_kind_are_decoded(llm: LLM) -> None:
    kinds = ([65, 66], np.array([65, 66]), torch.tensor([65, 66]), iter([65, 66]))
    assert len({llm.tokenizer.decode(ids) for ids in kinds}) == 1


@pytest.mark.parametrize("messages", ["hi", b"hi", None, 5, {"role": "user"}, [["role", "user"]]])
def test_what_is_no_chat_is_refused(llm: LLM, messages: Any) -> None:
    for use in (llm.chat, llm.chat_tokens):
        with pytest.raises(RequestError, match=r"chat .*found"):
            use(messages)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        5,
        "x",
        "",
        b"",
        {GREEDY},
        [5],
        [None],
        [{"temperature": 0}],
        SamplingParams,
    ],
)
def test_what_are_no_sampling_parameters_is_refused(llm: LLM, params: Any) -> None:
    chat = [{"role": "user", "content": "x"}]
    for use in (
        lambda: llm.generate("x", params),
        lambda: llm.stream("x", params),
        lambda: llm.chat(chat, params),
    ):
        with pytest.raises(RequestError, match=r"sampling parameters .*expected a SamplingParams"):
            use()


def test_as_many_parameters_as_prompts(llm: LLM) -> None:
    for several in ([GREEDY, GREEDY], (GREEDY, GREEDY), deque([GREEDY, GREEDY])):
        assert len(llm.generate(["a", "b"], several)) == 2
    with pytest.raises(RequestError, match="3 SamplingParams for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY] * 3)


@pytest.mark.parametrize("model", [None, 5, b"x", [], {}, True, object()])
def test_what_names_no_model_is_refused(model: Any) -> None:
    with pytest.raises(CheckpointError, match=r"found: .*\n  expected: a str or a pathlib.Path"):
        LLM(model)


@pytest.mark.parametrize("model", ["", "a\0b", "\ud800", "x" * 5000, "owner/\ud800"])
def test_a_name_of_nothing_is_refused(model: str) -> None:
    with pytest.raises(CheckpointError):
        LLM(model)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("strategy", None, "choose one of"),
        ("strategy", ["cpu"], "choose one of"),
        ("strategy", np.array(["cpu", "auto"]), "choose one of"),
        ("device", b"cpu", "choose one of"),
        ("cpu_activations", 8, "choose one of"),
        ("cache_slots", 1.5, "an integer of at least 1"),
        ("cache_slots", True, "an integer of at least 1"),
        ("cache_slots", 2**70, "at most"),
        ("max_fetch", 10**400, "at most"),
        ("max_fetch", "2", "an integer of at least 0"),
        ("threads", [2], "an integer of at least 1"),
        pytest.param("threads", 10**5000, "at most", id="threads-too long to print"),
        ("kv_tokens", 2**63, "at most"),
        ("kv_tokens", 31, "an integer of at least 32"),
        ("gpu_memory_fraction", 10**400, "above 0 and at most 1"),
        ("gpu_memory_fraction", float("nan"), "above 0 and at most 1"),
        ("gpu_memory_fraction", "0.5", "above 0 and at most 1"),
    ],
)
def test_options_of_the_wrong_kind_or_size(name: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        EngineConfig(**{name: value})
    message = str(caught.value)
    assert name in message and type(value).__name__ in message and len(message) < 400
