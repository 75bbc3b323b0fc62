"""Numbers that a file cannot hold, or that are none: refused by the tensor's name."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q

from freetoken.convert import convert
from freetoken.errors import CheckpointError
from support.conversion import GPT_OSS_ROPE, model_of
from support.tiny_gguf import write_gguf
from support.tiny_models import save_hf


def test_numbers_that_a_format_cannot_hold_are_refused_by_name(tmp_path: Path) -> None:
    model = model_of("mixtral")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = 1e6
    source = save_hf(model, tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"attn_q|q_proj") as caught:
        convert(source, tmp_path / "m.gguf", experts="F16", dense="F16")
    assert "cannot be written as F16" in str(caught.value)
    assert str(caught.value).endswith("choose BF16 or F32, which reach further")
    assert list(tmp_path.iterdir()) == [source]
    convert(source, tmp_path / "m.gguf", experts="F16", dense="BF16")


def test_numbers_that_bfloat16_rounds_to_infinity(tmp_path: Path) -> None:
    model = model_of("mixtral")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = 3.4e38
    source = save_hf(model, tmp_path / "hf")
    with pytest.raises(
        CheckpointError, match=r"to 3\.[34]\d*e\+38(.|\n)*below 3\.39618e"
    ) as caught:
        convert(source, tmp_path / "m.gguf", experts="F16", dense="BF16")
    assert str(caught.value).endswith("choose F32, which reaches further")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "place", ["self_attn.k_proj", "input_layernorm", "mlp.experts.down_proj", "mlp.gate"]
)
@pytest.mark.parametrize("experts", ["F32", "NVFP4"])
def test_no_numbers_are_refused_also_where_they_would_be_copied(
    experts: str, place: str, bad: float, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model = model_of("qwen3_moe", moe_intermediate_size=64, hidden_size=64, intermediate_size=64)
    with torch.no_grad():
        found = {n: p for n, p in model.named_parameters() if f"layers.1.{place}" in n}
        next(iter(found.values())).view(-1)[-1] = bad
    source = save_hf(model, tmp_path / "hf")
    said = "are NaN" if bad != bad else "are infinite"
    with pytest.raises(CheckpointError, match=f"found:    1 of .* numbers {said}") as caught:
        convert(source, tmp_path / "m.gguf", experts=experts)
    assert "1." in str(caught.value).splitlines()[0]
    assert list(tmp_path.iterdir()) == [source]
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


def test_scales_of_copied_blocks_are_looked_at(tmp_path: Path) -> None:
    tiny = write_gguf(
        model_of("mixtral", hidden_size=64, intermediate_size=64), tmp_path / "in.gguf",
        expert_type=Q.Q8_0,
    )  # fmt: skip
    tensor = next(
        t for t in gguf.GGUFReader(tiny.path).tensors if t.name == "blk.1.ffn_up_exps.weight"
    )
    content = bytearray(tiny.path.read_bytes())
    at = tensor.data_offset + tensor.n_bytes - 34  # the last block's scale
    content[at : at + 2] = np.array([np.nan], "<f2").tobytes()
    tiny.path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up_exps(.|\n)*32 of .* are NaN"):
        convert(tiny.path, tmp_path / "out.gguf", experts="Q8_0")


def test_biases_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    model = model_of("gpt_oss", swiglu_limit=7.0, rope_parameters=GPT_OSS_ROPE)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj_bias[2, 3] = float("nan")
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_down_exps\.bias"):
        convert(save_hf(model, tmp_path / "hf"), tmp_path / "m.gguf", experts="F32")
