"""What every test runs with."""

from __future__ import annotations

import signal

import torch

# A job that a shell started in the background ignores Ctrl-C, and so would the tests of it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The references are many tiny torch operations: its thread pool would take longer than the work.
torch.set_num_threads(1)
