"""What the numbers in a tensor mask mean: which of them hide a key, and the code that makes the mask."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.base.shapes import has_numbers

#: If an additive mask holds only 0 and one other number, that number hides a key if it is at most this.
LARGEST_MASKED = -1e4
#: In any additive mask, a number this far below the largest of its row hides its key (float16: half its least number).
FAR_BELOW = -1e8
#: What a kept and an excluded number mean, for each kind of mask.
KEPT = {"mask_tensor": "may attend", "padding": "real"}
EXCLUDED = {"mask_tensor": "may not attend", "padding": "padding"}


def mask_remedy(value: object, mask: str = "mask_tensor") -> str:
    """The code that makes a mask of a tensor, which has the name "mask" in this code. Errors about masks end with it.

    `mask` is the function that the code calls, here and below: "mask_tensor" for pairs, or "padding" for keys, which it
    becomes if the shape is one of keys. Tensors of 1 and 0 have two conventions. The future, the diagonal and rows
    without any key tell them apart.

    >>> import torch
    >>> print(mask_remedy(torch.ones(3, 3).triu(1)))
    It holds 1 and 0. All keys after their query are 1, so 1 = may not attend:
      regard.mask_tensor(mask == 0) (6 of 9 True). If 1 = may attend: regard.mask_tensor(mask.bool()) (3 of 9 True).
    """
    if not isinstance(value, Tensor):
        return (
            "A mask is a piece, with True = may attend: regard.causal(), regard.padding(real), regard.mask_tensor(...)."
        )
    if is_of_keys(value):
        mask = "padding"
    if value.dtype == torch.bool:
        return _of_booleans(value, mask)
    if value.is_complex() or not has_numbers(value) or not value.numel():
        return f"Convert it first: regard.{mask}(mask.bool()) if 1 = {KEPT[mask]}, regard.{mask}(mask == 0) if 0."
    if ((value == 0) | (value == 1)).all():
        return _of_ones_and_zeros(value, mask)
    if ((value == 0) | (value <= LARGEST_MASKED)).all():
        masked = f"{float(value.min()):.4g}"
        code = _code(value, value == 0, mask, "mask == 0")
        return f"It holds 0 and {masked}, which are added to scores, so 0 = {KEPT[mask]}: {code}."
    if value.is_floating_point() and value.isnan().any():
        return f"It holds NaN: (1 - mask) * -inf is NaN where mask is 1. Give the boolean tensor, True = {KEPT[mask]}."
    if mask == "padding" and value.ndim == 1:
        return "Lengths are integers: regard.padding(mask.long())."
    return (
        f"It holds numbers from {float(value.min()):.4g} to {float(value.max()):.4g}. If they are added to the scores, "
        "they are a bias: regard.biases.LearnedTable or your own AdditiveBias."
    )


def hides(added: Tensor) -> Tensor:
    """Which numbers (..., keys) of an additive mask leave their key no weight: True = hidden, of the same shape.

    Softmax reads differences within a row. So a row of equal numbers hides nothing, unless they are -inf.

    >>> import torch
    >>> hides(torch.tensor([[0.0, -1e4], [-1e4, -1e4]])), hides(torch.tensor([-2000.0, -1999.0, -torch.inf]))
    (tensor([[False,  True],
            [False, False]]), tensor([False, False,  True]))
    """
    lowest = added.amin()
    is_mask = bool(lowest <= LARGEST_MASKED) and bool(((added == 0) | (added == lowest)).all())
    far = LARGEST_MASKED if is_mask else max(FAR_BELOW, torch.finfo(added.dtype).min / 2)
    return added.isneginf() | (added - added.amax(-1, keepdim=True) <= far)


def is_of_keys(value: Tensor) -> bool:
    """Whether the shape is (batch, 1, 1, keys) or (batch, 1, keys): a `mask_tensor` would need a row for each query."""
    return value.ndim > 2 and set(value.shape[1:-1]) == {1}


def _of_booleans(value: Tensor, mask: str) -> str:
    """The code for both senses of True; "" if the sense is known."""
    if mask == "padding" and value.ndim < 3:
        return ""  # only its shape is wrong
    return (
        f"A boolean tensor becomes a mask by regard.{mask}(mask) if True = {KEPT[mask]}, by regard.{mask}(~mask) if "
        f"True = {EXCLUDED[mask]}, as in torch's modules."
    )


def _of_ones_and_zeros(value: Tensor, mask: str) -> str:
    """Both conventions, the one that the numbers show first."""
    allowed = f"1 = {KEPT[mask]}: {_code(value, value != 0, mask, 'mask.bool()')}"
    masked = f"1 = {EXCLUDED[mask]}: {_code(value, value == 0, mask, 'mask == 0')}"
    evidence = _evidence(value, has_pairs=mask == "mask_tensor")
    if evidence is None:
        return f"It holds 1 and 0, and nothing shows which of them is {KEPT[mask]!r}. If {allowed}. If {masked}."
    reason, one_is_allowed = evidence
    first, other = (allowed, masked) if one_is_allowed else (masked, allowed)
    return f"It holds 1 and 0. {reason}, so {first}. If {other}."


def _code(value: Tensor, allowed: Tensor, mask: str, expression: str) -> str:
    """The call that makes the mask, and the number of pairs or keys that it allows."""
    if mask == "mask_tensor" and value.ndim == 3:  # (batch, queries, keys), without the axis of heads
        expression = f"({expression})[:, None]"
    return f"regard.{mask}({expression}) ({int(allowed.sum())} of {allowed.numel()} True)"


def _evidence(value: Tensor, has_pairs: bool) -> tuple[str, bool] | None:
    """The evidence for the sense of 1 and 0, and whether 1 = may attend; None if there is none, or it disagrees.

    `has_pairs`: the last two axes are queries and keys.
    """
    if has_pairs and value.ndim >= 2 and value.shape[-1] == value.shape[-2] > 1:
        pairs = torch.ones(value.shape[-2:], dtype=torch.bool, device=value.device)
        diagonal = _common(value[..., pairs.triu() & pairs.tril()])
        later, earlier = _common(value[..., pairs.triu(1)]), _common(value[..., pairs.tril(-1)])
        if later is not None and later != earlier:  # a causal mask, unless the diagonal is like the future
            return None if later == diagonal else (f"All keys after their query are {later}", later == 0)
        if diagonal is not None and later is None:
            return f"The diagonal is {diagonal}", diagonal == 1
    has_empty, has_full = bool((value == 0).all(-1).any()), bool((value == 1).all(-1).any())
    if has_empty == has_full:
        return None
    return f"A row is all {int(has_full)}, and a query needs a key", has_full


def means_may_not_attend(mask: Tensor) -> bool:
    """Whether exactly the keys after their query are True: the causal mask of `nn.MultiheadAttention`."""
    if mask.shape[-1] != mask.shape[-2] or mask.shape[-1] < 2 or not has_numbers(mask):
        return False
    pairs = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device)
    return _common(mask[..., pairs.triu(1)]) == 1 and _common(mask[..., pairs.tril()]) == 0


def _common(numbers: Tensor) -> int | None:
    """The number that all of them are; None if they differ."""
    first = numbers.flatten()[0]
    return int(first) if bool((numbers == first).all()) else None
