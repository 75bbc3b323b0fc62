"""The committed stub of the extension module says what the module says."""

from __future__ import annotations

from pathlib import Path

import nanobind.stubgen

import freetoken
from freetoken import _native


def test_stub_is_current() -> None:
    generator = nanobind.stubgen.StubGen(module=_native)
    generator.put(_native)
    stub = Path(str(freetoken.__file__)).with_name("_native.pyi")
    assert stub.read_text() == generator.get(), (
        "run `make stub` and commit python/freetoken/_native.pyi"
    )
