"""Greedy and beam search for every `Translator`, through `encode`, `start`, `step` and `select` alone.

All open hypotheses of all sentences are rows of one batch. Rows that end leave it, so that work shrinks;
a sentence is done when as many hypotheses ended as the beam is wide, or when none that is open can win.
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

from regard.checks import Count, Size, checked
from regard.data.vocabulary import BOS, EOS, PAD
from regard.errors import RegardError
from regard.shapes import to_device, to_host

if TYPE_CHECKING:
    from regard.seq2seq.models.translator import Translator

NEVER = float("-inf")
#: Widest beam: its time and memory grow with it, and its translations get worse (Stahlberg & Byrne 2019).
WIDEST = 1000
#: Greatest exponent of the length penalty, of either sign.
STEEPEST = 10.0


@dataclass(frozen=True)
class Hypothesis:
    """One translation: its tokens without BOS and EOS, and what the model thinks of it.

    `log_prob` is sum_t log p(y_t | y_<t, x) in nats, with the EOS where `ended`; `score` is
    log_prob / length_penalty(steps). `ended` is False where the search was cut at its maximum length.

    >>> from regard.seq2seq.decoding.search import Hypothesis, length_penalty
    >>> found = Hypothesis((7, 5), score=-3.0 / length_penalty(3, alpha=1.0), log_prob=-3.0, ended=True)
    >>> found.num_steps, found.score  # -3 / (8 / 6)
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
    n ** alpha instead, which punishes short ones more.

    >>> length_penalty(7, 0.5) == 2**0.5, length_penalty(1, 9.0)
    (True, 1.0)
    """
    return ((5 + steps) / 6) ** alpha


@checked
@dataclass(frozen=True)
class Search:
    """How to search: the settings of `beam_search`, kept together. Called, it searches; `beam=1` is greedy.

    Models of minutes stop early under a beam: 1.5 served two of them best on held-out pairs (docs/log.md).

    >>> import torch
    >>> from regard import seq2seq
    >>> model = seq2seq.build("luong_dot", source_size=9, target_size=9, width=8)
    >>> search = seq2seq.Search(beam=2, max_length=4)
    >>> source = torch.tensor([[5, 4, 3], [6, 3, 0]])
    >>> search(model, source) == seq2seq.beam_search(model, source, beam=2, max_length=4)
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
        if not isinstance(exponent, int | float) or not abs(exponent) <= STEEPEST:  # which NaN is not
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
            raise RegardError(f"beam_search: a beam of {self.beam:,} is too wide. Ask for one of at most {WIDEST:,}.")
        if self.n_best > self.beam:
            raise RegardError(
                f"beam_search: {self.n_best} best of a beam of {self.beam}; a beam ends in as many hypotheses as it "
                f"is wide. Ask for a beam of {self.n_best} or more."
            )
        if self.max_length is not None and self.max_length <= self.min_length:
            raise RegardError(
                f"beam_search: a max_length of {self.max_length} steps (the EOS is one) leaves no room for a "
                f"min_length of {self.min_length} tokens. Raise max_length above min_length."
            )

    def __call__(self, model: Translator, source: Tensor) -> list[tuple[Hypothesis, ...]]:
        return _search(model, source, self)

    def limits(self, source: Tensor) -> Tensor:
        """The most steps of every sentence, (B,): of its own length, never of the batch it is in."""
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
    hypotheses of a sentence are kept; one that ends leaves, and the beam is narrower by it (Sutskever
    et al. 2014, Bahdanau et al. 2015), so that `beam=1` is greedy search. A sentence is done when `beam`
    hypotheses ended, or when no open one can win: log p only falls, so log p / lp(max_length) bounds it.

    `min_length` tokens come before any EOS; `max_length` counts steps, the EOS included (default: twice
    the source and 10), and cuts hypotheses that rank behind all ended ones; `no_repeat=n` forbids a second
    occurrence of any n-gram. PAD and BOS are never chosen. Scores are the model's own, not renormalised over
    what is allowed. Results do not depend on the batch.

    >>> import torch, regard as rg
    >>> from regard import seq2seq
    >>> model = seq2seq.build("luong_dot", source_size=9, target_size=9, width=8).eval()
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
    """The most probable token at every step, y_t = argmax p(y_t | y_<t, x); one hypothesis a sentence.

    Takes and returns what `beam_search` does, whose `beam=1` finds the same.

    >>> import torch
    >>> from regard import seq2seq
    >>> model = seq2seq.build("luong_dot", source_size=9, target_size=9, width=8)
    >>> source = torch.tensor([[5, 4, 3]])
    >>> [(found,)], [(same,)] = greedy(model, source), beam_search(model, source, beam=1)
    >>> found.tokens == same.tokens
    True
    """
    return _search(model, source, Search(1, length_penalty, 1, min_length, max_length, no_repeat))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout and without gradients inside; every module is as it was afterwards."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


class _Path(NamedTuple):
    """An open hypothesis, one row of the batch, and the row of the step before that it goes on from."""

    sentence: int
    parent: int
    tokens: tuple[int, ...]
    log_prob: float


@dataclass(eq=False)
class _Sentence:
    """What is known of one sentence: what ended, how many more may, and what an open hypothesis must beat."""

    search: Search
    limit: int
    room: int
    kept: list[Hypothesis] = field(default_factory=list)
    to_beat: float = NEVER

    def follow(self, before: list[_Path], grown: list[_Path]) -> list[_Path]:
        """Write down what ends here, and say which continuations go on: none where none of them can win.

        A sentence whose every continuation is barred keeps the hypotheses it has, cut.
        """
        for path in () if grown else before:
            self._keep(path.tokens, path.log_prob, False)
        going = []
        for path in grown[: self.room]:
            if path.tokens[-1] == EOS:
                self._keep(path.tokens[:-1], path.log_prob, True)
                self.room -= 1
            elif len(path.tokens) >= self.limit:
                self._keep(path.tokens, path.log_prob, False)
            else:
                going.append(path)
        return going if any(self._can_win(path) for path in going) else []

    def best(self) -> tuple[Hypothesis, ...]:
        ranked = sorted(self.kept, key=lambda h: (not h.ended, -h.score))
        return tuple(ranked[: self.search.n_best])

    def _keep(self, tokens: tuple[int, ...], log_prob: float, ended: bool) -> None:
        score = log_prob / length_penalty(len(tokens) + ended, self.search.length_penalty)
        self.kept.append(Hypothesis(tokens, score, log_prob, ended))
        scores = sorted((h.score for h in self.kept if h.ended), reverse=True)
        if len(scores) >= self.search.n_best:
            self.to_beat = scores[self.search.n_best - 1]

    def _can_win(self, path: _Path) -> bool:
        """Whether log p, which only falls, over the greatest penalty ahead still beats what ended."""
        following, alpha = len(path.tokens) + 1, self.search.length_penalty
        ahead = max(self.limit, following) if alpha >= 0 else following
        return path.log_prob > self.to_beat * length_penalty(ahead, alpha)


def _search(model: Translator, source: Tensor, search: Search) -> list[tuple[Hypothesis, ...]]:
    near = _checked(model, source)
    device, barred = source.device, _Barred(search, source.device)
    sentences = [_Sentence(search, limit, search.beam) for limit in search.limits(near).tolist()]
    paths = [_Path(number, number, (), 0.0) for number in range(len(sentences))]
    with evaluating(model):
        memory = encoded = model.encode(source)
        state = model.start(encoded)
        while True:
            last = torch.tensor([path.tokens[-1] if path.tokens else BOS for path in paths])
            logits, state = model.step(memory, state, to_device(last, device))
            grown = _grown(paths, logits, barred)
            going = [path for before, after in grown for path in sentences[before[0].sentence].follow(before, after)]
            if not going:
                return [sentence.best() for sentence in sentences]
            parents, belongs = [path.parent for path in going], [path.sentence for path in going]
            if belongs != [path.sentence for path in paths]:
                memory = encoded.select(torch.tensor(belongs))
            if parents != [*range(len(paths))]:
                state = state.select(torch.tensor(parents))
            paths = going


def _checked(model: Translator, source: Tensor) -> Tensor:
    """The source on the host, which reads it once."""
    if source.ndim != 2 or source.dtype != torch.int64 or not source.numel():
        raise RegardError(
            f"beam_search: source must be (batch, positions) token ids of int64 with at least one of each, "
            f"got {tuple(source.shape)} of {source.dtype}. Pad sentences on the right with {PAD}."
        )
    near = source.cpu()
    least, most = int(near.min()), int(near.max())
    if least < 0 or most >= model.source_size:
        raise RegardError(
            f"beam_search: source ids lie between {least} and {most}, the model knows 0 to {model.source_size - 1}. "
            "Use the tokenizer that the model was trained with."
        )
    return near


class _Barred:
    """What must not come next: PAD and BOS ever, EOS too early, the end of an n-gram that is there already."""

    def __init__(self, search: Search, device: torch.device) -> None:
        self.search = search
        always, early = torch.tensor([PAD, BOS]), torch.tensor([PAD, BOS, EOS])
        self.always, self.early = to_device(always, device), to_device(early, device)

    def set(self, log_probs: Tensor, paths: list[_Path]) -> Tensor:
        """Write -inf into log p (R, V) of what may follow the paths."""
        n, t = self.search.no_repeat, len(paths[0].tokens)
        log_probs.index_fill_(1, self.early if t < self.search.min_length else self.always, NEVER)
        if not 0 < n <= t:
            return log_probs
        tokens = to_device(torch.tensor([path.tokens for path in paths]), log_probs.device)
        grams = tokens.unfold(1, n, 1)
        again = (grams[..., :-1] == tokens[:, None, t - n + 1 :]).all(-1)
        penalty = torch.zeros_like(again, dtype=log_probs.dtype).masked_fill_(again, NEVER)
        return log_probs.scatter_add_(1, grams[..., -1], penalty)


def _grown(paths: list[_Path], logits: Tensor, barred: _Barred) -> Iterator[tuple[list[_Path], list[_Path]]]:
    """The paths of each sentence, and the best of their continuations, as many as the beam is wide.

    First those of every row, then those of every sentence among them: (A, width x K) for A sentences.
    """
    beam = barred.search.beam
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    values, tokens = _best(barred.set(logits.log_softmax(1), paths), min(beam, logits.shape[1]))
    values += to_device(torch.tensor([path.log_prob for path in paths], dtype=values.dtype), values.device)[:, None]
    groups = [[*group] for _, group in groupby(paths, lambda path: path.sentence)]
    grid = _grid(values, [len(group) for group in groups])
    best, ranks = _best(grid, min(beam, grid.shape[1]))
    said, places, log_probs = (x.tolist() for x in to_host(tokens, ranks, best))
    _check_numbers(log_probs)
    first, K = 0, values.shape[1]
    for before, each, at in zip(groups, log_probs, places, strict=True):
        after, sentence = [], before[0].sentence
        for log_prob, place in zip(each, at, strict=True):
            if log_prob > NEVER:
                rank = place // K
                path = (*before[rank].tokens, said[first + rank][place % K])
                after.append(_Path(sentence, first + rank, path, log_prob))
        yield before, after
        first += len(before)


def _grid(values: Tensor, counts: list[int]) -> Tensor:
    """Values (R, K) of the rows of A sentences as (A, width x K); what a sentence with fewer rows lacks is -inf."""
    A, width, K = len(counts), max(counts), values.shape[1]
    if A * width != len(values):
        place = [number * width + rank for number, count in enumerate(counts) for rank in range(count)]
        room = values.new_full((A * width, K), NEVER)
        values = room.index_copy_(0, to_device(torch.tensor(place), values.device), values)
    return values.view(A, width * K)


def _best(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k greatest of each row and where they are."""
    return values.max(1, keepdim=True) if k == 1 else values.topk(k, 1)


def _check_numbers(log_probs: list[list[float]]) -> None:
    if any(math.isnan(best[0]) for best in log_probs):  # nothing is greater
        raise RegardError(
            "beam_search: the model's logits are not finite (NaN or infinity). Something went wrong in its "
            "training; translate with an earlier state of it."
        )
