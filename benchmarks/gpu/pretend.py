"""The pretend accelerator of the tests, for a dry run: every part runs whole, with tiny sizes and without a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parents[2] / "tests" / "tools"


def prepare() -> torch.device:
    """Register the device, and let Triton's kernels run on the CPU in its interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["REGARD_KERNEL"] = "off"
    sys.path.insert(0, str(TESTS))
    from accelerator import DEVICE
    from regard.maps import compiled_reductions, gpu_reductions

    gpu_reductions.DEVICES = {"cpu"}
    compiled_reductions.FEWEST_PAIRS = 1
    return DEVICE
