"""`SpanMask`: a mask tensor that holds a rule instead of numbers, for models that run on Regard's engines."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from regard.base.errors import RegardError
from regard.hf.masks.mask_functions import MaskFunction, MaskFunctionReader
from regard.hf.masks.mask_tensors import Recognized
from regard.pieces.data_masks import padding
from regard.pieces.grid import Grid
from regard.pieces.mask import Mask

#: The name of Regard's backend in transformers.
OURS = "regard"
aten = torch.ops.aten
#: Operations that keep the values of a boolean tensor.
SAME = {aten.detach.default, aten.alias.default, aten.clone.default, aten.contiguous.default}


class SpanMask(Tensor):
    """Has the type of a boolean tensor (B, 1, I, J), but holds a rule and the positions of queries and keys.

    Models pass masks on and slice them to their keys; both keep the rule. Any other operation runs on the dense
    boolean tensor, with a warning.
    """

    rule: Recognized

    @staticmethod
    def __new__(cls, rule: Recognized, shape: tuple[int, ...], device: torch.device | str) -> SpanMask:
        """A tensor with a type and a shape, but without memory for its entries."""
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)  # type: ignore[attr-defined]

    def __init__(self, rule: Recognized, shape: tuple[int, ...], device: torch.device | str) -> None:
        self.rule = rule

    def recognized(self, num_batch: int, num_queries: int, num_keys: int) -> Recognized:
        """The rule for a call of these sizes; a `RegardError` if the mask has other sizes."""
        B, _, I, J = self.shape
        free = self.rule.mask is None or self.rule.mask.keys_only
        if num_keys != J or (B not in (1, num_batch)) or (num_queries != I and not free):
            raise RegardError(
                f"regard: the mask has batch {B}, {I} queries and {J} keys, but the call has batch {num_batch}, "
                f"{num_queries} queries and {num_keys} keys. Build it for the sizes of the call, or use "
                "attn_implementation='sdpa'."
            )
        return self.rule

    def dense(self) -> Tensor:
        """The boolean tensor (B, 1, I, J)."""
        B, _, I, J = self.shape
        if self.rule.mask is None:
            return torch.ones(self.shape, dtype=torch.bool, device=self.device)
        grid = Grid.whole(self.rule.positions(I, J), B, 1, I, self.device)
        return self.rule.mask.allowed(grid).expand(self.shape).contiguous()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SpanMask({tuple(self.shape)}, {self.rule.mask!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch calls this in place of the operation `func`, if a `SpanMask` is among its arguments."""
        kept = _kept(func, args, kwargs or {})
        if kept is not None:
            return kept
        warnings.warn(
            f"regard: the model computes {func} on its mask, so the mask becomes a dense tensor of all pairs.",
            stacklevel=2,
        )
        args, kwargs = (_map_nested(values, _dense) for values in (args, kwargs or {}))
        return func(*args, **kwargs)


def _kept(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SpanMask | None:
    """The result of an operation that keeps the rule; None for other operations."""
    mask = args[0] if args else None
    if not isinstance(mask, SpanMask):
        return None
    if func in SAME or (func is aten._to_copy.default and kwargs.get("dtype") in (None, torch.bool)):
        return SpanMask(mask.rule, tuple(mask.shape), kwargs.get("device") or mask.device)
    return _cut(mask, *args[1:]) if func is aten.slice.Tensor else None


def _cut(mask: SpanMask, axis: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Any:
    """A slice of consecutive queries (`axis` 2) or keys (3) of the mask; None for any other slice.

    `start`, `stop` and `step` are as in torch's `slice`.
    """
    size, axis = mask.shape[axis], axis % 4
    start, stop, _ = slice(start, stop).indices(size)
    if (start, stop, step) == (0, size, 1):
        return SpanMask(mask.rule, tuple(mask.shape), mask.device)
    if step != 1 or axis < 2 or start >= stop:
        return None
    I, J = mask.shape[2:]
    rule, query_start = mask.rule, mask.rule.positions(I, J).start
    at = (query_start + start, rule.first) if axis == 2 else (query_start, rule.first + start)
    shape = [*mask.shape]
    shape[axis] = stop - start
    return SpanMask(Recognized(rule.mask, *at), tuple(shape), mask.device)


def _dense(value: Any) -> Any:
    return value.dense() if isinstance(value, SpanMask) else value


def _map_nested(values: Any, change: Any) -> Any:
    """`change` applied to every value of nested lists and dictionaries."""
    if isinstance(values, dict):
        return {name: _map_nested(value, change) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)(_map_nested(value, change) for value in values)
    return change(values)


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
    """The mask that transformers requests from a backend, as a rule: O(n) memory for padding, O(1) for the rest.

    The lengths and offsets are the numbers of queries and keys, and the positions of the first ones. `mask_function` is
    the predicate of transformers, which with `use_vmap` takes one pair at a time. `attention_mask` (B, n) is 1 for keys
    that are no padding. With `allow_is_bidirectional_skip` the model takes None for a mask that allows all pairs.
    """
    start, first = int(q_offset), int(kv_offset)
    last = first + kv_length
    rule = MaskFunctionReader(max(last, start + q_length), use_vmap).read(mask_function)
    real = None if attention_mask is None else _real(attention_mask.bool(), first, last)
    if rule is None and real is None and allow_is_bidirectional_skip:
        return None
    mask = real if rule is None else rule if real is None else rule & real
    return SpanMask(Recognized(mask, start, first), (batch_size, 1, q_length, kv_length), device)


def _real(attention_mask: Tensor, first: int, last: int) -> Mask | None:
    """The keys that are not padding; None if there is none at the positions `first` to `last`.

    The model has not written keys behind the end of `attention_mask` (B, n) yet, so they are hidden.
    """
    missing = last - attention_mask.shape[1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return None if bool(attention_mask[:, first:last].all()) else padding(attention_mask)
