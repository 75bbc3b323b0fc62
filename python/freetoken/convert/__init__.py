"""Any checkpoint that can be read to a GGUF file, with the experts in a chosen format."""

from __future__ import annotations

from freetoken.convert.convert import Conversion, convert
from freetoken.convert.quantizers import QUANTIZABLE

__all__ = ["QUANTIZABLE", "Conversion", "convert"]
