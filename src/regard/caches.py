"""Caches: keys and values of earlier calls. Pass a cache to `attend` and continue with the cache that it returns.

`attend(..., cache=cache)` appends the new keys and values, attends to all keys of the cache, and returns the next cache
in `AttentionOutput.cache`. No call changes a cache in place: if two calls append to the same cache, each returns its
own branch, as beam search needs. A cache also keeps positions. So a prompt in chunks of any size, and then single
tokens, gives the same output as one call with the whole text.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.base.checks import Count, Size, checked
from regard.base.errors import RegardError
from regard.base.other_libraries import answers_for
from regard.base.positions import Positions
from regard.base.spans import Spans
from regard.pieces.call_tensors import CallTensors
from regard.pieces.mask import Mask, prefix, window

__all__ = ["Cache", "GrowingCache", "LatentCache", "RecurrentCache", "RingCache"]


@dataclass(frozen=True, eq=False)
class Extended:
    """The keys and values that one call attends to, the positions, and the cache for the next call.

    `positions` starts at the first new key. `attend` gives its last query the position of the last key.
    """

    key: Tensor
    value: Tensor
    positions: Positions
    cache: Cache


@dataclass(frozen=True, eq=False)
class Memory:
    """The memory of a transition after the first `num_tokens` tokens, and the pieces that made it.

    `state` is (B, H, D, E), as the recurrent engine returns it. It is used again only with these same pieces.
    """

    state: Tensor
    num_tokens: int
    pieces: tuple[Any, ...]


class Cache(ABC):
    """Base of all caches. `length` is the number of tokens appended so far.

    >>> import torch, regard as rg
    >>> cache = rg.GrowingCache()
    >>> for n in (4, 1, 1):
    ...     cache = cache.extend(torch.randn(1, 2, n, 8), torch.randn(1, 2, n, 8)).cache
    >>> cache.length
    6
    """

    length: int

    def __repr__(self) -> str:
        """The class, the number of tokens, and the shapes of what it holds beside keys and values."""
        tensors = {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}
        tensors |= getattr(self, "tensors", {})
        shapes = [f"{name} {(*tensor.shape,)}" for name, tensor in tensors.items()]
        return f"{type(self).__name__}({', '.join([*self._sizes(), f'{self.length} tokens', *shapes])})"

    def _sizes(self) -> list[str]:
        """The sizes that a cache was made with, for its repr."""
        return []

    @abstractmethod
    def extend(self, key: Tensor, value: Tensor) -> Extended:
        """Append new keys (B, G, n, D) and values (B, G, n, E): what this call attends to, and the next cache."""

    def extend_tensors(self, tensors: CallTensors, axes: Mapping[str, int]) -> CallTensors:
        """The tensors of the pieces for all keys that `extend` attends to. `axes`: the axis of the keys of each."""
        raise RegardError(
            f"attend: {type(self).__name__} does not keep {', '.join(tensors)} of earlier keys. Use GrowingCache."
        )

    def with_tensors(self, tensors: CallTensors) -> Cache:
        """This cache with the tensors of its keys, if it keeps them."""
        return self

    def with_state(self, state: Tensor | None, pieces: tuple[Any, ...] = ()) -> Cache:
        """This cache with what the pieces of a call summed over its keys, if it keeps that."""
        return self

    def sums(self, query: Tensor) -> Tensor | None:
        """The sums over earlier keys, if they are kept in place of these keys; 0 before the first."""
        return None

    def memory_of(self, pieces: tuple[Any, ...]) -> Memory | None:
        """The results of these pieces for the earlier keys, such as compressed keys, if the cache keeps them."""
        return None

    @property
    def mask(self) -> Mask | None:
        """The mask that a forgetful cache adds: queries of a chunk then attend to the same keys as single queries."""
        return None


class _Buffer:
    """Memory for the keys and values of `capacity` tokens, shared by caches that were extended from each other.

    `filled` is the number of entries written. A cache may write after its own end only if no other cache did; otherwise
    it moves to a new buffer. Such a write changes no key of an earlier map. It goes through `.data`, so that torch does
    not count it as a change and earlier maps stay valid.
    """

    def __init__(self, key: Tensor, value: Tensor, capacity: int) -> None:
        self.key = key.new_empty(*key.shape[:2], capacity, key.shape[3])
        self.value = value.new_empty(*value.shape[:2], capacity, value.shape[3])
        self.filled = 0

    def write(self, key: Tensor, value: Tensor) -> None:
        """Write new keys and values after the filled entries, where there must be room for them."""
        stop = self.filled + key.shape[2]
        self.key.data[:, :, self.filled : stop] = key
        self.value.data[:, :, self.filled : stop] = value
        self.filled = stop


@dataclass(frozen=True, eq=False)
class _Store:
    """Entries [start, stop) of a buffer."""

    buffer: _Buffer
    start: int
    stop: int

    @property
    def key(self) -> Tensor:
        return self.buffer.key[:, :, self.start : self.stop]

    @property
    def value(self) -> Tensor:
        return self.buffer.value[:, :, self.start : self.stop]

    def append(self, key: Tensor, value: Tensor) -> _Store:
        """These entries and new ones: in the same buffer if that is possible, else in a larger one.

        A larger buffer has twice the needed size. If at least as many entries are new as are kept, it has only the
        needed size: then copying the kept entries costs no more than writing the new ones, and a ring that is read in
        chunks holds little memory.
        """
        num_new, num_kept = key.shape[2], self.stop - self.start
        if torch.is_grad_enabled():  # a later backward pass may need tensors that a write in place would change
            return _Store.of(torch.cat((self.key, key), 2), torch.cat((self.value, value), 2))
        may_write = self.buffer.filled == self.stop
        # a buffer of inference tensors is used in inference mode only, because autograd refuses such tensors
        may_write &= self.buffer.key.is_inference() == torch.is_inference_mode_enabled()
        if may_write and self.stop + num_new <= self.buffer.key.shape[2]:
            self.buffer.write(key, value)
            return _Store(self.buffer, self.start, self.stop + num_new)
        needed = num_kept + num_new
        larger = _Buffer(self.key, self.value, needed if num_new >= num_kept else 2 * needed)
        larger.write(self.key, self.value)
        larger.write(key, value)
        return _Store(larger, 0, needed)

    @staticmethod
    def of(key: Tensor, value: Tensor) -> _Store:
        """A full buffer that holds these tensors, without a copy."""
        buffer = _Buffer(key[:, :, :0], value[:, :, :0], 0)
        buffer.key, buffer.value, buffer.filled = key, value, key.shape[2]
        return _Store(buffer, 0, key.shape[2])

    def last(self, count: int) -> _Store:
        return _Store(self.buffer, max(self.start, self.stop - count), self.stop)


def _appended(store: _Store | None, key: Tensor, value: Tensor) -> _Store:
    """The entries of a store (None: none) and new ones, which must have the same heads, widths and dtypes."""
    if store is None:
        return _Store.of(key.clone(), value.clone())  # the caller may overwrite its tensors
    for name, kept, new in (("keys", store.buffer.key, key), ("values", store.buffer.value, value)):
        (B, G, _, width), (given_B, given_G, _, given_width) = kept.shape, new.shape
        is_alike = given_B == B and given_G == G and given_width == width
        if not is_alike or kept.dtype != new.dtype:
            raise RegardError(
                f"cache: its {name} have (batch, heads, width) {(B, G, width)} and {kept.dtype}, the new {name} have "
                f"{(given_B, given_G, given_width)} and {new.dtype}. Use one cache for each layer and batch."
            )
    return store.append(key, value)


@checked
@dataclass(frozen=True, eq=False, repr=False)
class GrowingCache(Cache):
    """Keeps all keys and values; appending is amortized O(new tokens) if gradients are off.

    Of an attention with a transition it also keeps the memory, so a call computes its new tokens only.

    >>> import torch, regard as rg
    >>> attention, cache = rg.Attention(mask=rg.causal()), rg.GrowingCache()
    >>> q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    >>> for step in (slice(0, 4), slice(4, 5), slice(5, 6)):
    ...     seen = attention(q[:, :, step], k[:, :, step], v[:, :, step], cache=cache)
    ...     cache = seen.cache
    >>> torch.allclose(seen.output, attention(q, k, v).output[:, :, 5:], atol=1e-6)
    True
    """

    store: _Store | None = None
    length: int = 0
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    memory: Memory | None = None

    def extend(self, key: Tensor, value: Tensor) -> Extended:
        store = _appended(self.store, key, value)
        length = self.length + key.shape[2]
        positions = Positions(self.length, Spans(((0, length),)))
        return Extended(store.key, store.value, positions, self._next(store, length, self.tensors))

    def extend_tensors(self, tensors: CallTensors, axes: Mapping[str, int]) -> CallTensors:
        """The tensors of earlier keys, then those of new keys."""
        if self.length and set(tensors) != set(self.tensors):
            have, given = (", ".join(sorted(names)) or "none" for names in (self.tensors, tensors))
            raise RegardError(f"cache: it has the tensors {have} of earlier keys, this call gives {given}.")
        earlier = self.tensors or {name: t.narrow(axes[name], 0, 0) for name, t in tensors.items()}
        return {name: torch.cat((earlier[name], t), axes[name]) for name, t in tensors.items()}

    def with_tensors(self, tensors: CallTensors) -> GrowingCache:
        return self._next(self.store, self.length, tensors)

    def with_state(self, state: Tensor | None, pieces: tuple[Any, ...] = ()) -> GrowingCache:
        """This cache with the memory of a transition, so that the next call computes its new tokens only."""
        if not pieces:
            return self
        memory = None if state is None else Memory(state, self.length, pieces)
        return self._next(self.store, self.length, self.tensors, memory)

    @staticmethod
    def _next(
        store: _Store | None, length: int, tensors: Mapping[str, Tensor], memory: Memory | None = None
    ) -> GrowingCache:
        """A cache without the checks of its arguments, which take longer than many a step."""
        cache = object.__new__(GrowingCache)
        vars(cache).update(store=store, length=length, tensors=tensors, memory=memory)
        return cache

    def memory_of(self, pieces: tuple[Any, ...]) -> Memory | None:
        """The memory, if exactly these objects made it; () is an attention without a transition."""
        memory = self.memory if pieces else None
        return memory if memory is not None and all(map(operator.is_, memory.pieces, pieces)) else None


@checked
@dataclass(frozen=True, eq=False, repr=False)
class RingCache(Cache):
    """Keeps the last `size` tokens, and always the first `sinks` tokens (StreamingLLM, arXiv:2309.17453).

    Memory and time for each token are constant. Every query attends to the `size` latest positions, including its own,
    and to the sinks. This does not depend on how the tokens are divided into calls. Positions are those of the text;
    StreamingLLM renumbers them inside the cache.

    >>> import torch, regard as rg
    >>> q, k, v = torch.randn(3, 1, 2, 8, 16)
    >>> seen = rg.Attention(mask=rg.causal())(q, k, v, cache=rg.caches.RingCache(size=3, sinks=1))
    >>> seen.weights[0, 0, 7].gt(0).int().tolist(), seen.cache.length
    ([1, 0, 0, 0, 0, 1, 1, 1], 8)
    """

    size: Size
    sinks: Count = 0
    store: _Store | None = None
    first: tuple[Tensor, Tensor] | None = None
    length: int = 0

    def _sizes(self) -> list[str]:
        return [f"size={self.size}", f"sinks={self.sinks}"]

    @property
    def mask(self) -> Mask:
        return window(self.size) | prefix(self.sinks) if self.sinks else window(self.size)

    def extend(self, key: Tensor, value: Tensor) -> Extended:
        """This call attends to all new tokens, the ring before them, and the sinks before the ring.

        The next cache keeps the last `size` of the tokens, and the sinks.
        """
        store = _appended(self.store, key, value)
        length = self.length + key.shape[2]
        first = self._sinks(key, value)
        ring_start = length - (store.stop - store.start)  # the position of the first key that the store holds
        positions = Positions(self.length, Spans(((ring_start, length),)))
        keys, values = store.key, store.value
        num_sinks = min(ring_start, self.sinks)  # the other sinks are still in the ring
        if num_sinks and first is not None:
            positions = Positions(self.length, Spans.of((0, num_sinks), (ring_start, length)))
            keys, values = (torch.cat((f[:, :, :num_sinks], x), 2) for f, x in zip(first, (keys, values), strict=True))
        return Extended(keys, values, positions, RingCache(self.size, self.sinks, store.last(self.size), first, length))

    def _sinks(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """The keys and values of the sinks so far, those among the new tokens included; None if there are no sinks."""
        missing = self.sinks - (0 if self.first is None else self.first[0].shape[2])
        if missing <= 0:
            return self.first
        new = key[:, :, :missing].clone(), value[:, :, :missing].clone()
        if self.first is None:
            return new
        return torch.cat((self.first[0], new[0]), 2), torch.cat((self.first[1], new[1]), 2)


@checked
@dataclass(frozen=True, eq=False, repr=False)
class RecurrentCache(Cache):
    """Keeps only the sum over keys, for feature scores: constant memory, but no weights of earlier keys.

    >>> import torch, regard as rg
    >>> attention = rg.Attention(rg.scores.FeatureScore(), mask=rg.causal(), normalizer=rg.normalizers.SumNormalizer())
    >>> q, k, v = torch.randn(3, 1, 2, 6, 8)
    >>> cache = attention(q[:, :, :5], k[:, :, :5], v[:, :, :5], cache=rg.caches.RecurrentCache()).cache
    >>> last = attention(q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], cache=cache).output
    >>> torch.allclose(last, attention(q, k, v).output[:, :, 5:], atol=1e-5)
    True
    """

    state: Tensor | None = None
    length: int = 0

    def extend_tensors(self, tensors: CallTensors, axes: Mapping[str, int]) -> CallTensors:
        """The tensors of the new keys: the state holds all that earlier keys gave."""
        return tensors

    def extend(self, key: Tensor, value: Tensor) -> Extended:
        length = self.length + key.shape[2]
        positions = Positions(self.length, Spans(((self.length, length),)))
        return Extended(key, value, positions, RecurrentCache.after(self.state, length))

    def with_state(self, state: Tensor | None, pieces: tuple[Any, ...] = ()) -> RecurrentCache:
        return RecurrentCache.after(state, self.length)

    def sums(self, query: Tensor) -> Tensor:
        return query.new_zeros(()) if self.state is None else self.state

    @staticmethod
    def after(state: Tensor | None, length: int) -> RecurrentCache:
        """A cache of `length` tokens without the checks of its arguments, which take longer than many a step."""
        cache = object.__new__(RecurrentCache)
        vars(cache).update(state=state, length=length)
        return cache


@checked
@dataclass(frozen=True, eq=False, repr=False)
class LatentCache(Cache):
    """Keeps one latent vector for each token, which is its key and its value: multi-head latent attention.

    A key is (rotated channels, latent), (B, 1, n, R + C), and its value is the latent, the last C channels of the key.
    Only keys are stored, so the memory of a token does not depend on the number of heads (DeepSeek-V2,
    arXiv:2405.04434, section 2.1.2).

    >>> import torch, regard as rg
    >>> q, key = torch.randn(1, 8, 6, 20), torch.randn(1, 1, 6, 20)  # 4 rotated channels, a latent of 16
    >>> seen = rg.Attention(mask=rg.causal())(q, key, key[..., 4:], cache=rg.caches.LatentCache())
    >>> seen.cache.length, seen.cache.store.buffer.value.numel(), seen.output.shape
    (6, 0, torch.Size([1, 8, 6, 16]))
    """

    store: _Store | None = None
    length: int = 0

    def extend(self, key: Tensor, value: Tensor) -> Extended:
        """Store the keys, with values of width 0. The values that this call reads are a view of the keys."""
        self._check(key, value)
        store = _appended(self.store, key, value[..., :0])
        length, all_keys = self.length + key.shape[2], store.key
        positions = Positions(self.length, Spans(((0, length),)))
        values = all_keys[..., all_keys.shape[-1] - value.shape[-1] :]
        return Extended(all_keys, values, positions, LatentCache(store, length))

    def _check(self, key: Tensor, value: Tensor) -> None:
        """Refuse values that are not the last channels of the keys. A view of these channels needs no comparison."""
        fits = key.shape[:3] == value.shape[:3] and value.shape[-1] <= key.shape[-1] and key.dtype == value.dtype
        last = key[..., max(0, key.shape[-1] - value.shape[-1]) :]
        is_view = fits and last.data_ptr() == value.data_ptr() and last.stride() == value.stride()
        if not (is_view or (fits and torch.equal(last, value))):
            raise RegardError(
                "LatentCache: it stores keys only, so values must be the last channels of the keys. Got keys "
                f"{tuple(key.shape)} and values {tuple(value.shape)} that differ from them. Give key[..., rotated:] as "
                "the values, or use GrowingCache."
            )


if not TYPE_CHECKING:
    __getattr__ = answers_for(__name__, __all__)
