"""`seconds`: the clock of training budgets and decoding speeds."""

from __future__ import annotations

import time

import torch


def seconds(device: torch.device) -> float:
    """Processor time of this thread on a CPU, so that other programs do not count; wall-clock time on other devices."""
    return time.thread_time() if device.type == "cpu" else time.perf_counter()
