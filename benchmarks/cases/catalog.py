"""One call of each mechanism of today that has no case of its own: time and memory, without a peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import regard as rg
from benchmarks.case import BenchSettings, Case
from regard.catalog import mechanism

LENGTH, HEADS, WIDTH = 2048, 4, 64
#: Mechanism -> the arguments of its `build` at this size.
BUILDS: dict[str, dict[str, int]] = {
    "retnet": {"num_heads": HEADS, "head_dim": WIDTH},
    "lightning": {"num_heads": HEADS},
    "gla": {},
    "hgrn_2": {},
    "rwkv_6": {"num_heads": HEADS, "head_dim": WIDTH},
    "deltanet": {},
    "kimi_delta": {},
    "rwkv_7": {"num_heads": HEADS, "head_dim": WIDTH},
    "mamba_1": {"num_heads": HEADS, "head_dim": WIDTH},
    "minimax_sparse": {"size": 128, "k": 4},
    "reformer": {},
    "pooled_keys": {"size": 32, "stride": 16},
    "token_shift": {"num_heads": HEADS},
}


def cases(setting: BenchSettings) -> Iterator[Case]:
    """A prompt of 2,048 tokens."""
    if setting.device == "cuda":
        return
    for name in BUILDS:
        yield Case(
            group="catalog",
            work=f"{name}, n = {LENGTH:,}, {HEADS} heads",
            inputs=partial(inputs_of, name, setting),
            mechanism=name,
            ours=partial(called, name),
        )


def _attention(name: str) -> tuple[rg.Attention, dict[str, int]]:
    """The mechanism, and the sizes of its queries and values."""
    entry = mechanism(name)
    widths = {key: size for key, size in entry.sizes.items() if key == "value_dim" or entry.sizes.get("head_dim") == 1}
    sizes = {"batch": 1, "heads": HEADS, "key_heads": HEADS, "queries": LENGTH, "keys": LENGTH, "head_dim": WIDTH}
    return entry.build(**(entry.tiny | BUILDS[name])), sizes | widths  # type: ignore[return-value]


def inputs_of(name: str, setting: BenchSettings) -> tuple[Tensor, ...]:
    """Queries, keys, values and the tensors of the call, in the order of their names."""
    attention, sizes = _attention(name)
    example = mechanism(name).example(dtype=torch.float32, **sizes)[1:]
    tensors = mechanism(name).tensors(attention, *example)
    return tuple(x.to(setting.device, setting.dtype) for x in (*example, *(tensors[key] for key in sorted(tensors))))


def called(name: str, *inputs: Tensor) -> Callable[..., rg.types.AttentionOutput]:
    """The mechanism by `regard.attend`."""
    attention, _ = _attention(name)
    names = sorted(mechanism(name).tensors(attention, *inputs[:3]))
    return lambda q, k, v, *tensors: attention(q, k, v, **dict(zip(names, tensors, strict=True)))
