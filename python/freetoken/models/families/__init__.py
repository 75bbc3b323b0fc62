"""The architectures that can be loaded, by the name that a checkpoint gives them."""

from __future__ import annotations

from freetoken.checkpoints.base import Checkpoint
from freetoken.errors import CheckpointError, shown
from freetoken.models.families.common import Family
from freetoken.models.families.gpt_oss import GPT_OSS
from freetoken.models.families.llama import LLAMA, MISTRAL
from freetoken.models.families.mixtral import MIXTRAL
from freetoken.models.families.qwen3 import QWEN3
from freetoken.models.families.qwen3_moe import QWEN3_MOE
from freetoken.models.fields import Fields

HF_FAMILIES = {
    "gpt_oss": GPT_OSS,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
}
GGUF_FAMILIES = {"gpt-oss": GPT_OSS, "llama": LLAMA, "qwen3": QWEN3, "qwen3moe": QWEN3_MOE}


def family_of(checkpoint: Checkpoint) -> Family:
    """The family of a checkpoint. Raises CheckpointError for an architecture that is not known."""
    if checkpoint.kind == "gguf":
        key, families = "general.architecture", GGUF_FAMILIES
    else:
        key, families = "model_type", HF_FAMILIES
    name = checkpoint.metadata.get(key)
    if not isinstance(name, str) or name not in families:
        raise CheckpointError(
            "unknown model architecture",
            file=checkpoint.path,
            found=f"{key} = {shown(name)}" if key in checkpoint.metadata else f"no {key!r}",
            expected=f"{key} = one of {', '.join(families)}",
            hint="use a checkpoint of a supported architecture; "
            "adapters, encoders and vision models cannot be loaded",
        )
    is_llama = checkpoint.kind == "gguf" and name == "llama"
    if is_llama and Fields.of(checkpoint).integer("expert_count", 0, minimum=0):
        return MIXTRAL
    return families[name]


__all__ = ["GGUF_FAMILIES", "HF_FAMILIES", "Family", "family_of"]
