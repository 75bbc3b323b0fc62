"""Triton's interpreter stands in for a GPU where there is none."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated
    from support.interpreter import patch_once_per_launch

    patch_once_per_launch()


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
