"""`Dropout`: as torch's, but with 8 random bits per element on a CPU, which is faster."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.base.checks import checked
from regard.base.errors import RegardError

#: The largest relative change of p, and of 1 - p, by rounding.
TOLERANCE = 0.02


@checked
class Dropout(nn.Module):
    """x -> x m / (1 - p), with m = 0 with probability p, otherwise 1 (Srivastava et al. 2014), in training mode only.

    On a CPU torch draws 64 random bits per element, which takes 7 to 11 ns. Here 64 bits decide eight elements, which
    takes 1.5 ns per element. A training step of a Transformer of width 256 is 10 % shorter with it.

    p is rounded to a multiple of 1/256, and the factor uses the rounded p. If this changes p or 1 - p by more than 2 %,
    as for p below 0.01, torch's dropout runs. The random bits come from torch's generator, so its seed repeats them.

    >>> dropped = Dropout(0.25)(torch.ones(4, 1000))
    >>> sorted({round(number, 3) for number in dropped.flatten().tolist()})
    [0.0, 1.333]
    """

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise RegardError(f"Dropout({p}): the probability must be at least 0 and below 1.")
        self.p = float(p)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        dropped_bytes = round(self.p * 256)
        is_inexact = abs(dropped_bytes / 256 - self.p) > TOLERANCE * min(self.p, 1 - self.p)
        if x.device.type != "cpu" or is_inexact:
            return nn.functional.dropout(x, self.p)
        words = torch.empty(-(-x.numel() // 8), dtype=torch.int64).random_(-(2**63), None)  # 64 random bits each
        factor = words.view(torch.uint8)[: x.numel()].view(x.shape).to(x.dtype)  # a random byte per element, 0 to 255
        # bytes below `dropped_bytes` become 0, all others 1
        return x * factor.sub_(dropped_bytes - 1).clamp_(0, 1).mul_(256 / (256 - dropped_bytes))

    def extra_repr(self) -> str:
        return f"p={self.p}"
