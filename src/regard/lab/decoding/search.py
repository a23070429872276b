"""Greedy and beam search for every `Translator`; they use only `encode`, `start`, `step`, and `select` of the results.

All open hypotheses of all sentences are rows of one batch. Hypotheses that end leave the batch, so it shrinks. A
sentence is finished when `beam` hypotheses have ended, or when no open hypothesis can win any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.base.checks import Count, Size, checked
from regard.base.errors import RegardError
from regard.base.shapes import to_device, to_host
from regard.lab.data.vocabulary import BOS, EOS, PAD

if TYPE_CHECKING:
    from regard.lab.models.translator import Translator

NEVER = float("-inf")
#: Widest beam. Time and memory grow with the beam, and translations get worse (Stahlberg & Byrne 2019).
WIDEST = 1000
#: Greatest absolute value of the length penalty.
STEEPEST = 10.0


@dataclass(frozen=True)
class Hypothesis:
    """One translation: its tokens without BOS and EOS, and its score.

    `log_prob` is sum_t log p(y_t | y_<t, x) in nats, with the EOS where `ended`; `score` is
    log_prob / length_penalty(steps). `ended` is False if the search reached its maximum length before EOS.

    >>> from regard.lab.decoding.search import Hypothesis, length_penalty
    >>> hypothesis = Hypothesis((7, 5), score=-3.0 / length_penalty(3, alpha=1.0), log_prob=-3.0, ended=True)
    >>> hypothesis.num_steps, hypothesis.score  # -3 / (8 / 6)
    (3, -2.25)
    """

    tokens: tuple[int, ...]
    score: float
    log_prob: float
    ended: bool

    @property
    def num_steps(self) -> int:
        """Tokens that the model chose, with the EOS."""
        return len(self.tokens) + self.ended


def length_penalty(steps: Any, alpha: float) -> Any:
    """((5 + n) / 6) ** alpha of n steps, the EOS counted (Wu et al. 2016, eq. 14); 1 for alpha = 0.

    Scores are divided by it: larger alpha prefers longer translations. fairseq and transformers divide by
    n ** alpha, which lowers the scores of short translations more.

    >>> length_penalty(7, 0.5) == 2**0.5, length_penalty(1, 9.0)
    (True, 1.0)
    """
    return ((5 + steps) / 6) ** alpha


@checked
@dataclass(frozen=True)
class Search:
    """The settings of `beam_search`; calling a `Search` searches with them. `beam=1` is greedy search.

    With a beam, models trained for minutes end their translations too early. A length penalty of 1.5 was best for two
    of them on held-out pairs (docs/log.md).

    >>> import torch
    >>> from regard import lab
    >>> model = lab.build("luong_dot", source_size=9, target_size=9, width=8)
    >>> search = lab.Search(beam=2, max_length=4)
    >>> source = torch.tensor([[5, 4, 3], [6, 3, 0]])
    >>> search(model, source) == lab.beam_search(model, source, beam=2, max_length=4)
    True
    """

    beam: int = 5
    length_penalty: float = 1.5
    n_best: int = 1
    min_length: Count = 0
    max_length: Size | None = None
    no_repeat: Count = 0

    def __post_init__(self) -> None:
        exponent = self.length_penalty
        if not isinstance(exponent, int | float) or not abs(exponent) <= STEEPEST:  # false for NaN
            raise RegardError(
                f"beam_search: length_penalty must be a number from {-STEEPEST:g} to {STEEPEST:g}, got {exponent!r}."
            )
        for name, least in (("beam", 1), ("n_best", 1), ("min_length", 0), ("no_repeat", 0), ("max_length", 0)):
            given = getattr(self, name)
            if not isinstance(given, int) and not (given is None and name == "max_length"):
                raise RegardError(f"beam_search: {name} must be a whole number, got {given!r}.")
            if name == "max_length":
                continue
            if getattr(self, name) < least:
                raise RegardError(f"beam_search: {name} must be at least {least}, got {getattr(self, name)}.")
        if self.beam > WIDEST:
            raise RegardError(f"beam_search: a beam of {self.beam:,} is too wide. The most is {WIDEST:,}.")
        if self.n_best > self.beam:
            raise RegardError(
                f"beam_search: the {self.n_best} best are wanted, but a beam of {self.beam} gives at most {self.beam} "
                f"hypotheses. Set a beam of {self.n_best} or more."
            )
        if self.max_length is not None and self.max_length <= self.min_length:
            raise RegardError(
                f"beam_search: a max_length of {self.max_length} steps (the EOS is one) leaves no room for a "
                f"min_length of {self.min_length} tokens. Raise max_length above min_length."
            )

    def __call__(self, model: Translator, source: Tensor) -> list[tuple[Hypothesis, ...]]:
        return _search(model, source, self)

    def limits(self, source: Tensor) -> Tensor:
        """The greatest number of steps of every sentence, (B,); it depends only on the sentence, not on its batch."""
        lengths = (source != PAD).sum(1)
        if self.max_length is not None:
            return torch.full_like(lengths, self.max_length)
        return (2 * lengths + 10).clamp_min(self.min_length + 1)


@checked
def beam_search(
    model: Translator,
    source: Tensor,
    *,
    beam: int = 5,
    length_penalty: float = 1.5,
    n_best: int = 1,
    min_length: Count = 0,
    max_length: Size | None = None,
    no_repeat: Count = 0,
) -> list[tuple[Hypothesis, ...]]:
    """The `n_best` translations of every sentence, best first, by argmax over y of log p(y | x) / lp(y).

    `source` is (B, S) ids, padded on the right. At every step the best continuations of all open
    hypotheses of a sentence are kept. When a hypothesis ends, the beam of its sentence becomes narrower by one
    (Sutskever et al. 2014, Bahdanau et al. 2015), so `beam=1` is greedy search. A sentence is finished when `beam`
    hypotheses have ended, or when no open hypothesis can win: log p only falls, so log p / lp(max_length) is a bound.

    At least `min_length` tokens come before EOS. `max_length` counts steps with the EOS (default: twice the source
    and 10). Hypotheses that reach it without EOS rank behind all that ended. `no_repeat=n` forbids a second
    occurrence of any n-gram. PAD and BOS are never chosen. Scores are those of the model; they are not renormalized
    over the allowed tokens. Results do not depend on the batch.

    >>> import torch, regard as rg
    >>> from regard import lab
    >>> model = lab.build("luong_dot", source_size=9, target_size=9, width=8).eval()
    >>> [(best, second)] = beam_search(model, torch.tensor([[5, 4, 7, 3]]), beam=2, n_best=2, max_length=4)
    >>> best.score >= second.score, max(len(best.tokens), len(second.tokens)) <= 4
    (True, True)
    """
    return _search(model, source, Search(beam, length_penalty, n_best, min_length, max_length, no_repeat))


@checked
def greedy(
    model: Translator,
    source: Tensor,
    *,
    min_length: Count = 0,
    max_length: Size | None = None,
    no_repeat: Count = 0,
    length_penalty: float = 1.5,
) -> list[tuple[Hypothesis, ...]]:
    """The most probable token at every step, y_t = argmax p(y_t | y_<t, x); one hypothesis for each sentence.

    Equal to `beam_search` with `beam=1`, and returns the same type.

    >>> import torch
    >>> from regard import lab
    >>> model = lab.build("luong_dot", source_size=9, target_size=9, width=8)
    >>> source = torch.tensor([[5, 4, 3]])
    >>> [(one,)], [(other,)] = greedy(model, source), beam_search(model, source, beam=1)
    >>> one.tokens == other.tokens
    True
    """
    return _search(model, source, Search(1, length_penalty, 1, min_length, max_length, no_repeat))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model has no dropout and computes no gradients; afterwards every module has its former mode."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


class _Path(NamedTuple):
    """An open hypothesis, one row of the batch; `parent` is the row of the previous step that it continues.

    `sentence` is the number of its sentence in the batch. `log_prob` is the sum over its tokens, in nats.
    """

    sentence: int
    parent: int
    tokens: tuple[int, ...]
    log_prob: float


@dataclass(eq=False)
class _Sentence:
    """The search of one sentence: its `kept` hypotheses, and the score `to_beat` that others must exceed.

    `limit` is the most tokens of a hypothesis, and `room` the number of hypotheses that may still end.
    """

    search: Search
    limit: int
    room: int
    kept: list[Hypothesis] = field(default_factory=list)
    to_beat: float = NEVER

    def follow(self, before: list[_Path], continuations: list[_Path]) -> list[_Path]:
        """Keep the paths that end at this step. Return the others, or none if none of them can win any more.

        If no continuation is allowed, the paths of the previous step are kept as hypotheses without an end.
        """
        for path in () if continuations else before:
            self._keep(path.tokens, path.log_prob, False)
        going = []
        for path in continuations[: self.room]:  # best first; each EOS makes the beam narrower by 1
            if path.tokens[-1] == EOS:
                self._keep(path.tokens[:-1], path.log_prob, True)
                self.room -= 1
            elif len(path.tokens) >= self.limit:
                self._keep(path.tokens, path.log_prob, False)
            else:
                going.append(path)
        return going if any(self._can_win(path) for path in going) else []

    def best(self) -> tuple[Hypothesis, ...]:
        """The `n_best` kept hypotheses, best first; those without an end are behind all others."""
        ranked = sorted(self.kept, key=lambda h: (not h.ended, -h.score))
        return tuple(ranked[: self.search.n_best])

    def _keep(self, tokens: tuple[int, ...], log_prob: float, ended: bool) -> None:
        """Keep a hypothesis. `to_beat` becomes the score of the `n_best`-th of those that have ended."""
        score = log_prob / length_penalty(len(tokens) + ended, self.search.length_penalty)
        self.kept.append(Hypothesis(tokens, score, log_prob, ended))
        scores = sorted((h.score for h in self.kept if h.ended), reverse=True)
        if len(scores) >= self.search.n_best:
            self.to_beat = scores[self.search.n_best - 1]

    def _can_win(self, path: _Path) -> bool:
        """Whether the path can still get a score above `to_beat`.

        log p is at most 0 and only falls, so no later score is above log p / the largest penalty that is still ahead.
        """
        following, alpha = len(path.tokens) + 1, self.search.length_penalty
        ahead = max(self.limit, following) if alpha >= 0 else following
        return path.log_prob > self.to_beat * length_penalty(ahead, alpha)


def _search(model: Translator, source: Tensor, search: Search) -> list[tuple[Hypothesis, ...]]:
    """The search of `beam_search`, for all sentences together.

    `paths` are the rows of the batch, those of one sentence side by side. After each step the memory is selected anew
    from that of all sources, by the sentence of each row, and the state from that of the last step, by the parent of
    each row.
    """
    on_host = _checked(model, source)
    device, forbidden = source.device, _Forbidden(search, source.device)
    sentences = [_Sentence(search, limit, search.beam) for limit in search.limits(on_host).tolist()]
    paths = [_Path(number, number, (), 0.0) for number in range(len(sentences))]
    with evaluating(model):
        memory = encoded = model.encode(source)
        state = model.start(encoded)
        while True:
            last = torch.tensor([path.tokens[-1] if path.tokens else BOS for path in paths])
            logits, state = model.step(memory, state, to_device(last, device))
            continuations = _continuations(paths, logits, forbidden)
            going = [
                path for before, after in continuations for path in sentences[before[0].sentence].follow(before, after)
            ]
            if not going:
                return [sentence.best() for sentence in sentences]
            parents, belongs = [path.parent for path in going], [path.sentence for path in going]
            if belongs != [path.sentence for path in paths]:
                memory = encoded.select(torch.tensor(belongs))
            if parents != [*range(len(paths))]:
                state = state.select(torch.tensor(parents))
            paths = going


def _checked(model: Translator, source: Tensor) -> Tensor:
    """The source, copied once to the host; raises an error for wrong shapes, dtypes and ids."""
    if source.ndim != 2 or source.dtype != torch.int64 or not source.numel():
        raise RegardError(
            f"beam_search: source must be (batch, positions) token ids of int64 with at least one of each, "
            f"got {tuple(source.shape)} of {source.dtype}. Pad sentences on the right with {PAD}."
        )
    on_host = source.cpu()
    least, most = int(on_host.min()), int(on_host.max())
    if least < 0 or most >= model.source_size:
        raise RegardError(
            f"beam_search: source ids are {least} to {most}, but the model has ids 0 to {model.source_size - 1}. "
            "Use the tokenizer that the model was trained with."
        )
    return on_host


class _Forbidden:
    """The tokens that must not come next: PAD, BOS, an early EOS, the end of a repeated n-gram."""

    def __init__(self, search: Search, device: torch.device) -> None:
        self.search = search
        always, early = torch.tensor([PAD, BOS]), torch.tensor([PAD, BOS, EOS])
        self.always, self.early = to_device(always, device), to_device(early, device)

    def mask(self, log_probs: Tensor, paths: list[_Path]) -> Tensor:
        """Write -inf into log p (R, V) at the tokens that must not follow the paths."""
        n, t = self.search.no_repeat, len(paths[0].tokens)  # all open paths are equally long
        log_probs.index_fill_(1, self.early if t < self.search.min_length else self.always, NEVER)
        if not 0 < n <= t:
            return log_probs
        tokens = to_device(torch.tensor([path.tokens for path in paths]), log_probs.device)
        grams = tokens.unfold(1, n, 1)  # all n-grams so far, (R, t - n + 1, n)
        # the n-grams that begin with the last n - 1 tokens; their last token is forbidden
        again = (grams[..., :-1] == tokens[:, None, t - n + 1 :]).all(-1)
        penalty = torch.zeros_like(again, dtype=log_probs.dtype).masked_fill_(again, NEVER)
        return log_probs.scatter_add_(1, grams[..., -1], penalty)


def _continuations(
    paths: list[_Path], logits: Tensor, forbidden: _Forbidden
) -> Iterator[tuple[list[_Path], list[_Path]]]:
    """For each sentence: its paths, and the `beam` best continuations of all of them.

    First the K best tokens of every row are found, then among these the best of each of the A sentences (`_grid`). A
    place in the grid, `rank` x K + the place among the K tokens, says which path is continued, and by which token.
    """
    beam = forbidden.search.beam
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    values, tokens = _best(forbidden.mask(logits.log_softmax(1), paths), min(beam, logits.shape[1]))
    values += to_device(torch.tensor([path.log_prob for path in paths], dtype=values.dtype), values.device)[:, None]
    groups = [[*group] for _, group in groupby(paths, lambda path: path.sentence)]
    grid = _grid(values, [len(group) for group in groups])
    best, columns = _best(grid, min(beam, grid.shape[1]))
    row_tokens, places, log_probs = (x.tolist() for x in to_host(tokens, columns, best))
    if any(math.isnan(best_of_row[0]) for best_of_row in log_probs):  # torch sorts NaN before all numbers
        raise RegardError(
            "beam_search: the model's logits are not finite (NaN or infinity), so its training has diverged. Translate "
            "with an earlier state of it."
        )
    first, K = 0, values.shape[1]  # `first` is the row of the first path of the sentence
    for before, best_log_probs, best_places in zip(groups, log_probs, places, strict=True):
        after, sentence = [], before[0].sentence
        for log_prob, place in zip(best_log_probs, best_places, strict=True):
            if log_prob > NEVER:
                rank = place // K
                path = (*before[rank].tokens, row_tokens[first + rank][place % K])
                after.append(_Path(sentence, first + rank, path, log_prob))
        yield before, after
        first += len(before)


def _grid(values: Tensor, counts: list[int]) -> Tensor:
    """Values (R, K) of the rows of A sentences as (A, width x K); a sentence with fewer rows is filled with -inf."""
    A, width, K = len(counts), max(counts), values.shape[1]
    if A * width != len(values):
        place = [number * width + rank for number, count in enumerate(counts) for rank in range(count)]
        room = values.new_full((A * width, K), NEVER)
        values = room.index_copy_(0, to_device(torch.tensor(place), values.device), values)
    return values.view(A, width * K)


def _best(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k greatest values of each row, and their indices."""
    return values.max(1, keepdim=True) if k == 1 else values.topk(k, 1)
