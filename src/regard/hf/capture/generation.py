"""`Generation`: the calls of one `generate()` as one map for each layer, over the prompt and what was generated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard.base.errors import RegardError
from regard.hf.capture.captured_calls import ModuleCalls
from regard.hf.capture.generation_joins import OTHER_TOKENS, GenerationRecord, ModuleJoin, TokenRange, real_range
from regard.hf.capture.head_parts import CallParts, FinalNorm
from regard.hf.capture.kept_calls import NoValues
from regard.hf.capture.model_maps import WatchedAttention


@dataclass(eq=False)
class GenerationParts(CallParts):
    """The values of a module in a generation, and what its heads write; `last_pass` are those of the last pass.

    What depends on the pass, such as a gate between heads and output projection, cannot be joined.
    """

    last_pass: CallParts

    @cached_property
    def is_direct(self) -> bool:
        return self.last_pass.is_direct

    @property
    def gates(self) -> Tensor:
        """The gates (H, I): numbers that `rg.hf.gated` holds for the whole block, so the last row serves all rows."""
        return self.last_pass.gates[:, -1:].expand(-1, self.weights.shape[2])

    @cached_property
    def joined(self) -> Tensor:
        """The input of the output projection, (B, I, H, E), for the whole text, computed anew as weights @ values.

        The inputs that the watch kept are those of single passes. weights @ values equal them only if the projection
        reads the weighted values directly, without a gate or a norm between: `is_direct`, tested on the last pass.
        """
        if not self.is_direct:
            raise NoValues(
                "a gate or a norm before the output projection belongs to a single pass; read the parts of a pass: "
                f"seen.head_part({self.name!r}, call=...)"
            )
        with torch.no_grad():
            return (self.weights @ self.values).transpose(1, 2)

    def _final_read(self) -> FinalNorm:
        raise NoValues(f"a final norm belongs to a single pass; read seen.logit_effect({self.name!r}, token, call=...)")


class Generation(WatchedAttention):
    """One `generate()` as one map for each layer: every token of the prompt and the output, at the step that read it.

    Use it like the result of `watch`: `generation[3]`, `generation.cross[0]`, `generation.maps`, `show`, and with
    `rg.profile`, `rg.roles` and `rg.rollout`. A map has an entry for each returned sequence, a row for each token that
    the model read, and a key for each of them; in cross-attention the keys are the tokens of the encoder. The last
    token has no row: the model generated it and never read it. `tokens` (N, L) are the returned sequences,
    `prompt_length` counts the tokens of the prompt, and `lengths` those of each sequence. `sequence(n)` is one of
    them alone, without padding.

    After `watch(keep="statistics")` it has `statistics` of the whole text: of reductions by row, and of `KeyTotals`.

    A row has the weights that the model used when it read the token:

    - Beam search: the rows of a sequence are those of its ancestors in the beam.
    - Assisted generation: rows of draft tokens that were refused are left out.
    - A sliding cache: keys that were dropped weigh 0. A quantized cache: each row has the keys as the cache held them
      at that step, so its weights differ a little from those of one pass over the whole text.
    - Without a cache every step is a pass over the whole text. The last pass of each sequence is its map.

    `record` has the passes of the generation, and `part` the tokens that are shown, None for all.

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

    def __init__(self, record: GenerationRecord, seen: WatchedAttention, part: TokenRange | None = None) -> None:
        _check(record)
        self._record, self._seen = record, seen
        longest = max(record.lengths)
        whole = TokenRange(tuple(range(len(record.lengths))), range(record.first + longest - 1))
        self._tokens_of = part or whole
        modules, missing = {}, dict(seen._missing)
        for name, calls in seen._parts.items():
            module = ModuleJoin(record, calls, name, self._tokens_of)
            if module.reads_other_tokens:
                missing[name] = OTHER_TOKENS
            elif joined := module.joined():
                modules[name] = ModuleCalls(calls.part, joined, module.statistics(), calls.kind)
        super().__init__(modules, missing, seen._order, seen._verified, seen.model)
        self._take(seen)

    @property
    def tokens(self) -> Tensor:
        """The returned sequences (N, L), with the prompt; of `sequence(n)` its own tokens (1, L), without padding."""
        record, part = self._record, self._tokens_of
        assert record.tokens is not None
        # The last token has no row. Rows before the prompt, of an earlier cache, have no token here.
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
        # Without padding the rows before the prompt stay: an earlier cache that is continued, or embeddings.
        start = max(record.first + padding if padding else 0, self._tokens_of.rows.start)
        rows = range(start, record.first + record.lengths[n] - 1)
        return Generation(record, self._seen, TokenRange((n,), rows, real_range(record.source, record.row(n, 0))))

    def _call(self, name: str | int, call: int) -> CallParts:
        """The parts of a module in the whole text, which know those of its last pass."""
        parts = super()._call(name, call)
        last_pass = CallParts(parts.name, self._seen._parts[parts.name], -1, parts.kept)
        return GenerationParts(parts.name, parts.calls, parts.call, parts.kept, last_pass)

    def __repr__(self) -> str:
        count, output = self.num_sequences, max(self.lengths) - self.prompt_length
        title = f"Generation({count} sequence{'s' * (count > 1)}: {self.prompt_length} tokens of prompt and {output} "
        title += f"generated, {len(self)} attention modules)"
        return "\n".join([title, *super().__repr__().splitlines()[1:]])


def _check(record: GenerationRecord) -> None:
    """Refuse a generation whose passes are not all known, with the reason."""
    if record.is_nested:
        raise RegardError(
            "seen.generation: the model generated inside its own generate() (assisted by its own early layers), so its "
            "passes cannot be told apart. seen.calls(name) has the map of each call."
        )
    if record.is_dropped:
        raise RegardError(
            "seen.generation: its first steps were dropped by watch(keep_steps=...). Leave keep_steps out to keep all; "
            "seen.calls(name) has the maps of the last steps."
        )
    if record.tokens is None:
        raise RegardError("seen.generation: generate() ended with an error, so there is no result to show.")
    if not record.passes:
        raise RegardError("seen.generation: the watched model did not run while generate() decoded.")
