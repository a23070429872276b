"""A cache that is an argument, or two: tokens that come one after the other must have the outputs of one call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.diagnosis.calling import Caller, Inputs, tensors_of
from regard.diagnosis.failures import short_message
from regard.diagnosis.report import CheckFinding
from regard.diagnosis.weights import close

#: Tokens of the text, and of its last call where several tokens come at once (`_several_at_once`).
LENGTH, LAST = 5, 2
JOIN = "Join both at the end of the cache, along the axis of tokens: torch.cat((cache, new), -2)."
MASK = "The last query sees all keys: torch.ones(I, J).tril(J - I), for I new tokens and J keys."


@torch.no_grad()
def cache_finding(caller: Caller) -> CheckFinding | None:
    """Whether a function with a cache gives each token the output of one call; None if it has no cache."""
    if not caller.roles.caches or "n" not in caller.query_axes:
        return None
    caller = replace(caller, sizes=replace(caller.sizes, queries=LENGTH, keys=LENGTH))
    inputs = caller.sizes.sample(14, caller.dtype)
    try:
        return _compared(caller, inputs)
    except Exception as error:  # of the user's function
        text = f"It does not run token by token with the {_named(caller)} that it returns: {short_message(error)}"
        return CheckFinding("cache", "unknown", text, "Return the output, and the next cache as the last value.")


def _named(caller: Caller) -> str:
    """The arguments of the cache, in words."""
    return " and ".join(caller.roles.caches)


def _compared(caller: Caller, inputs: Inputs) -> CheckFinding:
    """The finding from decoding `inputs`, (B, H, LENGTH, D), token by token.

    The expected output of a token is the last one of a call without a cache, of the tokens up to it. So the function
    need not be causal.
    """
    ends = range(1, LENGTH + 1)
    expected = torch.cat([caller(*_part(inputs, 0, end)).output[:, :, -1:] for end in ends], 2)
    steps = list(_decoded(caller, inputs, list(ends)))
    found = torch.cat([output for output, _ in steps], 2)
    name = _named(caller)
    # where the last token was added to each tensor of the cache; "", for tensors where this is not seen, is left out
    sides = {_side(before, after) for before, after in zip(steps[-2][1], steps[-1][1], strict=False)} - {""}
    if close(found, expected):
        return _several_at_once(caller, inputs, expected, sides)
    if len(sides) == 2:
        text = f"New tokens stand at the end of one tensor of {name}, and at the beginning of another."
        mistake = "the cache joins keys and values in different orders"
        return CheckFinding("cache", "wrong", text, JOIN, mistake)
    alone = torch.cat([caller(*_part(inputs, at, at + 1)).output for at in range(LENGTH)], 2)
    text = "Token by token, the outputs are not those of one call."
    if close(found, alone):
        text = f"Token by token, each output is that of its token alone, without {name}."
        return CheckFinding("cache", "wrong", text, JOIN, "the cache is not used")
    if close(found, alone[:, :, :1].expand_as(found)):
        text = "Token by token, each output is that of the first token: each query sees the first key alone."
        return CheckFinding("cache", "wrong", text, MASK, "the causal mask does not count the keys of the cache")
    remedy = (
        f"New tokens stand at the end of {name}, so look at mask and positions. {MASK}" if sides == {"end"} else JOIN
    )
    return CheckFinding("cache", "wrong", text, remedy, "with a cache the outputs are others than in one call")


def _several_at_once(caller: Caller, inputs: Inputs, expected: Tensor, sides: set[str]) -> CheckFinding:
    """The finding for the last `LAST` tokens in one call, after a cache of the tokens before them.

    It is asked if decoding token by token is right, and the function is causal: then its mask must count the keys of
    the cache. `expected` (B, H, LENGTH, D) are the right outputs, and `sides` the ends of the cache where new tokens
    stand.
    """
    right = CheckFinding("cache", "right", "Token by token with the cache, the outputs are those of one call.")
    # one call of all tokens gives the outputs of its beginnings only if no token sees a later one
    is_causal = close(caller(*inputs).output, expected)
    if not is_causal:
        return right
    *_, (found, _) = _decoded(caller, inputs, [LENGTH - LAST, LENGTH])
    if close(found, expected[:, :, -LAST:]):
        return right
    text = f"{LAST} new tokens after {LENGTH - LAST} in the cache have other outputs than in one call."
    if sides == {"beginning"}:
        return CheckFinding("cache", "wrong", text, JOIN, "new tokens stand in front of the cache")
    return CheckFinding("cache", "wrong", text, MASK, "the causal mask does not count the keys of the cache")


def _decoded(caller: Caller, inputs: Inputs, ends: list[int]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Decode the tokens in parts, of which each ends before one of `ends`; the first call gets no cache.

    For each part: its output (B, H, n, D), and all tensors of the cache after it.
    """
    names, start = caller.roles.caches, 0
    cache: Sequence[Any] = [None] * len(names)
    for end in ends:
        part = _part(inputs, start, end)
        result = caller.result(*part, dict(zip(names, cache, strict=True)))
        output, cache, start = caller.read_result(result, *part).output, _cache_in(result, len(names)), end
        yield output, tensors_of(cache)


def _part(inputs: Inputs, start: int, end: int) -> Inputs:
    """The tokens from `start` to `end` - 1 of query, key and value."""
    query, key, value = (x[:, :, start:end] for x in inputs)
    return query, key, value


def _cache_in(result: Any, num_parts: int) -> Sequence[Any]:
    """The cache that a call returned: the last value that holds several tensors, or the last value.

    For two arguments (`num_parts`) these are the last two tensors. The first value is the output. A ValueError says
    that there is no cache.
    """
    values = list(result.values()) if isinstance(result, Mapping) else list(result)
    if isinstance(result, Tensor) or len(values) < 2:
        raise ValueError("it returns no cache")
    if num_parts == 1:
        return [next((x for x in reversed(values[1:]) if not isinstance(x, Tensor) and x is not None), values[-1])]
    parts = tensors_of(values[1:])[-num_parts:]
    if len(parts) < num_parts:
        raise ValueError(f"it returns {len(parts)} tensors beside its output, and no cache of {num_parts}")
    return parts


def _side(before: Tensor, after: Tensor) -> str:
    """Where one new token stands in a tensor of the cache: "end", "beginning", or "" if this is not seen.

    `before` and `after` are the tensor before and after the token.
    """
    grown = [axis for axis in range(after.ndim) if after.shape[axis] == before.shape[axis] + 1]
    if before.ndim != after.ndim or len(grown) != 1:
        return ""
    kept = before.shape[grown[0]]
    for side, start in (("end", 0), ("beginning", 1)):
        if close(after.narrow(grown[0], start, kept), before):
            return side
    return ""
