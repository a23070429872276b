"""How heads of one layer feed those of later layers: composition scores, rollout, and norms of transported values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.checks import Count, checked
from regard.base.errors import RegardError, nearest
from regard.base.shapes import at_least_float32
from regard.maps import AttentionMap, Reduction, Tile
from regard.maps.changed_map import ValueWeightedMap
from regard.maps.indices import indices
from regard.maps.reductions import Shape, State, zeros
from regard.stats.numbering import head_name
from regard.stats.profile import one_text
from regard.stats.roles import Role

# Which heads read what earlier heads write: composition scores, from weights alone.


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
        """A title, then at most `count` pairs above chance (`labeled`), the highest score first, one sentence each."""
        chance = "random rotations of the residual stream"
        lines = [f"{self.kind}-composition of {len(self.heads)} heads, compared with {len(self.nulls)} {chance}:"]
        lines += [pair.sentence for pair in self.labeled[:count]]
        return "\n".join(lines if len(lines) > 1 else [*lines, "No pair is above chance."])

    def _index(self, head: Role | HeadNumber) -> int:
        """The row and column of a head in `scores`."""
        number = (head.layer, head.head) if isinstance(head, Role) else (int(head[0]), int(head[1]))
        if number not in self.heads:
            first, last = self.heads[0], self.heads[-1]
            raise RegardError(
                f"Composition: there is no head {head_name(*number)}; there are {head_name(*first)} to "
                f"{head_name(*last)}."
            )
        return self.heads.index(number)

    def _pair(self, writer: int, reader: int) -> HeadPair:
        """The pair at this row and column of `scores`. Without rotations the null is the expected score."""
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
    """Refuse an unknown kind, and layers that are not two or more of one width, in ascending order."""
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

    The factor that stands outside a product is replaced by R of its QR decomposition, since |V X| = |R X|. The matrix
    of every head is divided by its norm. `sizes` are the numbers of heads of the layers.
    """

    writers: Tensor
    readers: Tensor
    sizes: list[int]

    @staticmethod
    def of(layers: Sequence[HeadMatrices], kind: str) -> _Factors:
        """The factors of |A B| / (|A| |B|) in `head_composition`, with A of every head as writer, and B as reader.

        A = value output, so a writer is R_value output. B = read rest^T, so a reader is read R_rest^T.
        """
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
        for size in self.sizes[:-1]:  # the heads start:stop of one layer write, and all heads of later layers read
            stop = start + size
            product = writers[start:stop].reshape(-1, C) @ self.readers[:, stop:].flatten(1)
            squares = product.square_().view(size, E, num_heads - stop, -1).sum((1, 3))
            scores[start:stop, stop:] = squares.sqrt()
            start = stop
        return scores


def _collapsed(outside: Tensor, inside: Tensor) -> Tensor:
    """inside R^T divided by its norm, for every head, where R is that of the QR decomposition of `outside`.

    The arguments are (H, C, D), and so is the result if C is at least D. A head of zeros stays zero.
    """
    collapsed = inside.double() @ torch.linalg.qr(outside.double()).R.mT
    norm = collapsed.flatten(1).norm(dim=1)[:, None, None]
    dtype = torch.float64 if inside.dtype == torch.float64 else torch.float32
    return (collapsed / norm.clamp_min(torch.finfo(torch.float64).tiny)).to(dtype)


def _rotation(width: int, draw: torch.Generator) -> Tensor:
    """A random rotation or reflection (Haar): Q of the QR of a Gaussian matrix, with the signs of R's diagonal."""
    q, r = torch.linalg.qr(torch.randn(width, width, generator=draw, dtype=torch.float64))
    return q * r.diagonal().sign()


# Attention rollout through all layers, and the norms of the vectors that keys send to queries.


@checked
@torch.no_grad()
def rollout(
    maps: Mapping[str, AttentionMap] | Sequence[AttentionMap],
    rows: Sequence[int] | Tensor,
    batch: Count = 0,
    residual: float = 0.5,
) -> Tensor:
    """Attention rollout: how much rows of the last layer depend on each input token, by weights alone; (rows, n).

    Abnar & Zuidema 2020, arXiv:2005.00928: with A_l the mean of a layer's heads and A'_l = 0.5 A_l + 0.5 I
    for the residual, the rollout is A'_L ... A'_1. No n x n matrix is needed: a row e_i is multiplied by A'_L,
    then by A'_(L-1), and so on, tile by tile. `maps` are the self-attention maps in the order of the model;
    `residual` is the share of I. Values, norms and feed-forward layers are ignored.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 2, 4)
    >>> rollout([rg.Attention()(x, x, x).weights], [0])
    tensor([[0.7500, 0.2500]])
    """
    layers = list(maps.values()) if isinstance(maps, Mapping) else list(maps)
    if not layers or len({layer.shape[2:] for layer in layers}) > 1 or layers[0].shape[2] != layers[0].shape[3]:
        raise RegardError(
            "rollout: the maps are multiplied, so every map must be of self-attention over the same whole text, "
            f"got {[tuple(layer.shape) for layer in layers]}. Leave cross-attention out; watch one pass, not decoding."
        )
    n, device = layers[0].shape[2], layers[0].device
    chosen = indices("rollout", "row", rows, n).to(device)
    flow = zeros(device, len(chosen), n)
    flow[torch.arange(len(chosen), device=device), chosen] = 1.0
    for layer in reversed(layers):
        text_map = one_text("rollout", layer, batch)
        flow = residual * flow + (1 - residual) * text_map.summarize(RowsTimesMap(flow))[0]
    return flow


@dataclass(frozen=True, eq=False)
class RowsTimesMap(Reduction):
    """Row vectors times the mean map of the heads, sum_i flow_i mean_h w_hij, for the first text; (rows, J)."""

    flow: Tensor

    def init(self, shape: Shape, device: torch.device) -> State:
        return [zeros(device, len(self.flow), shape[3])]

    def add(self, state: State, tile: Tile) -> None:
        flow = self.flow[:, tile.rows]
        if flow.any():
            state[0][:, tile.cols] += flow @ tile.weights[0].mean(0).to(flow.dtype)


@checked
def value_weighted(map: AttentionMap, value: Tensor, projection: Tensor | None = None) -> ValueWeightedMap:
    """The map of the norms ||w_ij v_j W_O^h|| = |w_ij| ||v_j W_O^h|| (Kobayashi et al. 2020, arXiv:2004.10102).

    A key with a large weight may contribute little, because its value is small. Special tokens often do.
    `value` is (B, G, J, E) with G dividing H; `projection` is (H, E, C), or the weight (C, H E) of the
    `nn.Linear` that follows the heads. Without it the norms are |w_ij| ||v_j||. The values and the projection of a
    watched model are known: `seen.value_weighted(layer)`.

    >>> import torch, regard as rg
    >>> x = torch.randn(1, 2, 5, 4)
    >>> value_weighted(rg.Attention()(x, x, x).weights, x, torch.randn(8, 8)).per_head().shape
    torch.Size([1, 2])
    """
    B, H, _, J = map.shape
    E = value.shape[-1] if value.ndim else 0
    fits = value.ndim == 4 and (value.shape[0], value.shape[2]) == (B, J) and H % value.shape[1] == 0
    if not fits or not value.is_floating_point() or value.device != map.device:
        raise RegardError(
            f"value_weighted: values are floats of shape (batch {B}, heads that divide {H}, keys {J}, width) "
            f"on {map.device}, got {value.dtype} of shape {tuple(value.shape)} on {value.device}."
        )
    values = at_least_float32(value).repeat_interleave(H // value.shape[1], 1)
    if projection is None:
        return ValueWeightedMap(map, values.norm(dim=-1))
    if projection.ndim == 2 and projection.shape[1] == H * E:
        projection = projection.T.reshape(H, E, -1)
    if projection.ndim != 3 or projection.shape[:2] != (H, E):
        raise RegardError(
            f"value_weighted: the projection is ({H}, {E}, C), or the weight (C, {H * E}) of nn.Linear, "
            f"got {tuple(projection.shape)}."
        )
    if torch.is_grad_enabled() and (value.requires_grad or projection.requires_grad):
        # torch.linalg.qr(mode="r") has no derivative
        return ValueWeightedMap(map, (values @ at_least_float32(projection)).norm(dim=-1))
    # ||v W|| = ||v R'||, where W' = Q R: a triangle of (E, E) numbers per head instead of C numbers per key
    triangle = torch.linalg.qr(at_least_float32(projection.detach()).mT, mode="r").R
    return ValueWeightedMap(map, (values.to(triangle.dtype) @ triangle.mT).norm(dim=-1))
