"""Arguments that change the attention of one call: `mask`, `is_causal`, `scale` and `dropout_p`, with torch's meaning.

A mask is a piece, or a tensor as torch takes it: booleans (True = may attend), or numbers that are added to the scores.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from itertools import compress
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.attention import Attention
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import Sizes, has_numbers, unusual_kind
from regard.engine.kept_plans import constant_key
from regard.engine.transforms import is_transformed
from regard.pieces.bias import Bias
from regard.pieces.data_masks import mask_tensor, padding
from regard.pieces.fingerprint import NUMBERS, fingerprint, never_changes
from regard.pieces.mask import Mask, causal, conjuncts
from regard.pieces.mask_conventions import hides, mask_remedy, means_may_not_attend
from regard.pieces.score import Dot
from regard.pieces.tensor_bias import LearnedBias, bias_of


class CallOptions(NamedTuple):
    """The arguments of a call that change its attention."""

    mask: Mask | Tensor | None = None
    is_causal: bool = False
    scale: float | Tensor | None = None
    dropout_p: float = 0.0

    def __bool__(self) -> bool:
        """Whether one of them is not its default."""
        is_default = self.mask is None and self.is_causal is False and self.scale is None
        return not (is_default and self._keeps_all)

    @property
    def _given(self) -> tuple[bool, ...]:
        """For each argument, whether it differs from its default."""
        return self.mask is not None, self.is_causal is not False, self.scale is not None, not self._keeps_all

    @property
    def _keeps_all(self) -> bool:
        """Whether the call drops no weights: `dropout_p` is the number 0."""
        return (type(self.dropout_p) is float or isinstance(self.dropout_p, Real)) and self.dropout_p == 0

    def applied(self, attention: Any, sizes: Sizes, positions: Positions | None, earlier: int | None) -> Attention:
        """The attention with these options; the one of an earlier call, if both have the same pieces and options.

        `earlier` is the number of keys in a cache; None without a cache.
        """
        for name in compress(self._fields, self._given):
            attention.check_option(name)
        added = bias = None
        if self.mask is not None:
            added, bias = read_mask("attend", self.mask, sizes, positions, sizes.J + (earlier or 0))
        if _checked_flag(self.is_causal):
            _check_alignment(sizes, positions, earlier)
        key = self._key(attention, added) if bias is None else None
        of_call = None if key is None else _kept_attentions.get(key)
        if of_call is None:
            of_call = self._changed(attention, added, bias)
            if key is not None:
                if len(_kept_attentions) >= MOST_KEPT:
                    _kept_attentions.clear()
                _kept_attentions[key] = of_call
        return of_call

    def _key(self, attention: Any, added: Mask | None) -> Hashable:
        """What the attention of a call depends on; None if it may differ from call to call."""
        is_plain = type(attention) is Attention and self._keeps_all and type(self.scale) in NUMBERS
        if not is_plain or not (added is None or never_changes(added)):
            return None
        if (pieces := constant_key(attention)) is None:
            return None
        of_options = fingerprint(added, []), self.is_causal, type(self.scale), self.scale
        return pieces, attention.dropout, attention.training, *of_options

    def _changed(self, attention: Any, added: Mask | None, bias: Bias | None) -> Attention:
        """A new attention with these options. `read_mask` read `added` and `bias` from the argument `mask`."""
        mask, changed = _joined(attention.mask, added), {}
        if bias is not None:
            changed["bias"] = (*attention.bias, bias)
        if self.is_causal:
            mask = mask if mask is not None and causal() in conjuncts(mask) else _joined(mask, causal())
        if mask is not attention.mask:
            changed["mask"] = mask
        if self.scale is not None:
            changed["score"] = _scaled(attention, self.scale)
        of_call = attention.with_pieces(**changed)
        return of_call if self._keeps_all else _dropping(of_call, self.dropout_p)


#: Attentions of calls with options, by what they depend on, because making one takes longer than a small call. At
#: `MOST_KEPT` all are dropped.
_kept_attentions: dict[Hashable, Attention] = {}
MOST_KEPT = 32


def _joined(mask: Mask | None, added: Mask | None) -> Mask | None:
    """What both masks allow; None hides nothing."""
    if mask is None or added is None:
        return added if mask is None else mask
    return mask & added


def _checked_flag(is_causal: object) -> bool:
    if isinstance(is_causal, bool):
        return is_causal
    raise RegardError(f"attend(is_causal=...): is_causal is True or False, got {type(is_causal).__name__}.")


def _check_alignment(sizes: Sizes, positions: Positions | None, earlier: int | None) -> None:
    """Refuse a causal mask for which torch and flash-attn differ, if the caller says nothing about positions."""
    if sizes.I == sizes.J or positions is not None or earlier is not None:
        return
    raise RegardError(
        f"attend(is_causal=True): {sizes.I} queries and {sizes.J} keys can be aligned in two ways. The last query "
        "attends to all keys, as in flash-attn: mask=regard.causal(). The first query attends to the first key only, "
        "as in torch: regard.scaled_dot_product_attention(query, key, value, is_causal=True), or "
        f"positions=regard.types.Positions.of(0, {sizes.I}, {sizes.J})."
    )


def _scaled(attention: Attention, scale: object) -> Dot:
    """The dot product with the factor of the call."""
    score = attention.score
    if not isinstance(scale, Real | Tensor) or isinstance(scale, bool):
        raise RegardError(f"attend(scale=...): scale is a number, or a tensor, got {type(scale).__name__}.")
    if isinstance(scale, int) and not -sys.float_info.max <= scale <= sys.float_info.max:
        raise RegardError("attend(scale=...): scale is too large for a float.")
    if type(score) is not Dot:
        raise RegardError(
            f"attend(scale={scale!r}): scale is the factor of a dot product, and this attention has {score!r}."
        )
    if score.factor is not None:
        raise RegardError(
            f"attend(scale={scale!r}): the score has a factor already, {score!r}. Give one of the two: a call with "
            "scale needs regard.Dot()."
        )
    # torch multiplies by no integer beyond 64 bits
    return Dot(scale=float(scale) if isinstance(scale, int) else scale)  # type: ignore[arg-type]


def _dropping(attention: Attention, share: object) -> Attention:
    """The attention with dropout in this call, as torch's function has it: in eval mode too."""
    if not isinstance(share, Real) or isinstance(share, bool) or not 0 <= share < 1:  # type: ignore[operator]
        raise RegardError(f"attend(dropout_p={share!r}): the share of dropped weights is in [0, 1).")
    if attention.dropout:
        raise RegardError(
            f"attend(dropout_p={share}): the attention has dropout={attention.dropout} already. Give one of the two."
        )
    attention.dropout, attention.training = float(share), True
    return attention


# Masks of a call


def read_mask(
    call: str, mask: object, sizes: Sizes, positions: Positions | None, num_keys: int
) -> tuple[Mask | None, Bias | None]:
    """The argument `mask` of a call: which pairs it allows (None: all), and what it adds to scores (None: nothing).

    `call` is the name of the function for errors. `num_keys` counts the keys of a cache too.
    """
    if isinstance(mask, Mask):
        return mask, None
    if not isinstance(mask, Tensor):
        got = f"the class {mask.__name__}" if isinstance(mask, type) else type(mask).__name__
        raise RegardError(f"{call}(mask=...): expected a mask or a tensor, got {got}. {mask_remedy(mask)}")
    if kind := unusual_kind(mask):
        raise RegardError(f"{call}(mask=...): the mask is {kind}. Give a dense tensor of booleans or real numbers.")
    if positions is not None and positions != Positions.aligned_to_end(sizes.I, sizes.J):
        raise RegardError(
            f"{call}(mask=...): a tensor has a row for each query and a column for each key in their order, and this "
            "call has positions of its own. Give a piece: regard.mask_tensor(mask) has a row for each position."
        )
    return kept_masks.read(call, mask, sizes, num_keys)


def _read(call: str, mask: Tensor, sizes: Sizes, num_keys: int) -> tuple[Mask | None, Bias | None]:
    """`read_mask` for a tensor, which is not compared with earlier ones."""
    tensor = _four_axes(call, mask, sizes, num_keys)
    if 0 in (sizes.B, sizes.I, num_keys):
        return None, None
    if mask.dtype == torch.bool:
        return _of_booleans(call, tensor, sizes, num_keys), None
    return _of_numbers(call, mask, tensor, sizes, num_keys)


class KeptMasks:
    """The masks of the latest calls that were given as tensors: an equal tensor becomes the same mask.

    To compare a tensor with an earlier one takes a hundredth of the time of finding its spans.
    """

    #: Most tensors, and most bytes of all of them.
    MOST, MOST_BYTES = 8, 16 << 20

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Tensor, tuple[Mask | None, Bias | None]]] = {}

    def read(self, call: str, mask: Tensor, sizes: Sizes, num_keys: int) -> tuple[Mask | None, Bias | None]:
        """`read_mask` for a tensor: what the latest call with such sizes read, if its tensor was equal."""
        if not self._may_keep(mask):
            return _read(call, mask, sizes, num_keys)
        shape = mask.shape, mask.dtype, sizes.B, sizes.H, sizes.I, num_keys
        earlier = self._kept.get(shape)
        if earlier is not None and _are_equal(earlier[0], mask):
            read = earlier[1]
            if read[0] is not None:
                # a kept mask may be part of a kept plan: not at its first call, because many tensors come only once
                vars(read[0])["is_kept"] = True
            return read
        copy = mask.clone()
        read = _read(call, copy, sizes, num_keys)
        self._kept[shape] = copy, read
        self._forget_oldest()
        return read

    def _forget_oldest(self) -> None:
        """Drop the oldest tensors until both limits hold."""
        kept = list(self._kept.items())
        total = sum(copy.nbytes for _, (copy, _) in kept)
        for number, (shape, (copy, _)) in enumerate(kept):
            if len(kept) - number <= self.MOST and total <= self.MOST_BYTES:
                return
            self._kept.pop(shape, None)  # another thread may have done it
            _kept_attentions.clear()  # they hold masks
            total -= copy.nbytes

    def _may_keep(self, mask: Tensor) -> bool:
        """Whether the numbers of a mask can be compared now, and its copy is not too large."""
        is_plain = type(mask) is Tensor and mask.is_cpu and not mask.requires_grad and not is_transformed()
        return is_plain and has_numbers(mask) and mask.numel() * mask.element_size() <= self.MOST_BYTES


def _are_equal(mask: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype have equal numbers; NumPy compares booleans in a fifth of the time."""
    if mask.dtype is torch.bool:
        return np.array_equal(mask.numpy(), other.numpy())
    return torch.equal(mask, other)


#: The masks of this process.
kept_masks = KeptMasks()


def _four_axes(call: str, mask: Tensor, sizes: Sizes, num_keys: int) -> Tensor:
    """The tensor as (batch or 1, heads or 1, queries or 1, keys or 1)."""
    pairs, keys = (sizes.I, num_keys), (sizes.B, num_keys)
    if mask.shape == pairs == keys and sizes.B > 1:
        raise RegardError(
            f"{call}(mask=...): the shape {tuple(mask.shape)} is that of pairs (queries, keys) and of the keys of each "
            "batch entry. Say which: mask[None, None] for pairs, mask[:, None, None] for keys."
        )
    if mask.shape == pairs:
        return mask[None, None]
    if mask.shape == keys:
        return mask[:, None, None]
    whole = (sizes.B, sizes.H, sizes.I, num_keys)
    if mask.ndim == 4 and all(own in (1, size) for own, size in zip(mask.shape, whole, strict=True)):
        return mask
    by_axis = " (batch, queries, keys) becomes mask[:, None], and (heads, queries, keys) becomes mask[None]."
    remedy = by_axis if mask.ndim == 3 else ""
    raise RegardError(
        f"{call}(mask=...): the mask has shape {tuple(mask.shape)}. Expected {pairs} (queries, keys), {keys} (batch, "
        f"keys), or {whole} (batch, heads, queries, keys), where an axis may be 1.{remedy}"
    )


def _of_booleans(call: str, allowed: Tensor, sizes: Sizes, num_keys: int) -> Mask:
    """The mask of a boolean tensor with four axes, True = may attend."""
    if allowed.shape[1:3] == (1, 1):
        return padding(allowed[:, 0, 0].expand(sizes.B, num_keys))
    if means_may_not_attend(allowed):
        raise RegardError(
            f"{call}(mask=...): every key after its query is True, and no query attends to itself or earlier keys, so "
            "True seems to mean: may not attend, as in nn.MultiheadAttention. Here True = may attend: mask=~mask. If "
            "it is meant: mask=regard.mask_tensor(mask)."
        )
    return mask_tensor(allowed.expand(-1, -1, sizes.I, num_keys))


def _of_numbers(call: str, mask: Tensor, added: Tensor, sizes: Sizes, num_keys: int) -> tuple[Mask | None, Bias | None]:
    """A tensor of numbers that are added to the scores: those that hide their key are a mask, the others a bias.

    `mask` is the tensor of the caller, and `added` the same with four axes.
    """
    whole = added.expand(-1, -1, sizes.I, num_keys)
    positions = Positions.aligned_to_end(sizes.I, num_keys)
    if mask.requires_grad and mask.is_floating_point():
        return None, LearnedBias(whole, positions)
    if not mask.is_floating_point() or _is_doubtful(mask):
        raise RegardError(f"{call}(mask=...): got a tensor of {mask.dtype}. {mask_remedy(mask)}")
    if not has_numbers(mask):  # traced: which of them hide a key is unknown, and as a bias they hide it too
        return None, bias_of(added, positions, sizes.I, num_keys)
    hidden = hides(added)
    rest = added.masked_fill(hidden, 0)
    bias = bias_of(rest, positions, sizes.I, num_keys) if bool(rest.any()) else None
    return (_of_booleans(call, ~hidden, sizes, num_keys) if bool(hidden.any()) else None), bias


def _is_doubtful(mask: Tensor) -> bool:
    """Whether the caller may mean a boolean mask, with numbers that are all 1 and 0, or the numbers hold NaN."""
    if not has_numbers(mask) or not mask.numel():
        return False
    return bool(mask.isnan().any()) or bool((mask == 1).any() & ((mask == 0) | (mask == 1)).all())
