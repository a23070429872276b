"""The clock that budgets and speeds are told by."""

from __future__ import annotations

import time

import torch


def seconds(device: torch.device) -> float:
    """On a CPU this thread's own processor time, so that other work there costs nothing; elsewhere time as it goes."""
    return time.thread_time() if device.type == "cpu" else time.perf_counter()
