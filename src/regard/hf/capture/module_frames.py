"""`ModuleFrame` and `ThreadState`: the modules of a watched model that run at a moment, and what they did so far."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from regard.hf.capture.softmax_trace import Trace
from regard.hf.capture.torch_calls import ObservedCall


@dataclass(eq=False)
class ModuleFrame:
    """An attention module or encoder layer that runs: its path, the calls of its attention so far, inputs, softmaxes.

    The path is None for an encoder layer that is no attention module itself. `random` is the state of the random
    numbers at its start, if the module may have to run again to measure its weights. `halves` are the backend calls of
    differential attention. `is_edited`: an edit ran its attention, and reported it.
    """

    module: nn.Module
    name: str | None
    num_calls: int
    inputs: tuple[Any, Any] | None = None
    random: Tensor | None = None
    output: Any = None
    trace: Trace = field(default_factory=Trace)
    halves: list[ObservedCall] = field(default_factory=list)
    is_edited: bool = False


@dataclass(eq=False)
class ReturnedWeights:
    """A module that ended and returned its weights: the `caller` multiplies values by them, or nobody does."""

    frame: ModuleFrame
    caller: nn.Module


class ThreadState(threading.local):
    """What runs in one thread: modules of the model, a frame for each of them that attends, and calls by path.

    A watch has several threads if they were given its context.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.frames: list[ModuleFrame] = []
        self.returned: list[ReturnedWeights] = []
        self.num_calls: Counter[str] = Counter()
