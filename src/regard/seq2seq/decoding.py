"""Greedy and beam search for every `Translator`, through `encode`, `start`, `step` and `select` alone.

All open hypotheses of all sentences are rows of one batch. Rows that end leave it, so that work shrinks;
a sentence is done when as many hypotheses ended as the beam is wide, or when none that is open can win.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.data.vocabulary import BOS, EOS, PAD
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.seq2seq.model import Translator

NEVER = float("-inf")


@dataclass(frozen=True)
class Hypothesis:
    """One translation: its tokens without BOS and EOS, and what the model thinks of it.

    `log_prob` is sum_t log p(y_t | y_<t, x) in nats, with the EOS where `ended`; `score` is
    log_prob / length_penalty(steps). `ended` is False where the search was cut at its maximum length.
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


@dataclass(frozen=True)
class Search:
    """How to search: the settings of `beam_search`, kept together. Called, it searches; `beam=1` is greedy."""

    beam: int = 5
    length_penalty: float = 1.0
    n_best: int = 1
    min_length: int = 0
    max_length: int | None = None
    no_repeat: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.length_penalty, int | float):
            raise RegardError(f"beam_search: length_penalty must be a number, got {self.length_penalty!r}.")
        for name, least in (("beam", 1), ("n_best", 1), ("min_length", 0), ("no_repeat", 0), ("max_length", 0)):
            given = getattr(self, name)
            if not isinstance(given, int) and not (given is None and name == "max_length"):
                raise RegardError(f"beam_search: {name} must be a whole number, got {given!r}.")
            if name == "max_length":
                continue
            if getattr(self, name) < least:
                raise RegardError(f"beam_search: {name} must be at least {least}, got {getattr(self, name)}.")
        if self.n_best > self.beam:
            raise RegardError(
                f"beam_search: {self.n_best} best of a beam of {self.beam}; a beam ends in as many hypotheses as it "
                f"is wide. Ask for beam={self.n_best} or more."
            )
        if self.max_length is not None and self.max_length <= self.min_length:
            raise RegardError(
                f"beam_search: max_length={self.max_length} steps (the EOS is one) leave no room for "
                f"min_length={self.min_length} tokens. Raise max_length above min_length."
            )

    def __call__(self, model: Translator, source: Tensor) -> list[tuple[Hypothesis, ...]]:
        return _search(model, source, self)

    def limits(self, source: Tensor) -> Tensor:
        """The most steps of every sentence, (B,): of its own length, never of the batch it is in."""
        lengths = (source != PAD).sum(1)
        if self.max_length is not None:
            return torch.full_like(lengths, self.max_length)
        return (2 * lengths + 10).clamp_min(self.min_length + 1)


def beam_search(
    model: Translator,
    source: Tensor,
    *,
    beam: int = 5,
    length_penalty: float = 1.0,
    n_best: int = 1,
    min_length: int = 0,
    max_length: int | None = None,
    no_repeat: int = 0,
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


def greedy(
    model: Translator,
    source: Tensor,
    *,
    min_length: int = 0,
    max_length: int | None = None,
    no_repeat: int = 0,
    length_penalty: float = 1.0,
) -> list[tuple[Hypothesis, ...]]:
    """The most probable token at every step, y_t = argmax p(y_t | y_<t, x); one hypothesis a sentence.

    Takes and returns what `beam_search` does, whose `beam=1` finds the same.
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


@dataclass(eq=False)
class _Ended:
    """Hypotheses of the sentences that left the search, and what an open one must beat."""

    search: Search
    kept: list[list[Hypothesis]]
    to_beat: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.to_beat = [NEVER] * len(self.kept)

    def add(self, sentence: int, tokens: list[int], log_prob: float, ended: bool) -> None:
        score = log_prob / length_penalty(len(tokens) + ended, self.search.length_penalty)
        kept = self.kept[sentence]
        kept.append(Hypothesis(tuple(tokens), score, log_prob, ended))
        scores = sorted((h.score for h in kept if h.ended), reverse=True)
        if len(scores) >= self.search.n_best:
            self.to_beat[sentence] = scores[self.search.n_best - 1]

    def best(self) -> list[tuple[Hypothesis, ...]]:
        ranked = (sorted(kept, key=lambda h: (not h.ended, -h.score)) for kept in self.kept)
        return [tuple(kept[: self.search.n_best]) for kept in ranked]


@dataclass(frozen=True, eq=False)
class _Open:
    """The open hypotheses, one a row, in order of sentence and rank: tokens (R, t), log p (R,), decoder state."""

    sentence: Tensor
    tokens: Tensor
    log_prob: Tensor
    memory: Any
    state: Any

    @property
    def last(self) -> Tensor:
        return self.tokens[:, -1] if self.tokens.shape[1] else torch.full_like(self.sentence, BOS)

    @property
    def first(self) -> tuple[Tensor, Tensor, Tensor]:
        """The sentences that have rows, which of them every row is of, and the first row of each."""
        sentences, place, count = self.sentence.unique_consecutive(return_inverse=True, return_counts=True)
        return sentences, place, count.cumsum(0) - count


@dataclass(frozen=True, eq=False)
class _Chosen:
    """Continuations, (N,) each, in order of sentence and rank: the row they go on from, a token, log p with it."""

    sentence: Tensor
    parent: Tensor
    token: Tensor
    log_prob: Tensor


def _search(model: Translator, source: Tensor, search: Search) -> list[tuple[Hypothesis, ...]]:
    _check(model, source)
    B, device = len(source), source.device
    limits, room = search.limits(source), torch.full((B,), search.beam, device=device)
    ended, barred = _Ended(search, [[] for _ in range(B)]), _Barred(search, device)
    with evaluating(model):
        encoded, rows = model.encode(source), torch.arange(B, device=device)
        open_ = _Open(rows, rows[:, None][:, :0], torch.zeros(B, device=device), encoded, model.start(encoded))
        while len(open_.sentence):
            logits, state = model.step(open_.memory, open_.state, open_.last)
            chosen = _choose(open_, logits, barred, room)
            going = _close(open_, chosen, limits, room, ended)
            open_ = _follow(open_, chosen, going, encoded, state)
    return ended.best()


def _check(model: Translator, source: Tensor) -> None:
    if source.ndim != 2 or source.dtype != torch.int64 or not source.numel():
        raise RegardError(
            f"beam_search: source must be (batch, positions) token ids of int64 with at least one of each, "
            f"got {tuple(source.shape)} of {source.dtype}. Pad sentences on the right with {PAD}."
        )
    least, most = int(source.min()), int(source.max())
    if least < 0 or most >= model.source_size:
        raise RegardError(
            f"beam_search: source ids lie between {least} and {most}, the model knows 0 to {model.source_size - 1}. "
            "Use the tokenizer that the model was trained with."
        )


class _Barred:
    """What must not come next: PAD and BOS ever, EOS too early, the end of an n-gram that is there already."""

    def __init__(self, search: Search, device: torch.device) -> None:
        self.search = search
        self.always, self.early = (torch.tensor(ids, device=device) for ids in ([PAD, BOS], [PAD, BOS, EOS]))

    def set(self, log_probs: Tensor, tokens: Tensor) -> Tensor:
        """Write -inf into log p (R, V) of what may follow `tokens` (R, t)."""
        n, t = self.search.no_repeat, tokens.shape[1]
        log_probs.index_fill_(1, self.early if t < self.search.min_length else self.always, NEVER)
        if not 0 < n <= t:
            return log_probs
        grams = tokens.unfold(1, n, 1)
        again = (grams[..., :-1] == tokens[:, None, t - n + 1 :]).all(-1)
        penalty = torch.zeros_like(again, dtype=log_probs.dtype).masked_fill_(again, NEVER)
        return log_probs.scatter_add_(1, grams[..., -1], penalty)


def _choose(open_: _Open, logits: Tensor, barred: _Barred, room: Tensor) -> _Chosen:
    """The best continuations of every sentence, as many as it has room for.

    First those of every row, then those of every sentence among them: (A, rows, K) for A sentences.
    """
    beam = barred.search.beam
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    values, tokens = _best(barred.set(logits.log_softmax(1), open_.tokens), min(beam, logits.shape[1]))
    _check_numbers(values)
    sentences, place, first = open_.first
    rank = torch.arange(len(place), device=place.device) - first[place]
    K = values.shape[1]
    grid = logits.new_full((len(sentences), int(rank.max()) + 1, K), NEVER)
    grid[place, rank] = open_.log_prob[:, None] + values
    log_prob, flat = _best(grid.flatten(1), min(beam, grid[0].numel()))
    within = torch.arange(log_prob.shape[1], device=place.device) < room[sentences, None]
    kept = within & (log_prob > NEVER)
    parent = (first[:, None] + flat // K)[kept]
    return _Chosen(open_.sentence[parent], parent, tokens[parent, (flat % K)[kept]], log_prob[kept])


def _best(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return values.max(1, keepdim=True) if k == 1 else values.topk(k, 1)


def _check_numbers(log_probs: Tensor) -> None:
    if bool(log_probs.isnan().any()):
        raise RegardError(
            "beam_search: the model's logits are not finite (NaN or infinity). Something went wrong in its "
            "training; translate with an earlier state of it."
        )


def _close(open_: _Open, chosen: _Chosen, limits: Tensor, room: Tensor, ended: _Ended) -> Tensor:
    """Write down what ends here, and say which continuations go on, (N,)."""
    steps, eos = open_.tokens.shape[1] + 1, chosen.token == EOS
    leaving = eos | (limits[chosen.sentence] <= steps)
    if bool(leaving.any()):
        paths = torch.cat([open_.tokens[chosen.parent[leaving]], chosen.token[leaving, None]], 1).tolist()
        facts = (chosen.sentence[leaving].tolist(), paths, chosen.log_prob[leaving].tolist())
        for sentence, path, log_prob in zip(*facts, strict=True):
            is_end = path[-1] == EOS
            ended.add(sentence, path[:-1] if is_end else path, log_prob, is_end)
        room.index_add_(0, chosen.sentence[eos], -torch.ones_like(chosen.sentence[eos]))
    _keep_stuck(open_, chosen, ended)
    if max(ended.to_beat) == NEVER:
        return ~leaving
    hopeful = ~leaving & _can_win(chosen, steps, limits, ended)
    searched = torch.zeros_like(limits, dtype=torch.bool).index_fill_(0, chosen.sentence[hopeful], True)
    return ~leaving & searched[chosen.sentence]


def _keep_stuck(open_: _Open, chosen: _Chosen, ended: _Ended) -> None:
    """A sentence whose every continuation is barred keeps the hypotheses it has, cut."""
    for sentence in set(open_.sentence.tolist()) - set(chosen.sentence.tolist()):
        for row in (open_.sentence == sentence).nonzero().flatten().tolist():
            ended.add(sentence, open_.tokens[row].tolist(), float(open_.log_prob[row]), False)


def _can_win(chosen: _Chosen, steps: int, limits: Tensor, ended: _Ended) -> Tensor:
    """Whether log p, which only falls, over the greatest penalty ahead still beats what ended."""
    alpha = ended.search.length_penalty
    ahead = limits.clamp_min(steps + 1) if alpha >= 0 else torch.full_like(limits, steps + 1)
    to_beat = torch.tensor(ended.to_beat, dtype=torch.float64, device=limits.device) * length_penalty(ahead, alpha)
    return chosen.log_prob > to_beat[chosen.sentence]


def _follow(open_: _Open, chosen: _Chosen, going: Tensor, encoded: Any, state: Any) -> _Open:
    """The rows that go on; memory and state are reordered only where the rows changed."""
    sentence, parent = chosen.sentence[going], chosen.parent[going]
    tokens = torch.cat([open_.tokens[parent], chosen.token[going, None]], 1)
    same = len(parent) == len(open_.sentence) and bool((parent[1:] > parent[:-1]).all())
    memory = open_.memory if torch.equal(sentence, open_.sentence) else encoded.select(sentence)
    return _Open(sentence, tokens, chosen.log_prob[going], memory, state if same else state.select(parent))
