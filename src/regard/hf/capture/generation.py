"""`Generation`: the calls of one `generate()` as one map for each layer, over the prompt and what was generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.hf.capture.captured_calls import ModuleCalls
from regard.hf.capture.model_maps import WatchedAttention, worst
from regard.hf.capture.recurrent_calls import RecurrentCall
from regard.hf.capture.verification import Check
from regard.hf.recurrent.forms import map_of
from regard.maps.attention_map import AttentionMap
from regard.maps.joined import JoinedMap, MapRows

#: Why a module has no map of a generation.
OTHER_TOKENS = (
    "the rows of its calls are not the tokens that the model read, so they form no map of the text; seen.calls(name) "
    "has the map of each call"
)


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """One forward pass of the model: the tokens that it read, the tokens in the cache after it, and what it called.

    `calls` has the numbers of the calls of each attention module; `num_cached` is None without a cache.
    """

    num_tokens: int | None
    num_cached: int | None
    calls: dict[str, range]


@dataclass(eq=False)
class GenerationRecord:
    """What was observed of one `generate()`.

    `prompt` (R, P) has a row for each row of the cache. `real` (R, P) and `source` (R, J) say which tokens of the
    decoder and of the encoder are no padding. `first` is the position of the first token of the prompt. `before` has
    the number of calls of each module before the first pass. `tokens` (N, L) are the returned sequences, and `beams`
    (N, T) the row of the cache that each generated token came from, -1 after the end.
    """

    prompt: Tensor
    real: Tensor | None
    source: Tensor | None
    first: int
    ends: list[int]
    before: dict[str, int]
    passes: list[ForwardPass] = field(default_factory=list)
    tokens: Tensor | None = None
    beams: Tensor | None = None
    is_nested: bool = False

    def of(self, seen: WatchedAttention) -> Generation:
        """The generation, with the modules of `seen`."""
        return Generation(self, seen)

    @cached_property
    def lengths(self) -> list[int]:
        """The number of tokens of each returned sequence, with the prompt, without padding after its end."""
        assert self.tokens is not None
        P, L = self.prompt.shape[1], self.tokens.shape[1]
        if self.beams is not None:
            return [P + int(count) for count in (self.beams >= 0).sum(1)]
        is_end = torch.isin(self.tokens[:, P:].cpu(), torch.tensor(self.ends, dtype=torch.int64))
        return [P + int(row.int().argmax()) + 1 if bool(row.any()) else L for row in is_end]

    def starts(self) -> list[int]:
        """For each returned sequence the number of tokens of padding before it."""
        if self.real is None:
            return [0] * len(self.lengths)
        return [int(self.real[self.row(n, 0)].int().argmax()) for n in range(len(self.lengths))]

    def row(self, sequence: int, step: int) -> int:
        """The row of the cache that a sequence had at a step (0: the prompt)."""
        if self.beams is None:
            return sequence
        last = self.lengths[sequence] - self.prompt.shape[1] - 1
        return int(self.beams[sequence, min(step, last)])


@dataclass(eq=False)
class JoinedCalls:
    """The calls of one module in a generation, as one call."""

    shape: tuple[int, int, int, int]
    check: Check
    _build: Any

    @cached_property
    def map(self) -> AttentionMap:
        """The map; built at the first access."""
        return self._build()


@dataclass(frozen=True)
class _Part:
    """A range of the tokens: `rows` of the decoder and `source` of the encoder (None: all), for some sequences."""

    sequences: tuple[int, ...]
    rows: range
    source: range | None = None


class Generation(WatchedAttention):
    """One `generate()` as one map for each layer: every token of the prompt and the output, at the step that read it.

    Use it like the result of `watch`: `generation[3]`, `generation.cross[0]`, `generation.maps`, `show`, and with
    `rg.profile`, `rg.roles` and `rg.rollout`. A map has an entry for each returned sequence, a row for each token that
    the model read, and a key for each of them; in cross-attention the keys are the tokens of the encoder. The last
    token has no row: the model generated it and never read it. `tokens` (N, L) are the returned sequences,
    `prompt_length` counts the tokens of the prompt, and `lengths` those of each sequence. `sequence(n)` is one of
    them alone, without padding.

    A row has the weights that the model used when it read the token:

    - Beam search: the rows of a sequence are those of its ancestors in the beam.
    - Assisted generation: rows of draft tokens that were refused are left out.
    - A sliding cache: keys that were dropped weigh 0. A quantised cache: each row has the keys as the cache held them
      at that step, so its weights differ a little from those of one pass over the whole text.
    - Without a cache every step is a pass over the whole text. The last pass of each sequence is its map.

    >>> import torch, transformers, regard as rg
    >>> sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 20, "bos_token_id": 0, "eos_token_id": None}
    >>> model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    >>> with rg.watch(model) as seen:
    ...     tokens = model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=4, do_sample=False)
    >>> seen.generation
    Generation(1 sequence: 3 tokens of prompt and 4 generated, 2 attention modules)
      0: transformer.h.0.attn (1 x 2 heads x 6 x 6)
      1: transformer.h.1.attn (1 x 2 heads x 6 x 6)
    """

    def __init__(self, record: GenerationRecord, seen: WatchedAttention, part: _Part | None = None) -> None:
        _check(record)
        self._record, self._seen = record, seen
        longest = max(record.lengths)
        whole = _Part(tuple(range(len(record.lengths))), range(record.first + longest - 1))
        self._tokens_of = part or whole
        modules, missing = {}, dict(seen._missing)
        for name, calls in seen._parts.items():
            module = _Module(record, calls, name, self._tokens_of)
            if module.reads_other_tokens:
                missing[name] = OTHER_TOKENS
            elif joined := module.joined():
                modules[name] = ModuleCalls(calls.part, joined, kind=calls.kind)
        super().__init__(modules, missing, seen._order, seen._verified, seen.model)
        self.inputs = seen.inputs

    @property
    def tokens(self) -> Tensor:
        """The returned sequences (N, L), with the prompt; of `sequence(n)` its own tokens (1, L), without padding."""
        record, part = self._record, self._tokens_of
        assert record.tokens is not None
        first, stop = part.rows.start - record.first, part.rows.stop + 1 - record.first
        return record.tokens[list(part.sequences), max(first, 0) : stop]

    @property
    def prompt_length(self) -> int:
        """The number of tokens of the prompt, with padding before it in a batch."""
        return self._record.prompt.shape[1] - max(self._tokens_of.rows.start - self._record.first, 0)

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each sequence, prompt and output, without padding after its end."""
        before = max(self._tokens_of.rows.start - self._record.first, 0)
        return [self._record.lengths[n] - before for n in self._tokens_of.sequences]

    @property
    def num_sequences(self) -> int:
        """The number of returned sequences."""
        return len(self._tokens_of.sequences)

    def sequence(self, number: int) -> Generation:
        """One of the returned sequences alone, without padding before or after it."""
        sequences = self._tokens_of.sequences
        if not -len(sequences) <= number < len(sequences):
            raise RegardError(
                f"generation.sequence({number}): {len(sequences)} sequences were returned; they are numbered from 0."
            )
        record, n = self._record, sequences[number]
        padding = record.starts()[n]
        start = max(record.first + padding if padding else 0, self._tokens_of.rows.start)
        rows = range(start, record.first + record.lengths[n] - 1)
        return Generation(record, self._seen, _Part((n,), rows, _real(record.source, record.row(n, 0))))

    def __repr__(self) -> str:
        count, output = self.num_sequences, max(self.lengths) - self.prompt_length
        title = f"Generation({count} sequence{'s' * (count > 1)}: {self.prompt_length} tokens of prompt and {output} "
        title += f"generated, {len(self)} attention modules)"
        return "\n".join([title, *super().__repr__().splitlines()[1:]])


@dataclass(frozen=True, eq=False)
class _Module:
    """One attention module in a generation, and the tokens that are wanted of it."""

    record: GenerationRecord
    module: ModuleCalls
    name: str
    part: _Part

    @cached_property
    def _steps(self) -> list[list[Any]]:
        """Its calls in each pass."""
        numbers = [a_pass.calls.get(self.name, range(0)) for a_pass in self.record.passes]
        return [[self.module.calls[n] for n in of_pass] for of_pass in numbers]

    @cached_property
    def _runs_in_every_pass(self) -> bool:
        counts = {len(calls) for calls in self._steps}
        return len(counts) == 1 and counts != {0}

    @cached_property
    def _reads_the_tokens(self) -> bool:
        """Whether each call has a row for each token that its pass read."""
        counted = zip(self.record.passes, self._steps, strict=True)
        return all(a_pass.num_tokens in (None, call.shape[2]) for a_pass, calls in counted for call in calls)

    @property
    def reads_other_tokens(self) -> bool:
        """Whether it runs in every pass, with rows that are not the tokens of the pass."""
        return self._runs_in_every_pass and len(self._steps) > 1 and not self._reads_the_tokens

    def joined(self) -> list[Any]:
        """Its calls as one call, or one call for each time that it ran in a pass; of an encoder its only call."""
        if self._runs_in_every_pass and self._reads_the_tokens:
            return [self._joined(list(calls)) for calls in zip(*self._steps, strict=True)]
        return self._of_encoder(next((calls[-1] for calls in self._steps if calls), None))

    def _of_encoder(self, call: Any = None) -> list[Any]:
        """The last call before the first pass, or the given one: all its tokens, for each of the sequences."""
        count = self.record.before.get(self.name, 0)
        call = self.module.calls[count - 1] if call is None and count else call
        if call is None:
            return []
        B, H, I, J = call.shape
        rows = [self.record.row(n, 0) * B // len(self.record.prompt) for n in self.part.sequences]
        real = self.part.source if self.part.source is not None and I == J == _width(self.record.source) else None
        tokens = range(I) if real is None else real
        entries, keys = torch.tensor(rows), J if real is None else len(real)
        if entries.tolist() == list(range(B)) and real is None:
            return [call]
        build = partial(self._rows_of_one_map, cache(lambda: call.map), tokens, entries, keys)
        return [JoinedCalls((len(rows), H, len(tokens), keys), call.check, build)]

    def _rows_of_one_map(self, source: Any, tokens: range, entries: Tensor, num_keys: int) -> AttentionMap:
        offset = -tokens.start if num_keys == len(tokens) else 0
        return JoinedMap([MapRows(source, tokens, 0, offset, entries)], len(tokens), num_keys)

    def _joined(self, calls: list[Any]) -> JoinedCalls:
        """One call from the calls of all passes."""
        ends = self._ends(calls)
        starts = [end - call.shape[2] for end, call in zip(ends, calls, strict=True)]
        rows = range(max(self.part.rows.start, starts[0]), self.part.rows.stop)
        keys = self._keys(calls[-1].shape[3])
        shape = (len(self.part.sequences), calls[-1].shape[1], len(rows), len(keys))
        build = partial(self._map, calls, starts, ends, rows, keys)
        return JoinedCalls(shape, worst([call.check for call in calls]), build)

    @property
    def _is_cross(self) -> bool:
        return self.module.part == "cross"

    def _keys(self, num_keys: int) -> range:
        """The keys of the joined map: tokens of the decoder, or of the encoder."""
        if not self._is_cross:
            return self.part.rows
        return self.part.source if self.part.source is not None else range(num_keys)

    def _ends(self, calls: Sequence[Any]) -> list[int]:
        """The number of tokens that were read after each call."""
        ends: list[int] = []
        for a_pass, call in zip(self.record.passes, calls, strict=True):
            before, (_, _, num_queries, num_keys) = ends[-1] if ends else 0, call.shape
            if a_pass.num_cached is not None:
                ends.append(a_pass.num_cached)
            elif isinstance(call, RecurrentCall):
                ends.append(num_keys)
            else:  # without a cache each call reads the whole text
                ends.append(num_queries if num_queries > before else before + num_queries)
        return ends

    def _map(self, calls: list[Any], starts: list[int], ends: list[int], rows: range, keys: range) -> JoinedMap:
        every_call_has_all = isinstance(calls[-1], RecurrentCall) or (len(calls) > 1 and not any(starts))
        parts = self._last_calls if every_call_has_all else self._each_call
        return JoinedMap(list(parts(calls, starts, ends, rows, keys)), len(rows), len(keys))

    def _each_call(self, calls: list[Any], starts: list[int], ends: list[int], rows: range, keys: range) -> Any:
        """The rows of each call; those of tokens that a later call read again are left out."""
        for n, (call, start, end) in enumerate(zip(calls, starts, ends, strict=True)):
            first, stop = max(start, rows.start), min([end, rows.stop, *starts[n + 1 :]])
            if first >= stop:
                continue
            J = call.shape[3]
            offset = -keys.start + (max(end - J, 0) if not self._is_cross else 0)  # a sliding cache has the last keys
            local = range(first - start, stop - start)
            yield MapRows(
                cache(partial(getattr, call, "map")), local, first - rows.start, offset, self._entries(start, end)
            )

    def _last_calls(self, calls: list[Any], starts: list[int], ends: list[int], rows: range, keys: range) -> Any:
        """The last call of each sequence, which has all its rows."""
        last = [self._last_call(n, ends) for n in self.part.sequences]
        for number in sorted(set(last)):
            call, end = calls[number], ends[number]
            if isinstance(call, RecurrentCall):
                source = cache(partial(_whole_map, call, end))
            else:
                source = cache(partial(getattr, call, "map"))
            entries = torch.where(torch.tensor(last) == number, self._entries(0, end), -1)
            local = range(rows.start, min(rows.stop, end))
            yield MapRows(source, local, 0, 0 if self._is_cross else -keys.start, entries)

    def _last_call(self, sequence: int, ends: list[int]) -> int:
        length = self.record.first + self.record.lengths[sequence] - 1
        return next((number for number, end in enumerate(ends) if end >= length), len(ends) - 1)

    def _entries(self, start: int, end: int) -> Tensor:
        """The row of the cache of each sequence in the pass that read these tokens; -1 after its end."""
        record = self.record
        step = max(0, end - record.first - record.prompt.shape[1])
        stops = [record.first + record.lengths[n] - 1 for n in self.part.sequences]
        rows = [record.row(n, step) for n in self.part.sequences]
        return torch.tensor([row if start < stop else -1 for row, stop in zip(rows, stops, strict=True)])


def _whole_map(call: RecurrentCall, num_queries: int) -> AttentionMap:
    return map_of(call.form(), num_queries)


def _real(real: Tensor | None, row: int) -> range | None:
    """The range of tokens that are no padding; None if these are all tokens, or no range."""
    if real is None or bool(real[row].all()):
        return None
    places = real[row].nonzero().flatten().tolist()
    tokens = range(places[0], places[-1] + 1) if places else range(0)
    return tokens if len(tokens) == len(places) > 0 else None


def _width(real: Tensor | None) -> int | None:
    return None if real is None else real.shape[1]


def _check(record: GenerationRecord) -> None:
    if record.is_nested:
        raise RegardError(
            "seen.generation: the model generated inside its own generate() (assisted by its own early layers), so its "
            "passes cannot be told apart. seen.calls(name) has the map of each call."
        )
    if record.tokens is None:
        raise RegardError("seen.generation: generate() ended with an error, so there is no result to show.")
    if not record.passes:
        raise RegardError("seen.generation: the watched model did not run while generate() decoded.")
