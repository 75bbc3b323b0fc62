"""Models as data, and the one decoder that runs them."""

from freetoken.models.batch import ForwardBatch, Phase
from freetoken.models.decoder import Decoder
from freetoken.models.loader import MakeMoe, load_decoder, read_spec
from freetoken.models.spec import AttentionSpec, DecoderSpec, DenseMlpSpec, MoeSpec, RotarySpec

__all__ = [
    "AttentionSpec",
    "Decoder",
    "DecoderSpec",
    "DenseMlpSpec",
    "ForwardBatch",
    "MakeMoe",
    "MoeSpec",
    "Phase",
    "RotarySpec",
    "load_decoder",
    "read_spec",
]
