"""Rows of weights with gradients, and their logarithms where log(weights) would lose those of weights near 0."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.pieces.normalizer import LearnedSink, Normalizer, Sigmoid, Softmax, subtracted


def rows_with_logs(normalizer: Normalizer, scores: Tensor, columns: Tensor) -> tuple[Tensor, Tensor | None]:
    """Weights of whole rows from masked scores (B, H, I, J), and their logarithms; None: log(weights) is as precise.

    >>> rows_with_logs(Softmax(), torch.tensor([[[[0.0, 200.0]]]]), torch.arange(2))
    (tensor([[[[0., 1.]]]]), tensor([[[[-200.,    0.]]]]))
    """
    if scores.shape[-1] == 0:  # a query before the first whole group of keys
        return scores, None
    if type(normalizer) is Softmax and normalizer.sink is None:
        return normalizer.normalize_rows(scores, columns)[0], _log_softmax(normalizer.tempered(scores))
    if type(normalizer) is Softmax or type(normalizer) is LearnedSink:
        logs = normalizer.tempered(scores) if isinstance(normalizer, Softmax) else scores
        for number in subtracted(normalizer.row_statistic(scores, columns)):
            logs = logs - number
        return logs.exp(), logs
    if type(normalizer) is Sigmoid:
        shifted = scores - normalizer.row_statistic(scores, columns)[0].unsqueeze(-1)
        return torch.sigmoid(shifted), nn.functional.logsigmoid(shifted)
    return normalizer.normalize_rows(scores, columns)[0], None


def _log_softmax(scores: Tensor) -> Tensor:
    empty = scores.detach().amax(-1, keepdim=True).isneginf()
    return torch.log_softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, -torch.inf)
