"""What `watch` saw: one map of weights for each attention module, and what could not be seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard.attention import Attention, Prepared
from regard.display import viewer
from regard.errors import RegardError, nearest
from regard.hf.capture.lazy_projection import Unprojected
from regard.hf.capture.module_rerun import Held
from regard.hf.capture.module_statistics import ModuleStatistics
from regard.hf.capture.verification import Check
from regard.maps.attention_map import AttentionMap, joined
from regard.pieces.grid import Grid
from regard.positions import Positions


class NotCaptured(RegardError, KeyError):
    """No attention of that name or number was captured."""

    __str__ = Exception.__str__


@dataclass(eq=False)
class Keys:
    """Keys (B, G, J, D) that the calls of a growing cache share: each reads its own beginning of them."""

    tensor: Tensor

    def grow(self, later: Tensor) -> bool:
        """Become `later` if these keys are its beginning, and say whether they are."""
        size = self.tensor.shape[2]
        if later.dtype != self.tensor.dtype or later.shape[2] <= size or later.shape[:2] != self.tensor.shape[:2]:
            return False
        if torch.equal(later[:, :, :size], self.tensor):
            self.tensor = later
            return True
        return False


@dataclass(eq=False)
class Capture:
    """One call of one module: its pieces, queries and keys, and whether the kernel agreed."""

    attention: Attention
    positions: Positions
    query: Tensor
    keys: Keys
    check: Check

    @property
    def shape(self) -> tuple[int, int, int, int]:
        B, H, I, _ = self.query.shape
        return B, H, I, len(self.positions.keys)

    @cached_property
    def map(self) -> AttentionMap:
        """The weights; made at the first look."""
        key = self.keys.tensor[:, :, : len(self.positions.keys)]
        prepared = Prepared.of(self.attention, self.query, key, self.positions)
        B, H, I, _ = self.query.shape
        grid = Grid.whole(self.positions, B, H, I, self.query.device)
        return AttentionMap(self.attention, prepared, self.positions, grid, None)


@dataclass(eq=False)
class Told:
    """What a module of `regard.nn` told: one map, or those of single queries that went on where the last ended.

    Without `steps` every call is a map of its own: another call of `attend` may have other pieces.
    """

    maps: list[AttentionMap]
    check: Check
    steps: bool = True

    @property
    def shape(self) -> tuple[int, int, int, int]:
        B, H, _, J = self.maps[-1].shape
        return B, H, sum(one.shape[2] for one in self.maps), J

    @property
    def map(self) -> AttentionMap:
        if len(self.maps) > 1:
            self.maps[:] = [joined(self.maps)]
        return self.maps[0]

    def goes_on(self, later: Told) -> bool:
        """Take the map of a later call if its queries are the next ones, and say whether they are."""
        if not (self.steps and later.steps):
            return False
        last, new = self.maps[-1], later.maps[0]
        follows = new.positions.start == last.positions.start + last.shape[2] and new.shape[:2] == last.shape[:2]
        if follows and _begins_with(new._prepared.key, last._prepared.key):
            self.maps.append(new)
            return True
        return False


def _begins_with(keys: Tensor, earlier: Tensor) -> bool:
    """Whether keys go on from earlier ones, up to rounding; a beam that reorders its rows does not."""
    if keys is earlier:
        return True
    return keys.shape[2] >= earlier.shape[2] and torch.allclose(keys[:, :, : earlier.shape[2]], earlier)


@dataclass(frozen=True, eq=False)
class Folded:
    """One call of which only statistics are kept: its size, and whether the kernel agreed."""

    name: str
    shape: tuple[int, int, int, int]
    check: Check

    @property
    def map(self) -> AttentionMap:
        raise NotCaptured(
            f"seen[{self.name!r}]: only statistics were kept; they are in seen.statistics[{self.name!r}]. "
            "watch(model, keep='qk') keeps the queries and keys that a map needs."
        )


@dataclass(eq=False)
class Part:
    """One attention module: its calls in order, which part of the model it is in, and statistics if those are kept."""

    part: str
    calls: list[Capture | Held | Told | Unprojected | Folded] = field(default_factory=list)
    statistics: ModuleStatistics | None = None

    def add(self, capture: Capture | Held | Told | Unprojected) -> None:
        """Take a call; if its keys go on where those of the last one end, hold them once."""
        if self.statistics is not None:
            weights = capture.map
            with torch.autocast(weights.device.type, enabled=False):
                self.statistics.add(weights)
            self.calls.append(Folded(self.statistics.name, capture.shape, capture.check))
            return
        last = self.calls[-1] if self.calls else None
        if isinstance(last, Told) and isinstance(capture, Told) and last.goes_on(capture):
            return
        if isinstance(last, Capture) and isinstance(capture, Capture) and last.keys.grow(capture.keys.tensor):
            capture.keys = last.keys
        self.calls.append(capture)


class Watched(Mapping[str, AttentionMap]):
    """The maps of a watched model, by module path; `seen[3]` is the fourth of them.

    A module that was called more than once (generation, shared layers) has one map for each call:
    `seen[name]` is the last, `seen.calls(name)` are all. `encoder`, `decoder` and `cross` are the
    same for a part of the model. Of the modules of `regard.nn`, calls with the next queries of the same sequence,
    as decoders make them step by step, are one map. `missing` names the attention modules without a map and says why;
    `verify()` tells how far recomputed weights @ values lie from what the kernel returned.

    Rows in which nothing may be attended (padding) show zeros, whatever the backend put there.

    >>> import torch, regard as rg
    >>> encoder = rg.nn.Blueprint(8, num_heads=2).encoder(layers=2).eval()
    >>> with rg.watch(encoder) as seen:
    ...     states = encoder(torch.randn(1, 5, 8))
    >>> seen.names, seen[1].shape
    (['layers.0.self_attention', 'layers.1.self_attention'], (1, 2, 5, 5))
    """

    def __init__(self, parts: dict[str, Part], missing: dict[str, str], order: list[str], verified: bool) -> None:
        self._parts, self._missing, self._order, self._verified = parts, missing, order, verified

    @property
    def names(self) -> list[str]:
        """Module paths in the order of the model."""
        return [name for name in self._order if name in self._parts]

    def __getitem__(self, name: str | int) -> AttentionMap:
        return self._part(name).calls[-1].map

    def calls(self, name: str | int) -> list[AttentionMap]:
        """The maps of every call of one module, in order: with a cache, they grow."""
        return [capture.map for capture in self._part(name).calls]

    @property
    def maps(self) -> dict[str, AttentionMap]:
        """Module path -> the map of its last call."""
        return {name: self[name] for name in self.names}

    @property
    def statistics(self) -> dict[str, ModuleStatistics]:
        """Module path -> what the folds gave, where `keep="statistics"` was asked for."""
        found = {name: self._parts[name].statistics for name in self.names}
        kept = {name: statistics for name, statistics in found.items() if statistics is not None}
        if len(kept) < len(found):
            raise RegardError(
                "seen.statistics: queries and keys were kept, not statistics. Ask a map for them, "
                "seen[name].summarize(*folds), or watch again with watch(model, keep='statistics')."
            )
        return kept

    @property
    def missing(self) -> dict[str, str]:
        """Attention modules without a map -> why."""
        return dict(self._missing)

    @property
    def encoder(self) -> Watched:
        """The self-attention of the encoder."""
        return self._view(lambda part: part == "encoder")

    @property
    def decoder(self) -> Watched:
        """The self-attention of the decoder."""
        return self._view(lambda part: part == "decoder")

    @property
    def cross(self) -> Watched:
        """The attention of the decoder to the encoder."""
        return self._view(lambda part: part == "cross")

    def verify(self) -> dict[str, Check]:
        """Module path -> the worst check of its calls, made while the model ran.

        Values are not kept, so this must be asked for beforehand: `watch(model, verify=True)`.
        """
        if not self._verified:
            raise RegardError("verify: values are not kept after a call. Watch again with watch(model, verify=True).")
        return {name: worst([capture.check for capture in self._parts[name].calls]) for name in self.names}

    def show(self, tokens: Sequence[str] | None = None, targets: Sequence[str] | None = None, batch: int = 0) -> Any:
        """Look at every head in a notebook; needs `pip install 'regard[view]'`.

        `tokens` are those that the model read, `targets` those of the decoder where there is one.
        """
        return viewer().show_watched(self, tokens, targets, batch)

    @property
    def mismatched(self) -> dict[str, Check]:
        """The checks that failed: these maps are not what the kernel computed."""
        checks = self.verify() if self._verified else {}
        return {name: check for name, check in checks.items() if check.ok is False}

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        lines = [f"  {number}: {name} {_shape(self._parts[name])}" for number, name in enumerate(self.names)]
        lines += [f"  missing: {name}: {reason}" for name, reason in self._missing.items()]
        return "\n".join([f"Watched({len(self)} attention modules)", *lines])

    def _view(self, belongs: Callable[[str], bool]) -> Watched:
        parts = {name: part for name, part in self._parts.items() if belongs(part.part)}
        return Watched(parts, self._missing, self._order, self._verified)

    def _part(self, name: str | int) -> Part:
        names = self.names
        if isinstance(name, int):
            if not -len(names) <= name < len(names):
                raise NotCaptured(f"seen[{name}]: {self._captured()}")
            name = names[name]
        if name in self._parts:
            return self._parts[name]
        if name in self._missing:
            raise NotCaptured(f"seen[{name!r}]: not captured: {self._missing[name]}")
        known = f"there is no such attention module. {nearest(name, names)}" if names else self._captured()
        raise NotCaptured(f"seen[{name!r}]: {known}")

    def _captured(self) -> str:
        """What there is, or what to do about nothing."""
        if self.names:
            return f"{len(self)} attention modules were captured; they are numbered from 0."
        reasons = "".join(f" {name}: {reason}." for name, reason in list(self._missing.items())[:3])
        return f"nothing was captured here. Run the model inside the with-block of watch.{reasons}"


def worst(checks: list[Check]) -> Check:
    """A failed check before one that could not be made, before the one with the greatest error."""
    made = [check for check in checks if check.ok is not None]
    if not made:
        return checks[-1]
    found = max(made, key=lambda check: (not check.ok, check.error != check.error, check.error or 0.0))
    unmade = len(checks) - len(made)
    return replace(found, note=f"{unmade} of {len(checks)} calls not verified") if unmade and found.ok else found


def _shape(part: Part) -> str:
    B, H, I, J = part.calls[-1].shape
    calls = f", call {len(part.calls)}" if len(part.calls) > 1 else ""
    return f"({B} x {H} heads x {I} x {J}{calls})"
