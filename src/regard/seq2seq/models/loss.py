"""The training loss: cross-entropy with label smoothing, over the target tokens that are not padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.errors import RegardError


@dataclass(frozen=True, eq=False)
class Loss:
    """Sums over target tokens, so that batches, processes and machines add up before anything is divided.

    Args:
        smoothed: The sum that is trained on, a scalar with a gradient.
        surprise: The sum of -log p(y), without smoothing and without a gradient; its mean is log perplexity.
        num_tokens: The tokens both are over.
    """

    smoothed: Tensor
    surprise: Tensor
    num_tokens: int


def smoothed_cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Sum over rows of  lse(z) - (1 - eps) z_y - eps mean(z), and the same with eps = 0 (detached).

    The cross-entropy with a target that has 1 - eps more on y than the eps / V it has everywhere (Szegedy et al.
    2016, arXiv:1512.00567, section 7); `F.cross_entropy(label_smoothing=eps, reduction="sum")` is the same number.
    The softmax is computed once and becomes the gradient in place, so a second backward pass is an error.
    fairseq divides eps by V - 1 for the other words; torch, JoeyNMT's later versions and this function by V.

    Args:
        logits: (N, V).
        targets: (N,), ids below V.
        smoothing: eps, at least 0 and below 1.

    >>> import torch
    >>> total, surprise = smoothed_cross_entropy(torch.zeros(3, 4), torch.tensor([0, 1, 2]), smoothing=0.1)
    >>> round(total.item(), 4), round(surprise.item(), 4)  # 3 log 4
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
    """The loss of a `Translator` on a batch: only rows of tokens that are not padding are projected to the words.

    Args:
        model: Anything with `model(source, target_input)` -> hidden (B, T, C) and `model.logits(hidden)`.
        source: (B, S) ids.
        target: (B, T + 1) ids, `[BOS, y, EOS, PAD...]`.
        smoothing: Of the labels.
        pad: The id of padding.
    """
    expected = target[:, 1:].flatten()
    real = (expected != pad).nonzero().flatten()
    hidden = model(source, target[:, :-1]).flatten(0, 1)
    total, surprise = smoothed_cross_entropy(model.logits(hidden[real]), expected[real], smoothing)
    return Loss(total, surprise, len(real))


class _Smoothed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        chosen = logits.gather(1, targets[:, None])[:, 0]
        share = torch.softmax(logits, 1)
        # lse from the greatest probability, which is at least 1 / V: no second exponential of N x V
        lse = logits.amax(1) - share.amax(1).log()
        ctx.save_for_backward(share, targets)
        ctx.smoothing = smoothing
        surprise = (lse - chosen).sum()
        total = surprise if not smoothing else surprise + smoothing * (chosen - logits.mean(1)).sum()
        ctx.mark_non_differentiable(surprise := surprise.clone())
        return total, surprise

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        share, targets = ctx.saved_tensors
        eps, outer = ctx.smoothing, gradients[0]
        if eps:
            share.sub_(eps / share.shape[1])
        share.scatter_add_(1, targets[:, None], share.new_full((len(targets), 1), eps - 1))
        return share.mul_(outer), None, None
