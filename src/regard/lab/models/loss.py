"""The training loss: cross-entropy with label smoothing, over the target tokens that are not padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.base.errors import RegardError


@dataclass(frozen=True, eq=False)
class Loss:
    """Losses summed over target tokens: sums of batches and processes can be added, and divided once at the end.

    Args:
        smoothed: The sum of the training loss, a scalar with a gradient.
        nll: The sum of -log p(y), without smoothing and without a gradient; its mean is log perplexity.
        num_tokens: The number of target tokens.
    """

    smoothed: Tensor
    nll: Tensor
    num_tokens: int


def smoothed_cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Sum over rows of  lse(z) - (1 - eps) z_y - eps mean(z), and the same with eps = 0 (detached).

    The cross-entropy with a target distribution of eps / V for every word, and 1 - eps more for y (Szegedy et al.
    2016, arXiv:1512.00567, section 7). `F.cross_entropy(label_smoothing=eps, reduction="sum")` gives the same number.
    The softmax is computed once. The backward pass turns it into the gradient in place, so it can run only once.
    fairseq gives each other word eps / (V - 1); torch, later versions of JoeyNMT and this function give eps / V.

    Args:
        logits: (N, V).
        targets: (N,), ids below V.
        smoothing: eps, at least 0 and below 1.

    >>> import torch
    >>> total, nll = smoothed_cross_entropy(torch.zeros(3, 4), torch.tensor([0, 1, 2]), smoothing=0.1)
    >>> round(total.item(), 4), round(nll.item(), 4)  # 3 log 4
    (4.1589, 4.1589)
    """
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise RegardError(
            f"smoothed_cross_entropy: logits {tuple(logits.shape)} and targets {tuple(targets.shape)} do not fit; "
            "they must be (N, V) and (N,). Flatten both first."
        )
    if not 0 <= smoothing < 1:
        raise RegardError(f"smoothed_cross_entropy: smoothing must be at least 0 and below 1, not {smoothing}.")
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    return cast(tuple[Tensor, Tensor], _Smoothed.apply(wide, targets, smoothing))


def translation_loss(model: Any, source: Tensor, target: Tensor, smoothing: float = 0.0, pad: int = 0) -> Loss:
    """The loss of a `Translator` on a batch; only rows that are not padding are projected to the vocabulary.

    Args:
        model: Anything with `model(source, target_input)` -> hidden (B, T, C) and `model.logits(hidden)`.
        source: (B, S) ids.
        target: (B, T + 1) ids, `[BOS, y, EOS, PAD...]`.
        smoothing: eps of the label smoothing.
        pad: The id of padding.
    """
    expected = target[:, 1:].flatten()
    real = (expected != pad).nonzero().flatten()
    hidden = model(source, target[:, :-1]).flatten(0, 1)
    total, nll = smoothed_cross_entropy(model.logits(hidden[real]), expected[real], smoothing)
    return Loss(total, nll, len(real))


class _Smoothed(torch.autograd.Function):
    """The two sums of `smoothed_cross_entropy`; only the first one has a gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        """As `smoothed_cross_entropy`, for logits in float32 or float64."""
        chosen = logits.gather(1, targets[:, None])[:, 0]
        share = torch.softmax(logits, 1)
        # the logsumexp from the greatest probability (at least 1 / V) saves a second exponential of N x V numbers
        lse = logits.amax(1) - share.amax(1).log()
        ctx.save_for_backward(share, targets)
        ctx.smoothing = smoothing
        nll = (lse - chosen).sum()
        total = nll if not smoothing else nll + smoothing * (chosen - logits.mean(1)).sum()
        # a clone, because without smoothing `total` is the same tensor, which has a gradient
        ctx.mark_non_differentiable(nll := nll.clone())
        return total, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # d total / d z = softmax(z) - eps / V - (1 - eps) [the target], written over the saved softmax
        share, targets = ctx.saved_tensors
        eps, outer = ctx.smoothing, gradients[0]
        if eps:
            share.sub_(eps / share.shape[1])
        share.scatter_add_(1, targets[:, None], share.new_full((len(targets), 1), eps - 1))
        return share.mul_(outer), None, None
