"""The step loop, over a model without weights."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from freetoken.engine import Completion, Engine, EngineLimits, Generation
from freetoken.errors import CapacityError, FreeTokenError, RequestError
from freetoken.models.batch import Phase
from freetoken.scheduler import SamplingParams
from support.fake_model import (
    EOS,
    VOCAB,
    FakeModel,
    LetterTokenizer,
    count_up,
    letter,
    mixed,
    new_cache,
)

GREEDY = SamplingParams(temperature=0, max_tokens=5)


def make(
    model: FakeModel | None = None,
    *,
    pages: int = 64,
    context: int = 100,
    max_running: int = 8,
    budget: int = 16,
) -> Engine:
    limits = EngineLimits(VOCAB, context, max_running, budget)
    return Engine(model or FakeModel(count_up), LetterTokenizer(), new_cache(pages), limits)


def finish(engine: Engine, *generations: Generation) -> list[Completion]:
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    return [generation.completion() for generation in generations]


def complete(engine: Engine, prompt: list[int], params: SamplingParams) -> Completion:
    return finish(engine, engine.submit(prompt, params))[0]


def test_a_completion() -> None:
    engine = make()
    done = complete(engine, [1, 2, 3], GREEDY)
    assert done == Completion("EFGHI", [4, 5, 6, 7, 8], 3, 5, "length")
    assert (engine.timer.prefill_tokens, engine.timer.decode_tokens) == (3, 4)


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
def test_few_tokens(max_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    model = FakeModel(count_up)
    done = complete(make(model), [1], params)
    assert done.token_ids == [2, 3][:max_tokens] and done.finish_reason == "length"
    assert len(model.batches) == max_tokens


def test_the_end_token_stops_and_gives_no_text() -> None:
    done = complete(make(), [EOS - 2], SamplingParams(temperature=0, max_tokens=9))
    assert done == Completion(letter(EOS - 1), [EOS - 1, EOS], 1, 2, "stop")


def test_the_end_token_can_be_ignored() -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    done = complete(make(), [EOS - 2], params)
    assert done.token_ids == [EOS - 1, EOS, 0, 1] and done.finish_reason == "length"


def test_a_stop_string_over_several_tokens() -> None:
    params = SamplingParams(temperature=0, max_tokens=9, stop=("FG", "XYZ"))
    done = complete(make(), [2], params)
    assert done == Completion("DE", [3, 4, 5, 6], 1, 4, "stop")


def test_a_held_back_beginning_comes_out_at_the_end() -> None:
    params = SamplingParams(temperature=0, max_tokens=3, stop="FX")
    assert complete(make(), [2], params).text == "DEF"
    ended = SamplingParams(temperature=0, max_tokens=9, stop=letter(EOS - 1) + "x")
    assert complete(make(), [EOS - 2], ended).text == letter(EOS - 1)


def test_the_context_is_a_limit() -> None:
    done = complete(make(context=6), [1, 2, 3], SamplingParams(temperature=0, max_tokens=50))
    assert done.token_ids == [4, 5, 6] and done.finish_reason == "length"


@pytest.mark.parametrize("pages", [3, 64])
def test_no_limit_goes_to_the_end_of_context_or_cache(pages: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    done = complete(make(context=20, pages=pages), [1, 2], params)
    # Two pages of four tokens hold the prompt and six generated ones; the last is not stored.
    assert done.completion_tokens == (7 if pages == 3 else 18)


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], "no tokens"),
        ([1, VOCAB], rf"token 1 of the prompt is {VOCAB}; the model's ids are 0 to {VOCAB - 1}"),
        ([-1], "token 0 of the prompt is -1"),
        ([0] * 100, "the prompt has 100 tokens and the model's context is 100.* at most 99"),
    ],
)
def test_prompts_that_cannot_run(prompt: list[int], problem: str) -> None:
    engine = make()
    with pytest.raises(RequestError, match=problem):
        engine.submit(prompt, GREEDY)
    assert not engine.has_work


def test_more_than_the_cache_holds_is_refused() -> None:
    with pytest.raises(CapacityError, match="lower max_tokens"):
        make(pages=3).submit([1] * 5, SamplingParams(max_tokens=50))


PROMPTS = [[1, 2, 3], [4], list(range(30)), [9, 9], [5] * 17, [7, 8, 9, 10, 11]]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3, temperature=3, max_tokens=12)])
@pytest.mark.parametrize("budget", [3, 16, 1000])
@pytest.mark.parametrize("max_running", [1, 3, 8])
@pytest.mark.parametrize("pages", [13, 64])
def test_a_batch_gives_each_what_it_gets_alone(
    params: SamplingParams, budget: int, max_running: int, pages: int
) -> None:
    alone = [complete(make(FakeModel(mixed)), prompt, params) for prompt in PROMPTS]
    engine = make(FakeModel(mixed), budget=budget, max_running=max_running, pages=pages)
    together = finish(engine, *[engine.submit(prompt, params) for prompt in PROMPTS])
    assert together == alone


def test_requests_decode_together() -> None:
    model = FakeModel(count_up)
    engine = make(model)
    finish(engine, *[engine.submit([i, i], GREEDY) for i in range(3)])
    assert model.batches == [(Phase.PREFILL, 6, 3)] + [(Phase.DECODE, 3, 3)] * 4


def test_seeded_requests_repeat_and_unseeded_ones_differ() -> None:
    seeded = SamplingParams(temperature=50, seed=11, max_tokens=20, ignore_eos=True)
    assert complete(make(), [1], seeded) == complete(make(), [1], seeded)
    free = SamplingParams(temperature=50, max_tokens=20, ignore_eos=True)
    assert complete(make(), [1], free).token_ids != complete(make(), [1], free).token_ids


def test_text_comes_piece_by_piece() -> None:
    engine = make()
    generation = engine.submit([1], GREEDY)
    pieces = []
    while generation.request.is_live:
        engine.step()
        pieces.append(generation.take_new_text())
    assert pieces == ["C", "D", "E", "F", "G"] and generation.take_new_text() == ""


def test_cancelling_frees_pages_and_leaves_the_others() -> None:
    engine = make()
    first, second = engine.submit([1], GREEDY), engine.submit([10], GREEDY)
    engine.step()
    engine.cancel(first)
    engine.check_integrity()
    assert finish(engine, second)[0].token_ids == [11, 12, 13, 14, 15]
    with pytest.raises(FreeTokenError, match="dropped, not finished"):
        first.completion()
    engine.cancel(second)
    assert second.completion().completion_tokens == 5


def test_cancelling_within_a_step_waits_for_its_end() -> None:
    model = FakeModel(count_up)
    engine = make(model)
    first, second = engine.submit([1], GREEDY), engine.submit([10], GREEDY)
    model.before_forward = lambda step: engine.cancel(first)
    engine.step()
    assert not first.request.is_live
    assert finish(engine, second)[0].completion_tokens == 5


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
def test_a_failed_step_drops_everything_and_the_engine_goes_on(error: type[BaseException]) -> None:
    model = FakeModel(count_up)
    engine = make(model)
    lost = [engine.submit([1], GREEDY), engine.submit([2], GREEDY)]
    engine.step()

    def fail(step: int) -> None:
        raise error

    model.before_forward = fail
    with pytest.raises(error):
        engine.step()
    engine.check_integrity()
    assert not engine.has_work and not any(one.request.is_live for one in lost)
    model.before_forward = lambda step: None
    assert complete(engine, [1], GREEDY).completion_tokens == 5


def test_ctrl_c_takes_effect_after_the_step() -> None:
    model = FakeModel(count_up)
    engine = make(model)
    generation = engine.submit([1], GREEDY)
    model.before_forward = lambda step: os.kill(os.getpid(), signal.SIGINT)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert signal.getsignal(signal.SIGINT) is before
    assert generation.request.is_live and generation.take_new_text() == "C"


def test_nan_logits_are_an_error_not_text() -> None:
    model = FakeModel(count_up)
    engine = make(model)
    generation = engine.submit([1], GREEDY)
    model.poison = True
    with pytest.raises(FreeTokenError, match="NaN or infinite"):
        engine.step()
    engine.check_integrity()
    assert generation.take_new_text() == "" and not engine.has_work


def test_scores_of_both_paths_agree_and_hold_no_pages() -> None:
    model = FakeModel(mixed)
    engine = make(model)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    prefill, decode = engine.score(tokens, Phase.PREFILL), engine.score(tokens, Phase.DECODE)
    assert prefill.shape == (9, VOCAB) and torch.equal(prefill, decode)
    assert prefill.argmax(dim=-1).tolist() == [mixed(tokens[: i + 1]) for i in range(9)]
    assert model.batches == [(Phase.PREFILL, 9, 1)] + [(Phase.DECODE, 1, 1)] * 9
    engine.check_integrity()


def test_scores_may_use_the_whole_context_and_no_more() -> None:
    engine = make(context=8)
    assert engine.score([1] * 8, Phase.PREFILL).shape == (8, VOCAB)
    with pytest.raises(RequestError, match="at most 8"):
        engine.score([1] * 9, Phase.PREFILL)


def test_scores_beside_a_running_request() -> None:
    engine = make(pages=4)
    generation = engine.submit([1], GREEDY)
    engine.step()
    assert engine.score([1, 2], Phase.PREFILL).shape == (2, VOCAB)
    with pytest.raises(CapacityError, match="need 2 key-value pages and 1 are free"):
        engine.score([1] * 5, Phase.PREFILL)
    assert finish(engine, generation)[0].token_ids == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_ctrl_c_anywhere_in_scoring_leaves_no_pages(
    phase: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FakeModel(count_up)
    engine = make(model)
    allocate = engine._allocator.allocate

    def interrupted_allocate(count: int) -> list[int]:
        pages = allocate(count)
        os.kill(os.getpid(), signal.SIGINT)
        return pages

    monkeypatch.setattr(engine._allocator, "allocate", interrupted_allocate)
    with pytest.raises(KeyboardInterrupt):
        engine.score([1, 2, 3, 4, 5], phase)
    engine.check_integrity()
    assert len(model.batches) == 1


@pytest.mark.parametrize("extra", [1, 2, 9])
def test_a_prompt_beyond_the_cache_is_refused_without_a_token_limit_too(extra: int) -> None:
    engine = make(pages=3)  # two pages of four tokens
    params = SamplingParams(temperature=0, max_tokens=None)
    with pytest.raises(CapacityError, match=rf"need {8 + extra} tokens .* up to 1 generated.* 8 f"):
        engine.submit([1] * (8 + extra), params)
    assert complete(engine, [1] * 8, params).token_ids == [2]
