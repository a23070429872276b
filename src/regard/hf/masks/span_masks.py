"""A mask tensor without numbers: what a model of transformers passes from its mask function to its backend."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.hf.masks.mask_functions import MaskFunction, Rules
from regard.hf.masks.mask_tensors import Recognised
from regard.pieces.grid import Grid
from regard.pieces.mask import Mask
from regard.pieces.mask_data import padding

#: The name that models know Regard's engines by.
OURS = "regard"
aten = torch.ops.aten
#: What changes nothing of a boolean tensor but where it lies.
SAME = {aten.detach.default, aten.alias.default, aten.clone.default, aten.contiguous.default}


class SpanMask(Tensor):
    """Looks like a boolean tensor (B, 1, I, J) and holds a rule and where queries and keys stand instead.

    Models hand masks on, and cut them to the keys they have; both keep the rule. Whatever else is done
    with it is done with the tensor written out, and a warning says so.
    """

    rule: Recognised

    @staticmethod
    def __new__(cls, rule: Recognised, shape: tuple[int, ...], device: torch.device | str) -> SpanMask:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)  # type: ignore[attr-defined]

    def __init__(self, rule: Recognised, shape: tuple[int, ...], device: torch.device | str) -> None:
        self.rule = rule

    def recognised(self, num_batch: int, num_queries: int, num_keys: int) -> Recognised:
        """The rule, for a call of these sizes; a `RegardError` where it was made for others."""
        B, _, I, J = self.shape
        free = self.rule.mask is None or self.rule.mask.keys_only
        if num_keys != J or (B not in (1, num_batch)) or (num_queries != I and not free):
            raise RegardError(
                f"regard: the mask was made for batch {B}, {I} queries and {J} keys, and is used with batch "
                f"{num_batch}, {num_queries} queries and {num_keys} keys. Make it for the sizes of the call, or use "
                "attn_implementation='sdpa'."
            )
        return self.rule

    def written_out(self) -> Tensor:
        """The boolean tensor itself, (B, 1, I, J)."""
        B, _, I, J = self.shape
        if self.rule.mask is None:
            return torch.ones(self.shape, dtype=torch.bool, device=self.device)
        grid = Grid.whole(self.rule.positions(I, J), B, 1, I, self.device)
        return self.rule.mask.allowed(grid).expand(self.shape).contiguous()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SpanMask({tuple(self.shape)}, {self.rule.mask!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = _kept(func, args, kwargs or {})
        if kept is not None:
            return kept
        warnings.warn(
            f"regard: the model computes {func} on its mask, which is written out for that as a tensor of all pairs.",
            stacklevel=2,
        )
        args, kwargs = (_each(given, _plain) for given in (args, kwargs or {}))
        return func(*args, **kwargs)


def _kept(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SpanMask | None:
    """The result of an operation that keeps the rule, or None: it needs the numbers."""
    mask = args[0] if args else None
    if not isinstance(mask, SpanMask):
        return None
    if func in SAME or (func is aten._to_copy.default and kwargs.get("dtype") in (None, torch.bool)):
        return SpanMask(mask.rule, tuple(mask.shape), kwargs.get("device") or mask.device)
    return _cut(mask, *args[1:]) if func is aten.slice.Tensor else None


def _cut(mask: SpanMask, axis: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Any:
    """A slice of the mask, where that is a stretch of its queries or of its keys."""
    size, axis = mask.shape[axis], axis % 4
    start, stop, _ = slice(start, stop).indices(size)
    if (start, stop, step) == (0, size, 1):
        return SpanMask(mask.rule, tuple(mask.shape), mask.device)
    if step != 1 or axis < 2 or start >= stop:
        return None
    I, J = mask.shape[2:]
    rule, placed = mask.rule, mask.rule.positions(I, J)
    at = (placed.start + start, rule.first) if axis == 2 else (placed.start, rule.first + start)
    shape = [*mask.shape]
    shape[axis] = stop - start
    return SpanMask(Recognised(rule.mask, *at), tuple(shape), mask.device)


def _plain(given: Any) -> Any:
    return given.written_out() if isinstance(given, SpanMask) else given


def _each(given: Any, change: Any) -> Any:
    """`change` of everything in nested lists and dictionaries."""
    if isinstance(given, dict):
        return {name: _each(value, change) for name, value in given.items()}
    if isinstance(given, (list, tuple)):
        return type(given)(_each(value, change) for value in given)
    return change(given)


def spans_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    *,
    mask_function: MaskFunction,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> SpanMask | None:
    """The mask that transformers asks its backends for, as a rule: O(n) for the padding, O(1) for the rest."""
    start, first = int(q_offset), int(kv_offset)
    last = first + kv_length
    rule = Rules(max(last, start + q_length), use_vmap).read(mask_function)
    real = None if attention_mask is None else _real(attention_mask.bool(), first, last)
    if rule is None and real is None and allow_is_bidirectional_skip:
        return None
    mask = real if rule is None else rule if real is None else rule & real
    return SpanMask(Recognised(mask, start, first), (batch_size, 1, q_length, kv_length), device)


def _real(attention_mask: Tensor, first: int, last: int) -> Mask | None:
    """Which keys are no padding, by position; None: all are. Beyond the vector nothing is written yet."""
    missing = last - attention_mask.shape[1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return None if bool(attention_mask[:, first:last].all()) else padding(attention_mask)
