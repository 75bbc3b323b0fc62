"""Threads that share a model each get what they would get alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from freetoken import LLM, SamplingParams
from support.tiny_models import make_model, save_hf, tiny_config


def test_threads_share_a_model(tmp_path: Path) -> None:
    path = save_hf(
        make_model(tiny_config("mixtral", vocab_size=300)), tmp_path / "m", tokenizer=True
    )
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [[3 * i + 1, 7, i + 2] for i in range(6)]
    with LLM(path, strategy="hybrid", cache_slots=2, max_fetch=1) as llm:
        alone = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
        with ThreadPoolExecutor(3) as pool:
            for _ in range(3):
                together = pool.map(lambda prompt: llm.generate([prompt], params)[0], prompts)
                assert [completion.token_ids for completion in together] == alone
        llm._model.engine.check_integrity()
