"""Which heads read what earlier heads write: composition scores, from weights alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.checks import Count, checked
from regard.base.errors import RegardError, nearest
from regard.stats.numbering import head_name
from regard.stats.roles import Role

#: Kind -> what the second head does with the output of the first.
COMPOSITIONS = {"Q": "its queries read", "K": "its keys read", "V": "its values read"}
#: A head: (layer, head).
HeadNumber = tuple[int, int]


@dataclass(frozen=True, eq=False)
class HeadMatrices:
    """The matrices of the heads of one layer, which read and write a residual stream of C channels.

    `query` and `key` are (H, C, D), `value` (H, C, E) and `output` (H, E, C): a head computes (x W_Q)(x W_K)^T and
    x W_V W_O, without biases. Heads that share a key or value have it repeated. `layer` is the number of the layer.

    >>> import torch
    >>> from regard.types import HeadMatrices
    >>> x = torch.randn(2, 8, 4)
    >>> HeadMatrices(0, query=x, key=x, value=x, output=x.mT).num_heads
    2
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor

    def __post_init__(self) -> None:
        H, C, D = self.query.shape
        E = self.value.shape[-1]
        shapes = [tuple(part.shape) for part in (self.key, self.value, self.output)]
        if shapes != [(H, C, D), (H, C, E), (H, E, C)]:
            raise RegardError(
                f"HeadMatrices: query is {(H, C, D)}, so key must be the same, value ({H}, {C}, E) and output "
                f"({H}, E, {C}); got {', '.join(map(str, shapes))}."
            )

    @property
    def num_heads(self) -> int:
        return len(self.query)


@dataclass(frozen=True)
class HeadPair:
    """The composition score of two heads: `reader`, of a later layer, reads what `writer` writes.

    `expected` is the root mean square of the score of random matrices, and `null` the largest score of all pairs of the
    model in several random rotations.

    >>> from regard.types import HeadPair
    >>> HeadPair("K", (0, 4), (1, 7), score=0.31, expected=0.05, null=0.09).sentence
    'L1.H7: its keys read what L0.H4 writes (K-composition 0.31; 0.05 expected and at most 0.09 by chance).'
    """

    kind: str
    writer: HeadNumber
    reader: HeadNumber
    score: float
    expected: float
    null: float

    @property
    def label(self) -> bool:
        """Whether the score is larger than that of any pair by chance."""
        return self.score > self.null

    @property
    def sentence(self) -> str:
        """The pair in one sentence."""
        chance = f"{self.expected:.2f} expected and at most {self.null:.2f} by chance"
        return (
            f"{head_name(*self.reader)}: {COMPOSITIONS[self.kind]} what {head_name(*self.writer)} writes "
            f"({self.kind}-composition {self.score:.2f}; {chance})."
        )


@dataclass(frozen=True, eq=False)
class CompositionScores:
    """The composition scores of all pairs of heads: `composition(layers, "K")`, `rg.hf.composition(model, "K")`.

    `scores` (N, N) has the head that writes on its rows and the head that reads on its columns, in the order of
    `heads`; it is NaN where the reader is not of a later layer. `nulls` has the largest score of each random rotation.

    >>> import torch
    >>> from regard.types import CompositionScores
    >>> scores = torch.tensor([[torch.nan, 0.5], [torch.nan, torch.nan]])
    >>> [pair.score for pair in CompositionScores("K", [(0, 0), (1, 0)], scores, 0.1, torch.tensor([0.2])).labeled]
    [0.5]
    """

    kind: str
    heads: list[HeadNumber]
    scores: Tensor
    expected: float
    nulls: Tensor

    @property
    def pairs(self) -> list[HeadPair]:
        """All pairs, the highest score first."""
        writers, readers = (~self.scores.isnan()).nonzero(as_tuple=True)
        order = self.scores[writers, readers].argsort(descending=True)
        return [self._pair(int(writers[n]), int(readers[n])) for n in order]

    @property
    def labeled(self) -> list[HeadPair]:
        """The pairs whose score is larger than that of any pair by chance, the highest score first."""
        return [pair for pair in self.pairs if pair.label]

    def between(self, writers: Sequence[Role | HeadNumber], readers: Sequence[Role | HeadNumber]) -> list[HeadPair]:
        """The pairs of chosen heads, the highest score first.

        Heads are (layer, head) or roles: `between(table.of("previous")[:3], table.of("induction")[:3])`.
        """
        first, second = ([self._index(head) for head in heads] for heads in (writers, readers))
        pairs = [self._pair(a, b) for a in first for b in second if not self.scores[a, b].isnan()]
        return sorted(pairs, key=lambda pair: -pair.score)

    def table(self, count: Count = 10) -> str:
        """The first pairs in sentences, under what was compared."""
        chance = "random rotations of the residual stream"
        lines = [f"{self.kind}-composition of {len(self.heads)} heads, compared with {len(self.nulls)} {chance}:"]
        lines += [pair.sentence for pair in self.labeled[:count]]
        return "\n".join(lines if len(lines) > 1 else [*lines, "No pair is above chance."])

    def _index(self, head: Role | HeadNumber) -> int:
        number = (head.layer, head.head) if isinstance(head, Role) else (int(head[0]), int(head[1]))
        if number not in self.heads:
            first, last = self.heads[0], self.heads[-1]
            raise RegardError(
                f"Composition: there is no head {head_name(*number)}; there are {head_name(*first)} to "
                f"{head_name(*last)}."
            )
        return self.heads.index(number)

    def _pair(self, writer: int, reader: int) -> HeadPair:
        null = float(self.nulls.max()) if len(self.nulls) else self.expected
        score = float(self.scores[writer, reader])
        return HeadPair(self.kind, self.heads[writer], self.heads[reader], score, self.expected, null)


@checked
def head_composition(layers: Sequence[HeadMatrices], kind: str = "K", *, rotations: Count = 19) -> CompositionScores:
    """How much of what each head reads is what an earlier head writes, from the weights of heads.

    With W_OV = W_V W_O of the earlier head and W_QK = W_Q W_K^T of the later one (Elhage et al. 2021, "A Mathematical
    Framework for Transformer Circuits"), the score is |A B| / (|A| |B|) in Frobenius norms, where A = W_OV, and B is
    W_QK for "Q", W_QK^T for "K", and W_OV of the later head for "V". It is computed from the factors: with A = V O and
    B = K Q^T, |A B| = |R_V O K R_Q^T|, where R_V and R_Q are those of QR decompositions, so no C x C matrix is made.

    The null rotates the residual stream between the two heads: B becomes R B with a random rotation R, so every matrix
    keeps its singular values. Then E |A R B|^2 = |A|^2 |B|^2 / C, so `expected` is 1 / sqrt(C). `rotations` rotations
    are drawn (seed 0), and a pair is labeled if its score is larger than the largest score of all pairs in all of
    them. If the weights of a model are random and no direction is special, 19 rotations label a pair in 1 model of 20.

    A score says that two heads could communicate, not that they do: it ignores biases, what the text makes of the
    queries and keys, MLPs between, and rotary positions, which turn W_QK with the distance.

    >>> import torch
    >>> from regard.stats import head_composition
    >>> from regard.types import HeadMatrices
    >>> basis = torch.eye(16)
    >>> copy = HeadMatrices(0, *[basis[None, :, :4]] * 3, output=basis[None, 4:8])    # writes into the channels 4 to 7
    >>> match = HeadMatrices(1, basis[None, :, :4], basis[None, :, 4:8], basis[None, :, :4], basis[None, :4])
    >>> head_composition([copy, match], "K").labeled[0].sentence
    'L1.H0: its keys read what L0.H0 writes (K-composition 0.50; 0.25 expected and at most 0.32 by chance).'
    """
    _check(layers, kind)
    factors = _Factors.of(layers, kind)
    heads = [(layer.layer, head) for layer in layers for head in range(layer.num_heads)]
    width = layers[0].query.shape[1]
    draw = torch.Generator().manual_seed(0)
    nulls = [float(factors.scores(_rotation(width, draw)).nan_to_num(0.0).max()) for _ in range(rotations)]
    return CompositionScores(kind, heads, factors.scores().cpu(), 1 / math.sqrt(width), torch.tensor(nulls))


def _check(layers: Sequence[HeadMatrices], kind: str) -> None:
    if kind not in COMPOSITIONS:
        raise RegardError(f"composition: there is no kind {kind!r}. {nearest(kind, COMPOSITIONS)}")
    widths = {layer.query.shape[1] for layer in layers}
    numbers = [layer.layer for layer in layers]
    if len(layers) < 2 or len(widths) > 1 or numbers != sorted(set(numbers)):
        raise RegardError(
            "composition: a head reads from heads of earlier layers, so it needs at least two layers of one residual "
            f"stream, in order; got layers {numbers} with {sorted(widths)} channels."
        )


@dataclass(frozen=True, eq=False)
class _Factors:
    """The heads of all layers as writers (N, E, C) and readers (C, N, D), such that a score is the norm of a product.

    The factor that stands outside a product is replaced by R of its QR decomposition, since |V X| = |R X|. Every head
    has the norm 1.
    """

    writers: Tensor
    readers: Tensor
    sizes: list[int]

    @staticmethod
    def of(layers: Sequence[HeadMatrices], kind: str) -> _Factors:
        writers, readers = [], []
        for layer in layers:
            query, key, value, output = (w.detach() for w in (layer.query, layer.key, layer.value, layer.output))
            read, rest = {"Q": (query, key), "K": (key, query), "V": (value, output.mT)}[kind]
            writers.append(_collapsed(value, output.mT).mT)
            readers.append(_collapsed(rest, read).movedim(0, 1))
        return _Factors(torch.cat(writers), torch.cat(readers, 1), [layer.num_heads for layer in layers])

    def scores(self, rotation: Tensor | None = None) -> Tensor:
        """The scores of all pairs of heads, (N, N); NaN where the reader is not of a later layer."""
        num_heads, E, C = self.writers.shape
        scores = self.writers.new_full((num_heads, num_heads), torch.nan)
        writers = self.writers if rotation is None else self.writers @ rotation.to(self.writers)
        start = 0
        for size in self.sizes[:-1]:
            stop = start + size
            product = writers[start:stop].reshape(-1, C) @ self.readers[:, stop:].flatten(1)
            squares = product.square_().view(size, E, num_heads - stop, -1).sum((1, 3))
            scores[start:stop, stop:] = squares.sqrt()
            start = stop
        return scores


def _collapsed(outside: Tensor, inside: Tensor) -> Tensor:
    """inside R^T, where R is that of the QR decomposition of `outside`, divided by its norm; (H, C, D)."""
    collapsed = inside.double() @ torch.linalg.qr(outside.double()).R.mT
    norm = collapsed.flatten(1).norm(dim=1)[:, None, None]
    dtype = torch.float64 if inside.dtype == torch.float64 else torch.float32
    return (collapsed / norm.clamp_min(torch.finfo(torch.float64).tiny)).to(dtype)


def _rotation(width: int, draw: torch.Generator) -> Tensor:
    """A random rotation or reflection (Haar): Q of the QR of a Gaussian matrix, with the signs of R's diagonal."""
    q, r = torch.linalg.qr(torch.randn(width, width, generator=draw, dtype=torch.float64))
    return q * r.diagonal().sign()
