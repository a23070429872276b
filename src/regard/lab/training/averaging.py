"""`Averaging`: the moving average of the weights; validation and translation use it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard.base.errors import RegardError
from regard.lab.models.sharding import own_rows, sharded_like


class Averaging:
    """a_t = sum_s d^(t-s) w_s / sum_s d^(t-s) over the steps s = 1..t: the average of weights with decay d.

    The exponential moving average (Polyak & Juditsky 1992 average all steps alike; Adam's paper, arXiv:1412.6980
    section 3, has the correction), divided by its total weight, so it starts at the weights of the first step and not
    at random weights. The update is  a += (1 - d) / (1 - d^t) (w - a), one pass over memory in one call.

    Args:
        model: Its parameters are averaged; buffers are not.
        decay: d, at least 0 and below 1. With 0 the average is the weights of the last step.

    >>> import torch
    >>> line = torch.nn.Linear(1, 1, bias=False)
    >>> average = Averaging(line, decay=0.5)
    >>> for weight in (4.0, 1.0):
    ...     _ = torch.nn.init.constant_(line.weight, weight)
    ...     average.add()
    >>> average.weights["weight"].item()  # (0.5 * 4 + 1) / 1.5
    2.0
    """

    def __init__(self, model: nn.Module, decay: float = 0.995) -> None:
        if not 0 <= decay < 1:
            raise RegardError(f"Averaging: decay must be at least 0 and below 1, not {decay}.")
        self.model, self.decay = model, decay
        self.weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        self.num_steps = 0

    @torch.no_grad()
    def add(self) -> None:
        """Add the weights after one more step."""
        self.num_steps += 1
        share = (1 - self.decay) / (1 - self.decay**self.num_steps)
        weights = [own_rows(weight.detach()) for weight in self.model.parameters()]
        averages = [own_rows(average) for average in self.weights.values()]
        torch._foreach_lerp_(averages, weights, share)  # pyright: ignore[reportPrivateImportUsage]

    @contextmanager
    @torch.no_grad()
    def swapped_in(self) -> Iterator[None]:
        """Inside, the model has the average weights; afterwards it has its former weights, equal in every bit."""
        parameters = dict(self.model.named_parameters())
        former = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        try:
            self._put(parameters, self.weights)
            yield
        finally:
            self._put(parameters, former)

    @staticmethod
    def _put(parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Copy weights into the parameters of the same names."""
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])

    def load(self, weights: Mapping[str, Tensor], num_steps: int) -> None:
        """Restore saved averages."""
        for name, average in self.weights.items():
            average.copy_(sharded_like(average, weights[name]))
        self.num_steps = num_steps
