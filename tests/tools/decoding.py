"""A translator small enough to search exhaustively, and searches in plain Python to compare with."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.lab.data.vocabulary import BOS, EOS, PAD
from regard.lab.models.translator import Translator
from regard.nn import listeners


@dataclass(frozen=True)
class Rows:
    """Memory and state of the table: the source tokens, padded, and the last two tokens."""

    source: Tensor
    previous: Tensor

    def select(self, index):
        return Rows(self.source[index], self.previous[index])


class Table(Translator):
    """log p(y_t | y_{t-1}, y_{t-2}, x) by a table, shifted by the mean over the words of x; no attention."""

    cross_attention = None

    def __init__(self, size: int = 7, sharpness: float = 2.0, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.source_size = self.target_size = size
        table = torch.randn(size, size, size, generator=generator, dtype=torch.float64) * sharpness
        shift = torch.randn(size, size, generator=generator, dtype=torch.float64) * sharpness
        self.table, self.shift = nn.Parameter(table), nn.Parameter(shift)

    def encode(self, source):
        return Rows(source, source[:, :0])

    def start(self, memory):
        return Rows(memory.source, torch.full_like(memory.source[:, 0], BOS))

    def advance(self, memory, state, tokens):
        assert torch.equal(memory.source, state.source), "rows of memory and state belong together"
        words = (memory.source != PAD).to(torch.float64)
        shift = (self.shift[memory.source] * words[..., None]).sum(1) / words.sum(1, keepdim=True)
        return self.table[state.previous, tokens] + shift, Rows(state.source, tokens)

    def decode(self, memory, target):
        state, hidden = self.start(memory), []
        for tokens in target.T:
            output, state = self.advance(memory, state, tokens)
            hidden.append(output)
        return torch.stack(hidden, 1)

    def logits(self, hidden):
        return hidden

    def log_prob(self, source: list[int], output: list[int]) -> float:
        """log p of an output, token by token, without any of the code above."""
        total, before, last, table = 0.0, BOS, BOS, self._written_out(tuple(source))
        for token in output:
            total += table[before][last][token]
            before, last = last, token
        return total

    @functools.cache  # noqa: B019 - a model lives as long as its test
    def _written_out(self, source: tuple[int, ...]) -> list[list[list[float]]]:
        with torch.no_grad():
            shift = torch.stack([self.shift[x] for x in source if x != PAD]).mean(0)
            return (self.table + shift).log_softmax(-1).tolist()


def exhaustive(model, source: list[int], alpha: float, min_length: int, max_length: int, allowed=lambda y: True):
    """Every ended output of at most max_length steps, best first: (score, log p, tokens)."""
    words = [t for t in range(model.target_size) if t not in (PAD, BOS, EOS)]
    found = []
    for length in range(min_length, max_length):
        for tokens in itertools.product(words, repeat=length):
            if allowed(tokens):
                total = model.log_prob(source, [*tokens, EOS])
                found.append((total / ((5 + length + 1) / 6) ** alpha, total, tokens))
    return sorted(found, reverse=True)


def plain_beam(model, source: list[int], beam: int, alpha: float, max_length: int):
    """Beam search as the papers tell it, one sentence, without ever stopping early: (score, log p, tokens)."""
    open_, ended = [(0.0, ())], []
    for _ in range(max_length):
        grown = [
            (model.log_prob(source, [*path, token]), (*path, token))
            for _, path in open_
            for token in range(model.target_size)
            if token not in (PAD, BOS)
        ]
        grown = sorted(grown, reverse=True)[: beam - len(ended)]
        ended += [
            (total / ((5 + len(path)) / 6) ** alpha, total, path[:-1]) for total, path in grown if path[-1] == EOS
        ]
        open_ = [(total, path) for total, path in grown if path[-1] != EOS]
    return sorted(ended, reverse=True)


@dataclass(frozen=True)
class Path:
    """A decoder state, with the sentence and the tokens that every row of it stands for."""

    state: object
    tokens: tuple[tuple[int, ...], ...]

    def select(self, index):
        return Path(self.state.select(index), tuple(self.tokens[row] for row in index.tolist()))


class Traced(nn.Module):
    """A translator that writes down what it attends to, by sentence and prefix, whatever order the rows are in.

    `rows` is (sentence, module, prefix) -> weights (H, J) of the step that reads the last of that prefix, and of
    the encoder (sentence, module) -> weights (H, S, S).
    """

    def __init__(self, model):
        super().__init__()
        self.model, self.source_size, self.rows = model, model.source_size, {}
        self.names = {module: name for name, module in model.named_modules()}
        self.now: tuple[tuple[int, ...], ...] | None = None

    def on_attention(self, module, weights):
        for row, tile in enumerate(weights.dense()):
            if self.now is None:
                self.rows[row, self.names[module]] = tile
            else:
                sentence, *prefix = self.now[row]
                self.rows[sentence, self.names[module], tuple(prefix)] = tile[:, 0]

    def encode(self, source):
        self.now = None
        with listeners.to(self):
            return self.model.encode(source)

    def start(self, memory):
        return Path(self.model.start(memory), tuple((row,) for row in range(len(memory.states))))

    def step(self, memory, path, tokens):
        self.now = tuple((*path, token) for path, token in zip(path.tokens, tokens.tolist(), strict=True))
        with listeners.to(self):
            logits, state = self.model.step(memory, path.state, tokens)
        return logits, Path(state, self.now)
