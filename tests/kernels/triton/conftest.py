"""On a GPU if there is one, else in Triton's interpreter (which tests/conftest.py chooses)."""

import pytest
import torch

if not torch.cuda.is_available():
    from support.interpreter import patch_once_per_launch

    patch_once_per_launch()


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
