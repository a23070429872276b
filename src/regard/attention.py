"""`Attention`, the pieces of one mechanism, and `scores`, which computes the scores of a tile with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from regard.base.checks import explained
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import Sizes, at_least_float32, has_numbers, pick, without_autocast
from regard.base.upper_layers import upper_layer
from regard.pieces.bias import Bias, State
from regard.pieces.call_tensors import CallTensors, needs_of, tensors_for
from regard.pieces.contents import HELD, PieceTemplate, is_small, split_tensors, tensor_snapshot
from regard.pieces.grid import Grid
from regard.pieces.holder import HoldsPieces
from regard.pieces.mask import Mask, causal
from regard.pieces.mask_conventions import mask_remedy
from regard.pieces.normalizer import Normalizer, Softmax
from regard.pieces.position import Encoding
from regard.pieces.score import Dot, Score, dot_scale
from regard.pieces.selection import Selection
from regard.pieces.transition import Steps, Transition, scaled_steps

#: No tensors beside queries, keys and values.
EMPTY: CallTensors = MappingProxyType({})

#: The type of the piece in each slot, without the biases.
SLOTS: dict[str, type] = {
    "score": Score,
    "position": Encoding,
    "mask": Mask,
    "normalizer": Normalizer,
    "transition": Transition,
    "selection": Selection,
}
#: The slots that may be empty.
OPTIONAL = ("position", "mask", "transition", "selection")


class Mechanism(HoldsPieces, ABC):
    """What `attend` runs: an `Attention`, which is one set of pieces, or a composite of several attentions.

    `attend` and `plan` use these methods only. `pieces` name the tensors that a call needs. `check_option` and
    `with_mask_too` apply the arguments of the call. `attend_request` runs the call, and `plan_request` plans it.
    """

    #: The mask over tokens: no query attends to a key that it hides.
    mask: Mask | None
    #: Whether a weight is a function of one score, w_ij = f(s_ij, r_i), and the keys are those of the mask.
    is_scored: bool = False

    @abstractmethod
    def pieces(self) -> list[Any]:
        """All pieces, which may need tensors of the call."""

    @abstractmethod
    def check_option(self, name: str) -> None:
        """Raise a `RegardError` if this mechanism does not support the argument of a call."""

    @abstractmethod
    def with_mask_too(self, mask: Mask) -> Self:
        """This mechanism with its mask joined to this mask, `&`."""

    @abstractmethod
    def attend_request(self, request: Any, cache: Any, check: bool) -> Any:
        """The `AttentionOutput` of a call, whose arguments are in `request` (`engine/kept_plans.py`)."""

    @abstractmethod
    def plan_request(self, request: Any, cache: Any) -> Any:
        """The plan of the same call."""

    def memory_pieces(self) -> tuple[Any, ...]:
        """The pieces whose results a cache keeps beside its keys; () if it keeps only keys and values."""
        return ()

    def key_axes(self) -> dict[str, int]:
        """The tensors that the pieces need for each key, by name, and which axis of each runs over the keys."""
        needs = [item for piece in self.pieces() for item in needs_of(piece).items()]
        return {name: axes.split().index("J") for name, axes in needs if "J" in axes.split()}

    @staticmethod
    def remedy(value: object) -> str:
        """How to make a mechanism from a value that is none."""
        slots = (("", Score), *((f"{name}=", kind) for name, kind in [*SLOTS.items(), ("bias", Bias)][1:]))
        slot = next((slot for slot, kind in slots if isinstance(value, kind)), None)
        if slot is not None:
            return f"Put the piece into its slot: regard.Attention({slot}{value!r})."
        if isinstance(value, str):
            return f"For a mechanism of the catalog: regard.mechanism({value!r}).build(...)."
        if hasattr(value, "build"):
            return "Build an Attention: mechanism.build(...)."
        return "For plain attention: regard.Attention()."

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        """`regard.attend` with this attention: the output, the weights, and the next cache."""
        return upper_layer("attention").attend(query, key, value, attention=self, **options)


@explained
class Attention(Mechanism):
    """An attention mechanism: w_ij = normalize(bias(score(position(q_i), position(k_j)))) where mask allows.

    Each slot holds a piece: `score` compares a query with a key; `position` encodes the positions of both before;
    `bias` changes scores by position (several biases apply in order); `mask` decides which keys a query may attend to
    (True = may attend); `normalizer` turns a row of scores into weights. `dropout` is the share of weights that are
    dropped in training mode. Multi-head, grouped-query and multi-query attention differ only in the number of key
    heads. It is called with tensors, `output, weights = attention(query, key, value)`, and takes the other arguments of
    `regard.attend`: a mask of this call, a cache, an engine.

    A `selection` chooses the keys of each query by another score, among those that the mask allows: they become a part
    of the mask. With a `transition` the layer is recurrent: w_ij = q_i . A_i ... A_{j+1} k_j. The score is a dot
    product, the mask is causal, and there is no bias, normalizer or dropout.

    >>> Attention()
    Attention(score=Dot(), normalizer=Softmax(temperature=1.0, sink=None))
    """

    score: Score
    position: Encoding | None
    bias: Any  # a tuple of biases; a single bias may be assigned too
    mask: Mask | None
    normalizer: Normalizer
    transition: Transition | None
    selection: Selection | None
    #: In a snapshot: the tensors that it shares with the original pieces. None if this is not a snapshot.
    shared: list[Tensor] | None = None
    piece_order = ("score", "position", "bias", "mask", "normalizer", "transition", "selection")

    def __init__(
        self,
        score: Score | None = None,
        *,
        position: Encoding | None = None,
        bias: Bias | Iterable[Bias] = (),
        mask: Mask | None = None,
        normalizer: Normalizer | None = None,
        dropout: float = 0.0,
        transition: Transition | None = None,
        selection: Selection | None = None,
    ) -> None:
        super().__init__()
        self.score = Dot() if score is None else score
        self.position = position
        self.bias = bias
        self.mask = mask
        self.normalizer = Softmax() if normalizer is None else normalizer
        self.dropout = dropout
        self.transition = transition
        self.selection = selection
        if transition is not None:
            if normalizer is not None:
                raise RegardError(f"Attention: {NO_NORMALIZER}, got {normalizer!r}. {NO_NORMALIZER_REMEDY}")
            self.mask = causal() if mask is None else mask
        self.family.check_pieces(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Check a piece, the biases or the share of dropout, in the constructor and if a user replaces it later.

        A single bias becomes a tuple of one.
        """
        if name in SLOTS:
            value = _slot(name, value, SLOTS[name], optional=name in OPTIONAL)
        elif name == "bias":
            # a tensor can be iterated, but it is one wrong piece, which `_slot` refuses
            is_list = isinstance(value, Iterable) and not isinstance(value, Bias | Tensor)
            value = tuple(_slot("bias", piece, Bias) for piece in (value if is_list else (value,)))
        elif name == "dropout":
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < 1:
                raise RegardError(f"Attention(dropout={value!r}): the share of dropped weights is in [0, 1).")
            value = float(value)
        super().__setattr__(name, value)

    @property
    def family(self) -> type[Family]:
        """How weights are computed: from scores, or by a transition."""
        return Scored if self.transition is None else Transported

    @property
    def is_scored(self) -> bool:  # type: ignore[override]
        return self.family is Scored and self.selection is None

    def check_option(self, name: str) -> None:
        if name == "dropout_p" and self.family is not Scored:
            raise RegardError("attend(dropout_p=...): with a transition there are no single weights to drop.")

    def memory_pieces(self) -> tuple[Any, ...]:
        return self.family.memory_pieces(self)

    def attend_request(self, request: Any, cache: Any, check: bool) -> Any:
        return upper_layer("attention").attend_pieces(request, cache, check)

    def plan_request(self, request: Any, cache: Any) -> Any:
        return upper_layer("attention").plan_pieces(request, cache)

    def with_pieces(self, **pieces: Any) -> Attention:
        """An `Attention` with some other pieces, by the names of their slots; the rest is shared, not copied."""
        other, own = object.__new__(Attention), vars(self)
        nn.Module.__init__(other)
        for name in self.piece_order:  # `HoldsPieces` keeps pieces with parameters in HELD, not among the attributes
            if name in pieces or name not in own or name in own.get(HELD, ()):
                setattr(other, name, pieces[name] if name in pieces else getattr(self, name))
            else:  # checked by this attention, and without parameters to register
                vars(other)[name] = own[name]
        # set here only: the pieces belong to other modules too
        vars(other).update(dropout=self.dropout, training=self.training)
        return other

    def with_mask(self, mask: Mask | None) -> Attention:
        """An `Attention` of the same pieces with another mask."""
        return self.with_pieces(mask=mask)

    def with_mask_too(self, mask: Mask) -> Attention:
        """This `Attention` with its mask joined to this mask, `&`."""
        return self.with_pieces(mask=mask if self.mask is None else self.mask & mask)

    def of_heads(self, head: Tensor) -> Attention:
        """The pieces for scores of some query heads (indices); biases read the numbers of heads from the grid."""
        normalizer = self.normalizer.of_heads(head)
        if normalizer is self.normalizer:
            return self
        other = self.with_pieces(normalizer=normalizer)
        vars(other)["shared"] = self.shared  # with this, the pieces of a snapshot are a snapshot too
        return other

    def pieces(self) -> list[Any]:
        """The pieces in all slots."""
        slots = (self.score, self.position, *self.bias, self.mask, self.normalizer, self.transition, self.selection)
        return [piece for piece in slots if piece is not None]

    def check(self, sizes: Sizes, positions: Positions, key_dim: int) -> None:
        """Refuse sizes that do not fit one of the pieces. `key_dim` is the width of the keys."""
        self.family.check_pieces(self)
        self.score.check(sizes, key_dim)
        self.normalizer.check(sizes)
        for bias in self.bias:
            bias.check(sizes)
        if self.mask is not None:
            self.mask.check(sizes, positions)
        if self.selection is not None:
            self.selection.check(sizes)
        if self.transition is not None:
            self.transition.check(sizes, positions)

    def __repr__(self) -> str:
        slots = {"score": self.score, "position": self.position, "bias": self.bias, "mask": self.mask}
        slots |= {"selection": self.selection}
        slots |= {"normalizer": self.normalizer} if self.transition is None else {"transition": self.transition}
        slots |= {"dropout": self.dropout}
        filled = [f"{name}={piece!r}" for name, piece in slots.items() if piece is not None and piece not in ((), 0.0)]
        return f"Attention({', '.join(filled)})"


def checked_mechanism(owner: str, mechanism: object) -> Mechanism:
    """Return a mechanism unchanged; for anything else raise a `RegardError` with the remedy."""
    if type(mechanism) is Attention or isinstance(mechanism, Mechanism):  # `isinstance` of an abstract class is slow
        return mechanism
    return checked_attention(owner, mechanism)


def checked_attention(owner: str, attention: object) -> Attention:
    """Return an `Attention` unchanged; for anything else raise a `RegardError` with the remedy."""
    if isinstance(attention, Attention):
        return attention
    got = repr(attention)[:60] if isinstance(attention, str | Mask) else type(attention).__name__
    raise RegardError(f"{owner} must be a regard.Attention, got {got}. {Attention.remedy(attention)}")


def snapshot(attention: Attention) -> Attention:
    """A copy of the pieces as they are now, detached. Exchanged pieces and new parameter data do not change the copy.

    >>> import torch, regard as rg
    >>> attention = rg.Attention(normalizer=rg.normalizers.LearnedSink(1))
    >>> copy, attention.normalizer = snapshot(attention), rg.normalizers.LearnedSink(2)
    >>> attention.normalizer, copy.normalizer
    (LearnedSink(2), LearnedSink(1))
    """
    if attention.shared is not None:
        return attention
    tensors, template = split_tensors(attention)
    return snapshot_around([tensor_snapshot(tensor) for tensor in tensors], template)


def snapshot_around(tensors: Sequence[Tensor], template: PieceTemplate) -> Attention:
    """A snapshot from a template of `split_tensors`, and from the snapshots of its tensors."""
    copy: Attention = template.around(tensors)
    vars(copy)["shared"] = [tensor for tensor in tensors if not is_small(tensor)]
    return copy


P = TypeVar("P")
#: Why an attention with a transition has no normalizer.
NO_NORMALIZER = "with a transition the weights are not normalized, so there is no normalizer"
NO_NORMALIZER_REMEDY = "Leave it out; after an assignment: attention.normalizer = regard.normalizers.Softmax()."
EXAMPLES = {
    "score": "regard.Dot()",
    "position": "regard.RoPE(64)",
    "bias": "regard.ALiBi(8)",
    "mask": "regard.causal()",
    "normalizer": "regard.normalizers.Softmax()",
    "selection": "regard.selections.BlockMeans(size=64, k=8)",
    "transition": "regard.transitions.Delta()",
}


def _slot(name: str, piece: object, kind: type[P], optional: bool = False) -> P:
    """The piece, if it is of the kind of the slot `name`; None too if the slot is optional. Others are refused."""
    if isinstance(piece, kind) or (optional and piece is None):
        return piece  # type: ignore[return-value]
    if isinstance(piece, type):
        got, remedy = f"the class {piece.__name__}", f"Did you mean {piece.__name__}(...)?"
    elif isinstance(piece, Tensor):
        got, remedy = f"a tensor of {piece.dtype}", mask_remedy(piece)
    else:
        own = next((slot for slot, kind in [*SLOTS.items(), ("bias", Bias)] if isinstance(piece, kind)), None)
        remedy = f"Its slot is {own}=." if own else f"Pieces are objects, such as {EXAMPLES[name]}."
        got = f"{type(piece).__name__} {str(piece)[:60]!r}"
    raise RegardError(f"Attention({name}=...): expected a {kind.__name__}, got {got}. {remedy}")


@dataclass(frozen=True)
class Prepared:
    """The results of all O(n) work of the pieces, before any pair is computed.

    The score compares `query` and `key`. `rows` and `cols` are what each bias prepared for queries and for keys. Every
    tensor has the sequence on axis -2, so a tile is the same slice of each. `steps` are those of a transition, which
    only the recurrent engine and its map read.
    """

    query: Tensor
    key: Tensor
    rows: tuple[Tensor | None, ...]
    cols: tuple[Tensor | None, ...]
    steps: Steps | None = None

    @staticmethod
    def of(
        attention: Attention,
        query: Tensor,
        key: Tensor,
        positions: Positions,
        tensors: CallTensors = EMPTY,
        state_of: Callable[[Bias, Tensor, Tensor, Positions, CallTensors], State] | None = None,
    ) -> Prepared:
        """The prepared tensors. `tensors` are those that pieces need beside queries and keys.

        `state_of` prepares each bias, in place of its own `prepare`. The order matters: biases and the score receive
        encoded queries and keys, and biases receive them before the score projects them.
        """
        position = attention.position
        if position is not None:
            query, key = position.encode_both(query, key, positions, **tensors_for(position, tensors))
        prepare = _prepared_bias if state_of is None else state_of
        states = [prepare(bias, query, key, positions, tensors) for bias in attention.bias]
        query, key, steps = attention.family.prepared(attention, query, key, tensors)
        return Prepared(query, key, tuple(r for r, _ in states), tuple(c for _, c in states), steps)

    def tensors(self) -> list[Tensor]:
        """All tensors but those of the steps: the queries, the keys, and what the biases prepared."""
        return [t for t in (self.query, self.key, *self.rows, *self.cols) if t is not None]

    def with_tensors(self, tensors: Iterable[Tensor]) -> Prepared:
        """The same structure with other tensors, in the order of `tensors()`, and without steps."""
        source = iter(tensors)
        query, key = next(source), next(source)
        rows = tuple(None if r is None else next(source) for r in self.rows)
        return Prepared(query, key, rows, tuple(None if c is None else next(source) for c in self.cols))

    def on_rows(self) -> list[bool]:
        """For each of `tensors()`, whether its axis -2 runs over queries (else over keys)."""
        flags = [True, False, *(True for r in self.rows if r is not None)]
        return flags + [False for c in self.cols if c is not None]

    def tile(self, rows: slice | Tensor, cols: slice | Tensor) -> Prepared:
        """The queries `rows` and the keys `cols`, which are slices or indices of axis -2."""
        return Prepared(
            self.query[:, :, rows],
            self.key[:, :, cols],
            tuple(None if r is None else r[:, :, rows] for r in self.rows),
            tuple(None if c is None else c[:, :, cols] for c in self.cols),
        )

    def entries(self, entries: slice) -> Prepared:
        """Some batch entries."""
        return self.with_tensors(t[entries] for t in self.tensors())

    def select(self, batch: Tensor, head: Tensor) -> Prepared:
        """Some batch entries (b,) and query heads (h,), by indices on the host: tensors (b, h, n, W).

        Each query head gets a key head of its own, so the result has as many key heads as query heads.
        """
        key_head = head // (self.query.shape[1] // self.key.shape[1])
        return Prepared(
            pick(self.query, batch, head),
            pick(self.key, batch, key_head),
            tuple(None if r is None else pick(r, batch, head) for r in self.rows),
            tuple(None if c is None else pick(c, batch, head) for c in self.cols),
        )

    def detach(self) -> Prepared:
        rows, cols = _detached(self.rows), _detached(self.cols)
        return Prepared(self.query.detach(), self.key.detach(), rows, cols)


def _detached(states: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """What biases prepared, without graphs."""
    return tuple([t if t is None else t.detach() for t in states]) if states else states


def _prepared_bias(bias: Bias, query: Tensor, key: Tensor, positions: Positions, tensors: CallTensors) -> State:
    """What a bias computes for the queries and for the keys, from those of the tensors of the call that it needs."""
    return bias.prepare(query, key, positions, **tensors_for(bias, tensors))


class Family:
    """How an `Attention` computes weights from its pieces; `Attention.family` returns the class.

    Engines list the families that they compute. Maps of calls and calls of a ring are tables from a family to a class.
    """

    #: Its name in the catalog.
    name: ClassVar[str]
    #: Why an engine of other families cannot run it.
    refusal: ClassVar[str]
    #: The only engine that computes it, and what the engine is for; None if engines compete.
    engine: ClassVar[str | None] = None
    purpose: ClassVar[str] = ""
    #: Whether its engines apply the mask to pairs. A transition is causal by itself, and reads no positions.
    applies_mask: ClassVar[bool] = True

    @staticmethod
    def check_pieces(attention: Attention) -> None:
        """Refuse pieces that do not fit together."""
        if attention.normalizer.needs_nonnegative and not attention.score.nonnegative:
            raise RegardError(
                f"Attention: {type(attention.normalizer).__name__} divides by a sum, so it needs scores that are not "
                f"negative. Scores of {type(attention.score).__name__} may be. Use FeatureScore, or another normalizer."
            )

    @staticmethod
    def prepared(
        attention: Attention, query: Tensor, key: Tensor, tensors: CallTensors
    ) -> tuple[Tensor, Tensor, Steps | None]:
        """The queries and keys that the score prepared, from encoded ones, and the steps of a transition."""
        score = attention.score
        return *score.prepare(query, key, **tensors_for(score, tensors)), None

    @staticmethod
    def memory_pieces(attention: Attention) -> tuple[Any, ...]:
        """`Mechanism.memory_pieces`."""
        return ()


class Scored(Family):
    """w_ij = f(s_ij, r_i): a score of each pair, and a statistic of each row."""

    name = "scored"
    refusal = "it needs a transition, such as Attention(transition=GatedDelta())"


class Transported(Family):
    """w_ij = q_i . A_i ... A_{j+1} k_j: keys that a transition carries from token to token."""

    name = "transported"
    refusal = "a transition carries keys from token to token, and this engine scores pairs; use the recurrent engine"
    engine, purpose = "recurrent", "It is the engine of transitions."
    applies_mask = False

    @staticmethod
    def check_pieces(attention: Attention) -> None:
        Family.check_pieces(attention)
        if attention.mask is None or not attention.mask.is_lower_triangular:
            got = repr(attention.mask)
            raise RegardError(f"Attention: with a transition the mask is causal(), or left out; got {got}.")
        if dot_scale(attention.score, 1) is None:
            raise RegardError(
                f"Attention: a transition needs a score that is a dot product, such as Dot(), got {attention.score!r}."
            )
        if attention.normalizer != Softmax():  # the constructor has this one in the slot
            raise RegardError(f"Attention: {NO_NORMALIZER}, got {attention.normalizer!r}. {NO_NORMALIZER_REMEDY}")
        if attention.bias or attention.dropout or attention.selection is not None:
            piece = attention.bias or attention.selection or f"dropout={attention.dropout}"
            raise RegardError(f"Attention: a transition computes no single weights, which {piece!r} would change.")

    @staticmethod
    def prepared(
        attention: Attention, query: Tensor, key: Tensor, tensors: CallTensors
    ) -> tuple[Tensor, Tensor, Steps | None]:
        """The encoded queries and keys as they are, and the steps, which the score and the transition make of them."""
        assert attention.transition is not None
        return query, key, scaled_steps(attention.transition, attention.score, query, key, tensors)

    @staticmethod
    def memory_pieces(attention: Attention) -> tuple[Any, ...]:
        """The pieces that make the memory of a transition from the keys."""
        return attention.score, attention.position, attention.transition


@torch.no_grad()
def choose_keys(
    attention: Attention, query: Tensor, key: Tensor, positions: Positions, tensors: CallTensors = EMPTY
) -> Attention:
    """The attention with the keys that its selection chooses as a part of its mask, in place of the selection.

    Each call does this once, when its `Problem` is made, so engines and maps see a mask and no selection.
    `query` and `key` are those of the call: the encoding is applied here, because a selection compares encoded ones.
    """
    selection, mask = attention.selection, attention.mask
    if selection is None:
        return attention
    if not has_numbers(query):
        raise RegardError(
            f"attend: {type(selection).__name__} chooses keys by their numbers, which cannot be read inside torch.vmap "
            "or torch.export, or on the meta device. Make a mapped axis part of the batch axis."
        )
    if attention.position is not None:
        given = tensors_for(attention.position, tensors)
        query, key = attention.position.encode_both(query, key, positions, **given)
    with without_autocast(query.device):
        chosen = selection.choose(query, key, positions, mask, **tensors_for(selection, tensors))
    if not isinstance(chosen, Mask):
        raise RegardError(
            f"{type(selection).__name__}.choose must return a mask, such as regard.masks.chosen_keys(ids), got "
            f"{type(chosen).__name__}."
        )
    resolved = attention.with_mask_too(chosen)
    resolved.selection = None
    return resolved


def scores(attention: Attention, tile: Prepared, grid: Grid, masked: bool = True) -> Tensor:
    """The scores of a tile, biases applied and masked: (B, H, I, J), in float32 at least.

    All engines but the fused ones, and all maps, compute scores here.
    """
    with without_autocast(tile.query.device):  # autocast would round the scores
        s = attention.score.tile(at_least_float32(tile.query), at_least_float32(tile.key), grid)
        for bias, rows, cols in zip(attention.bias, tile.rows, tile.cols, strict=True):
            s = bias.transform(s, grid, rows, cols)
    if attention.mask is None or not masked:
        return s
    return s.masked_fill(~attention.mask.allowed(grid), attention.normalizer.masked_score)


def hides_gradients(pieces: PieceTemplate, tensors: Sequence[Tensor], prepared: Prepared, grid: Grid) -> bool:
    """Whether a piece depends on a tensor that requires gradients but is not stored in the piece.

    `tensors` are those that were found in the pieces. One pair is scored with all of them detached. If its weight still
    requires a gradient, a tensor was not found. Pieces of this package store all of theirs, so they are not tested.
    """
    if not (pieces.is_foreign and torch.is_grad_enabled()):
        return False
    attention, first = pieces.around(t.detach() for t in tensors), slice(0, 1)
    s = scores(attention, prepared.detach().tile(first, first), grid.tile(first, first))
    return attention.normalizer.normalize_rows(s, grid.key.new_zeros(1))[0].requires_grad


def makes_new_scores(attention: Attention) -> bool:
    """Whether `scores` without a mask returns a new tensor, which may be overwritten.

    A piece that a user wrote may return a tensor that it keeps: the scores of a Synthesizer are a parameter. The pieces
    of this package return new tensors, and only the piece that is applied last counts.
    """
    last = type(attention.bias[-1]).transform if attention.bias else type(attention.score).tile
    return (last.__module__ or "").startswith("regard.")
