"""Normalizers: how a row of scores becomes a row of weights.

A normalizer has two parts: a small `row_statistic` r_i of the whole row, and `weights` of any part of that row,
computed from its scores and the statistic: w_ij = f(s_ij, r_i). So `AttentionOutput.weights` can compute any weight on
demand from (q, k, r). A masked score is -inf and its weight is exactly 0. In an empty row, where the query may attend
to no key, all weights are 0: not NaN, and not a uniform average.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.checks import Number, Size, checked
from regard.base.errors import RegardError
from regard.base.shapes import Sizes, has_numbers, known_none, without_zeros
from regard.pieces.grid import at
from regard.pieces.piece import Piece, set_promises

RowStatistic = tuple[Tensor, ...]

#: A greater log-sum-exp is coarse: it rounds by more than 1024 half units in the last place of 1 (6e-5 in float32).
COARSE = 1024.0
#: The `cost` of a weight whose row is sorted.
SORTING = 40.0


class Normalizer(Piece):
    """Base of all normalizers.

    `row_sum` is the sum of the weights of a row that is not empty; None if it varies. `independent`: each key has its
    weight by itself, so a row may sum to more than 1. `is_signed`: weights may be negative. `masked_score` replaces
    masked scores. `needs_nonnegative` refuses a score piece whose scores may be below 0. `is_relative`: weights are
    functions of s_ij - r_i, r_i the first number of the statistic, so they lose digits if both are large. `is_linear`:
    w_ij = s_ij, divided by the sum of the row if `row_sum` is 1, so sums over keys suffice. `cost`: the time of one
    weight in units of one exponential, for predicted seconds.

    Row statistics may be a monoid: a row is computed in parts, each with some of its keys, as a ring and long maps do.
    `of_part` is the normalizer of a part, `merge` combines the statistics of two parts, and `empty_statistic` is the
    neutral element. `finish` turns the statistic of all keys into that of the row. `share` is the factor from weights
    within a part to weights within the row. Such a normalizer sets `merge_refusal` to None. The default methods are
    right if a weight depends on its own score only.

    A subclass of another normalizer with a `row_statistic` or `weights` of its own inherits none of these facts about
    its weights: it says `row_sum`, `is_linear` and `merge_refusal` again. It may not override `normalize_rows` alone,
    which computes both at once for whole rows.

    >>> import torch, regard as rg
    >>> scores, columns = torch.zeros(1, 1, 1, 4), torch.arange(4)
    >>> row_statistic = rg.normalizers.Softmax().row_statistic(scores, columns)  # of the whole row
    >>> rg.normalizers.Softmax().weights(scores[..., :2], row_statistic, columns[:2])  # of any part
    tensor([[[[0.2500, 0.2500]]]])
    """

    row_sum: float | None = 1.0
    independent: bool = False
    is_signed: bool = False
    masked_score: float = -torch.inf
    needs_nonnegative: bool = False
    is_relative: bool = False
    is_linear: bool = False
    cost: float = 4.0
    #: The reason why a row cannot be computed in parts; None if it can. Completes a sentence about the weights.
    merge_refusal: str | None = (
        "need all scores of a row at once (for a threshold, or for the keys that are kept), and the row statistics of "
        "parts do not give that of the whole row, as they do for softmax"
    )

    @property
    def has_shares(self) -> bool:
        """Whether weights are shares of the row: not negative, with the sum 1; a sink has the rest."""
        return self.row_sum == 1.0 and not self.is_signed

    @abstractmethod
    def row_statistic(self, scores: Tensor, columns: Tensor) -> RowStatistic:
        """The statistic of whole rows: masked scores (B, H, I, J) and key indices (J,) -> tensors (B, H, I, ...).

        J is at least 1: a call without keys does not compute it.
        """

    @abstractmethod
    def weights(self, scores: Tensor, row_statistic: RowStatistic, columns: Tensor) -> Tensor:
        """The weights of any part of the rows: scores (B, H, I, J') -> (B, H, I, J')."""

    def restated(self, scores: Tensor, row_statistic: RowStatistic, columns: Tensor) -> RowStatistic:
        """The statistic of rows whose scores were computed again, and rounded to other numbers."""
        return self.row_statistic(scores, columns)

    def of_part(self) -> Normalizer:
        """The normalizer of a part of a row: without a sink, which belongs to the whole row."""
        return self

    def merge(self, left: RowStatistic, right: RowStatistic) -> RowStatistic:
        """The statistic of two parts together, from the statistic of each. Associative."""
        return right

    def finish(self, row_statistic: RowStatistic) -> RowStatistic:
        """The statistic of whole rows, from the merged statistic of all their keys: adds a sink."""
        return row_statistic

    def share(self, part: RowStatistic, whole: RowStatistic) -> Tensor:
        """The factor (B, H, I) from weights within a part to weights within the row."""
        return torch.ones_like(whole[0])

    def empty_statistic(self, like: Tensor) -> RowStatistic:
        """The neutral element of `merge`: the statistic of rows without keys, (B, H, I) and dtype as in `like`."""
        masked = torch.full_like(like, self.masked_score).unsqueeze(-1)
        return self.row_statistic(masked, torch.zeros(1, dtype=torch.int64, device=like.device))

    @property
    def as_softmax(self) -> LogSumExpNormalizer | None:
        """The equal softmax, which fused kernels can run; None if this normalizer is no softmax."""
        return None

    def log_weights(self, scores: Tensor, row_statistic: RowStatistic) -> Tensor | None:
        """The logarithms of the weights if they are cheaper than log(weights), else None. May overwrite the scores."""
        return None

    def normalize_rows(self, scores: Tensor, columns: Tensor) -> tuple[Tensor, RowStatistic]:
        """Weights of whole rows, with gradients, and the statistic."""
        row_statistic = self.row_statistic(scores, columns)
        return self.weights(scores, row_statistic, columns), row_statistic

    def tile_weights(
        self, scores: Tensor, row_statistic: RowStatistic, columns: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Weights of any part of the rows, and their logarithms if these are cheap. May overwrite the scores."""
        logs = self.log_weights(scores, row_statistic)
        return (logs.exp(), logs) if logs is not None else (self.weights(scores, row_statistic, columns), None)

    def normalize_with_logs(self, scores: Tensor, columns: Tensor) -> tuple[Tensor, Tensor | None, RowStatistic]:
        """Weights of whole rows, their logarithms if these are cheap, and the statistic."""
        row_statistic = self.row_statistic(scores, columns)
        return *self.tile_weights(scores, row_statistic, columns), row_statistic

    def rows_with_logs(self, scores: Tensor, columns: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weights of whole rows, with gradients, and their logarithms; None if log(weights) is as precise.

        >>> import torch, regard as rg
        >>> rg.normalizers.Softmax().rows_with_logs(torch.tensor([[[[0.0, 200.0]]]]), torch.arange(2))
        (tensor([[[[0., 1.]]]]), tensor([[[[-200.,    0.]]]]))
        """
        return self.normalize_rows(scores, columns)[0], None

    def of_heads(self, head: Tensor) -> Normalizer:
        """The normalizer of some query heads (indices)."""
        return self

    def check(self, sizes: Sizes) -> None:
        """Refuse sizes that do not fit the normalizer."""


#: The methods that say what a normalizer computes.
RULES = ("row_statistic", "weights", "tempered", "finish")
#: Methods for whole rows or tiles. Engines and maps that need another part of a row read the rules.
SHORTCUTS = ("log_weights", "tile_weights", "normalize_rows", "normalize_with_logs", "rows_with_logs")
set_promises(
    Normalizer,
    rules={*RULES},
    promises={"has_shares", "is_linear", "merge_refusal", "as_softmax", "restated", *SHORTCUTS},
    shortcuts=SHORTCUTS,
    row_sum=None,
)


def log_sum_exp(scores: Tensor) -> RowStatistic:
    """log sum_j exp(s_ij) and its remainder, both (B, H, I); -inf for an empty row, with finite gradients there."""
    greatest = scores.detach().amax(-1, keepdim=True)
    greatest = greatest.masked_fill(greatest.isneginf(), 0.0)
    total = (scores - greatest).exp().sum(-1)
    empty = total == 0
    return sum_and_remainder(greatest.squeeze(-1), total.masked_fill(empty, 1.0).log().masked_fill(empty, -torch.inf))


def sum_and_remainder(greatest: Tensor, log_sum: Tensor) -> RowStatistic:
    """greatest + log_sum, and the remainder that the rounding of this sum loses (Dekker 1971).

    Near 1e9 the numbers of float32 are 64 apart, so the remainder may hold all of log_sum. It has no gradient.
    """
    logsumexp = greatest + log_sum
    remainder = log_sum.detach() - (logsumexp.detach() - greatest.detach())
    return logsumexp, remainder.masked_fill(~logsumexp.detach().isfinite(), 0.0)


def add_log_sums(left: RowStatistic, right: RowStatistic) -> RowStatistic:
    """log(exp(left) + exp(right)), each of the three as a log-sum-exp and its remainder."""
    greatest = _finite(torch.maximum(left[0].detach(), right[0].detach()))
    relative = (logsumexp - greatest + remainder for logsumexp, remainder in (left, right))
    return sum_and_remainder(greatest, torch.logaddexp(*relative))


def is_coarse(logsumexp: Tensor) -> Tensor:
    """Which rows need the remainder: the absolute value of their log-sum-exp is above COARSE, and finite."""
    return (logsumexp.abs() > COARSE) & logsumexp.isfinite()


def any_coarse(logsumexp: Tensor | float) -> bool:
    """Whether a row is coarse; False if the numbers of the tensor cannot be read. On a device the host waits."""
    if not isinstance(logsumexp, Tensor):
        return any_coarse(torch.as_tensor(logsumexp, device="cpu"))
    if not has_numbers(logsumexp):
        return False
    if logsumexp.device.type == "cpu" and logsumexp.numel():  # one pass suffices, if no row is empty
        least, greatest = torch.aminmax(logsumexp.detach())
        if least.item() >= -COARSE and greatest.item() <= COARSE:
            return False
    return bool(is_coarse(logsumexp).any())


def softmax_weights(scores: Tensor, row_statistic: RowStatistic) -> Tensor:
    """exp(s_ij - r_i), 0 in empty rows."""
    for number in subtracted(row_statistic):
        scores = scores - number
    return _at_most_one(scores.exp())


def subtracted(row_statistic: RowStatistic) -> Iterator[Tensor]:
    """What is subtracted from the scores: the log-sum-exp, then the remainder unless it is known to be needless."""
    logsumexp, *remainders = row_statistic
    yield _finite(logsumexp).unsqueeze(-1)
    if remainders and not known_none(is_coarse(logsumexp.detach())):
        yield remainders[0].unsqueeze(-1)


def _at_most_one(weights: Tensor) -> Tensor:
    """Bound weights by 1, in place, if no gradients are needed.

    Rounding may put a recomputed score above the statistic of its row, by up to 1 if scores are near 1e6. With
    gradients scores are not recomputed, and a bound would set gradients to 0.
    """
    return weights if torch.is_grad_enabled() else weights.clamp_(max=1.0)


def _finite(logsumexp: Tensor) -> Tensor:
    """The log-sum-exps, with 0 for an empty row in place of -inf: -inf - -inf would be NaN."""
    return logsumexp.masked_fill(logsumexp.isneginf(), 0.0)


class LogSumExpNormalizer(Normalizer):
    """Base of softmax with and without a sink: w_ij = exp(s_ij / T - r_i), where r_i is a log-sum-exp.

    So a row can be computed in parts, and fused kernels can run it. The statistic is the log-sum-exp and its rounding
    error, the remainder. Fused kernels return only the first.
    """

    is_relative = True
    has_shares = True  # type: ignore[assignment]
    merge_refusal = None  # type: ignore[assignment]
    temperature: float = 1.0
    sink: float | Tensor | None

    @property
    def as_softmax(self) -> LogSumExpNormalizer:
        return self

    def of_part(self) -> LogSumExpNormalizer:
        return self if self.sink is None else Softmax(self.temperature)

    def merge(self, left: RowStatistic, right: RowStatistic) -> RowStatistic:
        return add_log_sums(left, right)

    def finish(self, row_statistic: RowStatistic) -> RowStatistic:
        return row_statistic if self.sink is None else _with_sink(row_statistic, self.sink)

    def share(self, part: RowStatistic, whole: RowStatistic) -> Tensor:
        difference = part[0] - _finite(whole[0])
        for remainder, whole_remainder in zip(part[1:], whole[1:], strict=True):
            difference = difference + (remainder - whole_remainder)
        return difference.exp()

    def row_statistic(self, scores: Tensor, columns: Tensor) -> RowStatistic:
        return self.finish(log_sum_exp(self.tempered(scores)))

    def weights(self, scores: Tensor, row_statistic: RowStatistic, columns: Tensor) -> Tensor:
        return softmax_weights(self.tempered(scores), row_statistic)

    def log_weights(self, scores: Tensor, row_statistic: RowStatistic) -> Tensor:
        logs = self.tempered(scores)
        for number in subtracted(row_statistic):
            logs.sub_(number)
        return logs.clamp_(max=0.0)

    def rows_with_logs(self, scores: Tensor, columns: Tensor) -> tuple[Tensor, Tensor | None]:
        """Both from the scores, because a weight that rounds to 0 has the logarithm -inf.

        torch's functions compute them, except with a sink, which torch does not have. Nothing is written in place,
        unlike in `log_weights`, because the results have gradients.
        """
        if self.sink is None:
            return self.normalize_rows(scores, columns)[0], _log_softmax(self.tempered(scores))
        logs = self.tempered(scores)
        for number in subtracted(self.row_statistic(scores, columns)):
            logs = logs - number
        return logs.exp(), logs

    def tempered(self, scores: Tensor) -> Tensor:
        """The scores divided by the temperature; masked ones stay -inf."""
        if isinstance(self.temperature, Tensor):
            masked = scores.isneginf()  # the gradient of -inf / temperature is NaN
            return (scores.masked_fill(masked, 0.0) / self.temperature).masked_fill(masked, -torch.inf)
        return scores if self.temperature == 1 else scores / self.temperature


def _log_softmax(scores: Tensor) -> Tensor:
    """log softmax of whole rows; -inf in an empty row, with gradients of 0."""
    empty = scores.detach().amax(-1, keepdim=True).isneginf()
    return torch.log_softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, -torch.inf)


@checked
@dataclass(frozen=True)
class Softmax(LogSumExpNormalizer):
    """w_ij = exp(s_ij / T) / sum_j exp(s_ij / T); the statistic is the log of the sum, and its rounding remainder.

    T below 1 makes the row sharper, with `Hardmax` as its limit for T = 0; T above 1 makes it flatter. A `sink` adds
    the term exp(sink) to the denominator. So a row sums to less than 1, and a head can attend to nothing (gpt-oss,
    arXiv:2508.10925; "softmax-off-by-one" is sink = 0).

    >>> import torch, regard as rg
    >>> scores, columns = torch.tensor([[[[1.0, 3.0]]]]).log(), torch.arange(2)
    >>> from regard.normalizers import Softmax
    >>> [Softmax(sink=sink).normalize_rows(scores, columns)[0] for sink in (None, 0.0)]  # a sink of 0 adds 1
    [tensor([[[[0.2500, 0.7500]]]]), tensor([[[[0.2000, 0.6000]]]])]
    """

    temperature: Number = 1.0
    sink: Number | None = None

    def __post_init__(self) -> None:
        if isinstance(self.sink, Tensor):
            raise RegardError(
                f"Softmax(sink=...): the sink is one number, got a tensor of shape {tuple(self.sink.shape)}. For a "
                "learned sink for each head use LearnedSink(num_heads); a tensor becomes a number by sink.item()."
            )
        if not self.temperature > 0:
            raise RegardError(
                f"Softmax(temperature={self.temperature}): must be above 0. The limit of temperature 0 is Hardmax()."
            )

    @property
    def row_sum(self) -> float | None:  # type: ignore[override]
        return 1.0 if self.sink is None else None

    def normalize_rows(self, scores: Tensor, columns: Tensor) -> tuple[Tensor, RowStatistic]:
        if self.sink is not None:
            return super().normalize_rows(scores, columns)
        s = self.tempered(scores)
        greatest = s.detach().amax(-1)
        empty = greatest.isneginf()
        if may_be_empty := not known_none(empty):  # softmax of -inf alone is NaN
            s = s.masked_fill(empty.unsqueeze(-1), 0.0)
        weights = torch.softmax(s, -1)
        # the greatest weight is exp(greatest - r) and at least 1 / J, so its logarithm gives r - greatest precisely
        log_sum = -weights.detach().amax(-1).log()
        if may_be_empty:
            weights = weights.masked_fill(empty.unsqueeze(-1), 0.0)
        return weights, sum_and_remainder(greatest, log_sum)

    def normalize_with_logs(self, scores: Tensor, columns: Tensor) -> tuple[Tensor, Tensor | None, RowStatistic]:
        if self.sink is not None:
            return super().normalize_with_logs(scores, columns)
        weights, row_statistic = self.normalize_rows(scores, columns)
        return weights, self.log_weights(scores, row_statistic), row_statistic


@checked
class LearnedSink(nn.Module, LogSumExpNormalizer):
    """Softmax with a learned sink for each head: sum_j w_ij = 1 - exp(sink_h) / (...) (gpt-oss, arXiv:2508.10925).

    >>> import torch, regard as rg
    >>> scores, columns = torch.tensor([[[[1.0, 3.0]]]]).log(), torch.arange(2)
    >>> sink = rg.normalizers.LearnedSink(num_heads=1)
    >>> sink.normalize_rows(scores, columns)[0].detach()  # the sink begins at 0 and takes 1 / 5
    tensor([[[[0.2000, 0.6000]]]])
    """

    row_sum = None
    sink: Tensor

    def __init__(self, num_heads: Size) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.zeros(num_heads))

    def of_heads(self, head: Tensor) -> LearnedSink:
        sinks = copy(self)
        vars(sinks)["_parameters"] = {}  # that of some heads is no parameter: its gradient goes to the parameter of all
        sinks.sink = at("LearnedSink", "heads", self.sink, 0, head)
        return sinks

    def check(self, sizes: Sizes) -> None:
        if self.sink.shape[0] != sizes.H:
            raise RegardError(
                f"LearnedSink: made for {self.sink.shape[0]} heads, the query has {sizes.H}. Create it for {sizes.H}."
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in (*RULES, *SHORTCUTS):
            raise RegardError(
                f"LearnedSink.{name} = ...: engines read the rule of the class, so a method of one instance cannot be "
                f"replaced. Define a subclass with this method: class Own(LearnedSink): def {name}(self, ...)."
            )
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        return str(self.sink.shape[0])


def _with_sink(row_statistic: RowStatistic, sink: float | Tensor) -> RowStatistic:
    """The statistic of rows with one more score, the sink: one number, or one for each head (H,).

    A fused kernel returns no remainders, so the statistic may be the log-sum-exps alone.
    """
    logsumexp = row_statistic[0]
    sink = torch.as_tensor(sink, dtype=logsumexp.dtype, device=logsumexp.device).view(1, -1, 1).expand_as(logsumexp)
    if len(row_statistic) == 1:
        return (torch.logaddexp(logsumexp, sink),)
    return add_log_sums(row_statistic, (sink, torch.zeros_like(sink)))


@dataclass(frozen=True)
class Sparsemax(Normalizer):
    """w_ij = max(s_ij - t_i, 0) with t_i such that the row sums to 1 (Martins & Astudillo 2016, arXiv:1602.02068).

    The Euclidean projection of the scores on the simplex: low scores get weight exactly 0. The statistic is the
    greatest score of the row, and t_i minus it.

    >>> import torch, regard as rg
    >>> rg.normalizers.Sparsemax().normalize_rows(torch.tensor([[[[0.0, 0.5, -1.0]]]]), torch.arange(3))[0]  # t = -0.25
    tensor([[[[0.2500, 0.7500, 0.0000]]]])
    """

    is_relative = True
    cost = SORTING

    def row_statistic(self, scores: Tensor, columns: Tensor) -> RowStatistic:
        """If the n greatest scores have weights, t = (their sum - 1) / n; n is the last that leaves score n above t."""
        greatest = _greatest(scores)
        ranked = _from_greatest(scores, greatest).sort(-1, descending=True).values
        counts = torch.arange(1, ranked.shape[-1] + 1, device=scores.device)
        sums = ranked.cumsum(-1)
        support = (1 + counts * ranked > sums).sum(-1, keepdim=True).clamp_min(1)  # 0 where a score is NaN
        threshold = (sums.gather(-1, support - 1) - 1) / support
        return greatest.squeeze(-1), threshold.squeeze(-1)

    def weights(self, scores: Tensor, row_statistic: RowStatistic, columns: Tensor) -> Tensor:
        greatest, threshold = (t.unsqueeze(-1) for t in row_statistic)
        return _at_most_one((scores - greatest - threshold).clamp_min(0))


@dataclass(frozen=True)
class Entmax15(Normalizer):
    """w_ij = max(s_ij / 2 - t_i, 0)^2 with t_i such that the row sums to 1 (Peters et al. 2019, arXiv:1905.05702).

    Halfway between softmax and sparsemax: alpha-entmax with alpha = 1.5. The statistic is the greatest score of the
    row, and t_i minus half of it.

    >>> import torch, regard as rg
    >>> rg.normalizers.Entmax15().normalize_rows(torch.tensor([[[[0.0, 0.4, -2.0]]]]), torch.arange(3))[0]  # t = -0.6
    tensor([[[[0.3600, 0.6400, 0.0000]]]])
    """

    is_relative = True
    cost = SORTING

    def row_statistic(self, scores: Tensor, columns: Tensor) -> RowStatistic:
        """If the n greatest halves h have weights, sum (h - t)^2 = 1, so t = mean - sqrt(1 / n - variance)."""
        greatest = _greatest(scores)
        ranked = _from_greatest(scores, greatest).sort(-1, descending=True).values / 2
        counts = torch.arange(1, ranked.shape[-1] + 1, device=scores.device)
        mean, square = ranked.cumsum(-1) / counts, ranked.square().cumsum(-1) / counts
        spread = (1 - counts * (square - mean.square())) / counts
        thresholds = mean - spread.clamp_min(torch.finfo(scores.dtype).tiny).sqrt()
        support = (thresholds <= ranked).sum(-1, keepdim=True).clamp_min(1)  # 0 where a score is NaN
        return greatest.squeeze(-1), thresholds.gather(-1, support - 1).squeeze(-1)

    def weights(self, scores: Tensor, row_statistic: RowStatistic, columns: Tensor) -> Tensor:
        greatest, threshold = (t.unsqueeze(-1) for t in row_statistic)
        return _at_most_one(((scores - greatest) / 2 - threshold).clamp_min(0).square())


def _greatest(scores: Tensor) -> Tensor:
    """The greatest score of each row, 0 for an empty row. Thresholds are relative to it, to lose no digits."""
    greatest = scores.detach().amax(-1, keepdim=True)
    return greatest.masked_fill(greatest.isneginf(), 0.0)


def _from_greatest(scores: Tensor, greatest: Tensor) -> Tensor:
    """Scores minus the greatest; -inf becomes a number below any threshold, so that sums stay finite."""
    return (scores - greatest).masked_fill(scores.isneginf(), -1e4)


@checked
@dataclass(frozen=True)
class TopK(Normalizer):
    """Softmax over the k highest scores of the row, 0 elsewhere (Gupta et al. 2021, arXiv:2106.06899).

    The statistic holds the indices of the kept keys. A threshold would be wrong when a tile of another shape recomputes
    a score with another last bit. A row with fewer than k allowed keys keeps them all, and -1 for each that is missing.

    >>> import torch, regard as rg
    >>> rg.normalizers.TopK(2).normalize_rows(torch.tensor([[[[1.0, 0.5, 3.0]]]]).log(), torch.arange(3))[0]
    tensor([[[[0.2500, 0.0000, 0.7500]]]])
    """

    is_relative = True
    k: Size

    def row_statistic(self, scores: Tensor, columns: Tensor) -> RowStatistic:
        top = scores.topk(min(self.k, scores.shape[-1]), dim=-1)
        indices = columns[top.indices].masked_fill(top.values.isneginf(), -1)
        return *log_sum_exp(top.values), indices

    def restated(self, scores: Tensor, row_statistic: RowStatistic, columns: Tensor) -> RowStatistic:
        """With the same keys as before: rounding must not exchange two of nearly equal scores."""
        kept = row_statistic[-1]
        return *log_sum_exp(scores.masked_fill(~_kept(kept, columns), -torch.inf)), kept

    def weights(self, scores: Tensor, row_statistic: RowStatistic, columns: Tensor) -> Tensor:
        *logsumexp, kept = row_statistic
        return softmax_weights(scores, tuple(logsumexp)) * _kept(kept, columns).to(scores.dtype)


#: In place of the index of the best key, for a row with a NaN score.
UNDEFINED = -2


@dataclass(frozen=True)
class Hardmax(Normalizer):
    """1 on the highest score of the row, 0 elsewhere: softmax at temperature 0. If scores are equal, the first wins.

    >>> import torch, regard as rg
    >>> rg.normalizers.Hardmax().normalize_rows(torch.tensor([[[[1.0, 3.0, 3.0]]]]), torch.arange(3))[0]
    tensor([[[[0., 1., 0.]]]])
    """

    def row_statistic(self, scores: Tensor, columns: Tensor) -> RowStatistic:
        best = scores.detach().max(-1, keepdim=True)
        index = columns[best.indices].masked_fill(best.values.isneginf(), -1)
        return (index.masked_fill(best.values.isnan(), UNDEFINED),)

    def weights(self, scores: Tensor, row_statistic: RowStatistic, columns: Tensor) -> Tensor:
        weights = _kept(row_statistic[0], columns).to(scores.dtype)
        return weights.masked_fill(row_statistic[0] == UNDEFINED, torch.nan)


def _kept(kept: Tensor, columns: Tensor) -> Tensor:
    """Which of the ascending `columns` (J,) are among `kept` (..., k): (..., J) boolean.

    Keys that are not among the columns set one more flag, which is dropped.
    """
    if not len(columns):
        return kept[..., :0] >= 0
    index = torch.searchsorted(columns, kept.contiguous()).clamp_max(len(columns) - 1)
    is_column = columns[index] == kept
    flags = kept.new_zeros((*kept.shape[:-1], len(columns) + 1), dtype=torch.bool)
    return flags.scatter_(-1, index.masked_fill(~is_column, len(columns)), True)[..., :-1]


@dataclass(frozen=True)
class SumNormalizer(Normalizer):
    """w_ij = s_ij / sum_j s_ij, for scores that are not negative (linear attention, arXiv:2006.16236, eq. 4).

    >>> import torch, regard as rg
    >>> rg.normalizers.SumNormalizer().normalize_rows(torch.tensor([[[[1.0, 0.0, 3.0]]]]), torch.arange(3))[0]
    tensor([[[[0.2500, 0.0000, 0.7500]]]])
    """

    masked_score = 0.0
    needs_nonnegative = True
    is_linear = True
    merge_refusal = None  # type: ignore[assignment]

    def row_statistic(self, scores: Tensor, columns: Tensor) -> RowStatistic:
        return (scores.sum(-1),)

    def merge(self, left: RowStatistic, right: RowStatistic) -> RowStatistic:
        return (left[0] + right[0],)

    def share(self, part: RowStatistic, whole: RowStatistic) -> Tensor:
        return part[0] / without_zeros(whole[0])

    def weights(self, scores: Tensor, row_statistic: RowStatistic, columns: Tensor) -> Tensor:
        return _at_most_one(self.share((scores,), (row_statistic[0].unsqueeze(-1),)))


@checked
@dataclass(frozen=True)
class Sigmoid(Normalizer):
    """w_ij = sigmoid(s_ij - r_i): no key competes with another (Ramapuram et al. 2024, arXiv:2409.04431).

    r_i = log n_i, with n_i the number of keys that query i may attend to, so a row of scores of 0 sums to almost 1. The
    paper and its code take one number for all rows, log n for n tokens: give it as `offset`. x-transformers takes 0.

    >>> import math, torch, regard as rg
    >>> scores = torch.tensor([[[[0.0, math.log(3.0)]]]])
    >>> rg.normalizers.Sigmoid().normalize_rows(scores, torch.arange(2))[0]  # 1 / 2 and 3 / 2 in place of exp(score)
    tensor([[[[0.3333, 0.6000]]]])
    >>> rg.normalizers.Sigmoid(offset=0.0).normalize_rows(scores, torch.arange(2))[0]
    tensor([[[[0.5000, 0.7500]]]])
    """

    row_sum = None
    independent = True

    offset: Number | None = None

    @property
    def merge_refusal(self) -> str | None:  # type: ignore[override]
        if self.offset is not None:
            return None
        return "need the number of keys of the whole row before the first of them; with Sigmoid(offset=...) they do not"

    def row_statistic(self, scores: Tensor, columns: Tensor) -> RowStatistic:
        if self.offset is not None:
            return (scores.new_zeros(scores.shape[:-1]) + self.offset,)
        count = (~scores.detach().isneginf()).sum(-1)
        return (count.clamp_min(1).to(scores.dtype).log(),)

    def weights(self, scores: Tensor, row_statistic: RowStatistic, columns: Tensor) -> Tensor:
        return torch.sigmoid(scores - row_statistic[0].unsqueeze(-1))

    def log_weights(self, scores: Tensor, row_statistic: RowStatistic) -> Tensor:
        return nn.functional.logsigmoid(scores - row_statistic[0].unsqueeze(-1))

    def rows_with_logs(self, scores: Tensor, columns: Tensor) -> tuple[Tensor, Tensor | None]:
        row_statistic = self.row_statistic(scores, columns)
        return self.weights(scores, row_statistic, columns), self.log_weights(scores, row_statistic)


@dataclass(frozen=True)
class Unnormalized(Normalizer):
    """w_ij = s_ij: the scores are the weights, of any sign and any sum. For convolutions, for instance.

    >>> import torch, regard as rg
    >>> rg.normalizers.Unnormalized().normalize_rows(torch.tensor([[[[2.0, -1.0]]]]), torch.arange(2))[0]
    tensor([[[[ 2., -1.]]]])
    """

    row_sum = None
    independent = True
    is_signed = True
    is_linear = True
    masked_score = 0.0
    merge_refusal = None  # type: ignore[assignment]

    def row_statistic(self, scores: Tensor, columns: Tensor) -> RowStatistic:
        return (scores.new_zeros(scores.shape[:-1]),)

    def weights(self, scores: Tensor, row_statistic: RowStatistic, columns: Tensor) -> Tensor:
        return scores
