"""`GenerationRecorder` notes which calls belong to each forward pass of a model, and to each `generate()`.

`generation_calls` reports the start and end of every `generate()` of transformers, with its prompt and its result.

`WatchedStep` has the maps of one pass; `watch(on_step=...)` calls a function with it.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn

from regard.base.context import ContextItems
from regard.base.versions import check_generation
from regard.hf.calls import CallObserver
from regard.hf.capture.captured_calls import ModuleCalls
from regard.hf.capture.generation import Generation
from regard.hf.capture.generation_joins import ForwardPass, GenerationRecord
from regard.hf.capture.model_maps import WatchedAttention
from regard.hf.capture.module_hooks import inside_backward
from regard.hf.names import cache_in, cached_length

#: The methods that decode; beam search is the one with rows that continue other rows.
BEAMS = "_beam_search"
METHODS = ("_sample", BEAMS, "_assisted_decoding")


class GenerationCalls:
    """Replaces the decoding methods of transformers' `GenerationMixin` while any thread observes.

    `generate()` gets its prompt ready, and then calls one of three methods: sampling (also greedy), beam search,
    assisted decoding. Wrappers of these methods report the tokens that they get and return. Beam search also returns,
    for each token, the row of the cache that it came from; the caller gets what it asked for. The methods belong to the
    process. Observers belong to a thread.
    """

    def __init__(self) -> None:
        self.observers: ContextItems[CallObserver] = ContextItems("generations")
        self._num_open, self._lock = 0, threading.Lock()
        self._originals: dict[str, Callable[..., Any]] = {}
        self._replacements: dict[str, Callable[..., Any]] = {}

    @contextmanager
    def observed_by(self, observer: CallObserver) -> Iterator[None]:
        """A block whose generations are reported to an observer. Without transformers there are none to report."""
        module = sys.modules.get("transformers.generation.utils")
        mixin = getattr(module, "GenerationMixin", None)
        if mixin is None:
            yield
            return
        self._open(mixin)
        try:
            with self.observers.adding(observer):
                yield
        finally:
            self._close(mixin)

    def _open(self, mixin: Any) -> None:
        """Replace the methods of a class of transformers, `mixin`, if no other block has."""
        with self._lock:
            self._num_open += 1
            if self._num_open > 1:
                return
            for name in METHODS:
                if (original := vars(mixin).get(name)) is not None:
                    self._originals[name], self._replacements[name] = original, self._reporting(name, original)
                    setattr(mixin, name, self._replacements[name])

    def _close(self, mixin: Any) -> None:
        """Restore the methods. If another package has wrapped a replacement, it stays and only passes calls on."""
        with self._lock:
            self._num_open -= 1
            if self._num_open:
                return
            for name, original in self._originals.items():
                if vars(mixin).get(name) is self._replacements[name]:
                    setattr(mixin, name, original)
            self._originals.clear()
            self._replacements.clear()

    def _reporting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """A method that decodes like `original`, which has this name, and reports to the observers."""

        @wraps(original)
        def run(model: Any, input_ids: Tensor, *args: Any, **options: Any) -> Any:
            if not self.observers:
                return original(model, input_ids, *args, **options)
            given = options.get("generation_config")
            if name == BEAMS and given is not None and not given.return_dict_in_generate:
                options["generation_config"] = detailed = copy.copy(given)
                detailed.return_dict_in_generate = True  # the result then has the rows of the beams
            for observer in self.observers:
                observer.generation_started(model, input_ids, options)
            output = None
            try:
                output = original(model, input_ids, *args, **options)
            finally:
                tokens = output if output is None or isinstance(output, Tensor) else output.sequences
                for observer in self.observers:
                    observer.generation_ended(model, tokens, getattr(output, "beam_indices", None))
            # If the configuration was replaced, the caller did not ask for the detailed result.
            return output if options.get("generation_config") is given else tokens

        return run


generation_calls = GenerationCalls()


#: Names under which models of transformers get the tokens of a pass.
TOKENS = ("decoder_input_ids", "input_ids", "decoder_inputs_embeds", "inputs_embeds")


@dataclass(frozen=True)
class StepOptions:
    """What `watch` does after each forward pass: the function that it calls, and the number of passes that it keeps."""

    on_step: Callable[[WatchedStep], object] | None = None
    keep: int | None = None


class WatchedStep(WatchedAttention):
    """One forward pass of a watched model, while it runs: the maps of the rows that it added.

    Use it like the result of `watch`: `step[3]`, `step.cross[0]`, `step.maps`. `number` counts the passes of a
    generation from 0, the prompt. `tokens` (B, I) are those that the model read in this pass (None if it read
    embeddings), and `positions` are their places in the text. The tokens that it predicts come with the next step.

    >>> import torch, transformers, regard as rg
    >>> sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 20, "bos_token_id": 0, "eos_token_id": None}
    >>> model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    >>> with rg.watch(model, on_step=lambda step: print(step.number, step.positions, step[0])):
    ...     tokens = model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=3, do_sample=False)
    0 range(0, 3) AttentionMap(1 x 2 heads x 3 queries x 3 keys)
    1 range(3, 4) AttentionMap(1 x 2 heads x 1 queries x 4 keys)
    2 range(4, 5) AttentionMap(1 x 2 heads x 1 queries x 5 keys)
    """

    def __init__(self, seen: WatchedAttention, a_pass: ForwardPass, number: int, tokens: Tensor | None) -> None:
        modules = {}
        for name, numbers in a_pass.calls.items():
            module = seen._parts[name]
            calls = [module.calls[number - module.num_dropped] for number in numbers]
            modules[name] = ModuleCalls(module.part, calls, module.statistics, module.kind)
        super().__init__(modules, seen._missing, seen._order, seen._verified, seen.model)
        self._take(seen)
        self.number, self.tokens, self.positions = number, tokens, a_pass.positions

    def __repr__(self) -> str:
        lines = super().__repr__().splitlines()[1:]
        return "\n".join([f"WatchedStep({self.number}: positions {self.positions}, {len(self)} modules)", *lines])


class GenerationRecorder(CallObserver):
    """Observes the forward passes of a model, and the beginning and end of each `generate()`.

    `names` returns the modules of the watched model, which may change while it runs. During a generation a pass is a
    call of the model that generates, which may be a part of the watched model; else it is a call of the model.
    `_depth` counts the generations that run inside each other, `_number` the passes of the current one.
    """

    def __init__(
        self,
        seen: WatchedAttention,
        names: Callable[[], Container[nn.Module]],
        model: nn.Module,
        options: StepOptions,
    ) -> None:
        self.seen, self.names, self.model, self.options = seen, names, model, options
        self._record: GenerationRecord | None = None
        self._depth = 0
        self._generating: nn.Module | None = None
        self._started: dict[str, int] = {}
        self._last: list[ForwardPass] = []
        self._number = 0

    # Generations

    def generation_started(self, model: nn.Module, prompt: Tensor, options: dict[str, Any]) -> None:
        """Begin a record; a generation inside another one only marks the record of the outer one as nested.

        `prompt` are the ids (B, n), and `options` the named arguments of the method that decodes.
        """
        if not self._concerns(model):
            return
        check_generation(model, options.get("generation_config"))
        self._depth += 1
        if self._record is not None:
            self._record.is_nested = True
            return
        self._generating = model if model in self.names() else self.model
        self._number = 0
        if self.options.keep is not None:
            self.seen._forget_generations()
        self._record = _record(model, prompt, options, self._counts())
        self.seen._generations.append(partial(Generation, self._record))

    def generation_ended(self, model: nn.Module, tokens: Tensor | None, beams: Tensor | None) -> None:
        """Put the result into the record: tokens with the prompt, and the rows of the beams; None after an error."""
        if not self._concerns(model):
            return
        self._depth -= 1
        if self._depth or self._record is None:
            return
        self._record.tokens = None if tokens is None else tokens.detach().cpu()
        self._record.beams = None if beams is None else beams.detach().cpu()
        self._generating = self._record = None
        self._number = 0

    def _concerns(self, model: nn.Module) -> bool:
        """Whether the model is watched, is a part of the watched model, or contains it."""
        return model in self.names() or any(module is self.model for module in model.modules())

    # Forward passes

    def module_started(self, module: nn.Module) -> None:
        """Note the number of calls before a pass."""
        if self._is_pass(module):
            self._started = self._counts()

    def module_ended(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record a pass, give it to the function of the user, and drop old passes.

        The arguments are those of the module, and what it returned; an output of None is that of an error.
        """
        if output is None or not self._is_pass(module):
            return
        calls = {name: range(self._started.get(name, 0), count) for name, count in self._counts().items()}
        tokens, cached = _tokens(args, kwargs), _num_cached(kwargs, output)
        if cached is not None and tokens is not None and cached < tokens.shape[1]:
            cached = None  # MiniMax's cache counts no tokens
        positions = None if tokens is None else self._positions(tokens.shape[1], cached)
        a_pass = ForwardPass(positions, cached, {name: r for name, r in calls.items() if r})
        self._number += 1
        self._last = [*self._last[-(self.options.keep or 1) :], a_pass]
        if self._record is not None and not self._record.is_dropped:
            self._record.passes.append(a_pass)
        if self.options.on_step is not None:
            ids = None if tokens is None or tokens.is_floating_point() else tokens
            self.options.on_step(WatchedStep(self.seen, a_pass, self._number - 1, ids))
        self._drop_passes()

    def _positions(self, num_tokens: int, cached: int | None) -> range:
        """The places of the tokens of a pass. Without a cache it reads the whole text."""
        if cached is not None:
            return range(cached - num_tokens, cached)
        last = self._last[-1].positions if self._number and self._record is not None else None
        before = 0 if last is None or num_tokens > last.stop else last.stop
        return range(before, before + num_tokens)

    def _drop_passes(self) -> None:
        """Keep the calls of the last passes only."""
        keep = self.options.keep
        if keep is None or len(self._last) <= keep:
            return
        del self._last[:-keep]
        for name, numbers in self._last[0].calls.items():
            self.seen._parts[name].drop_before(numbers.start)
        if self._record is not None and len(self._record.passes) > keep:
            self._record.is_dropped = True
            self._record.passes.clear()

    def _is_pass(self, module: nn.Module) -> bool:
        """Whether a call of this module is a forward pass; not in a nested generation, nor when a backward pass
        computes the forward pass again.
        """
        is_model = module is (self._generating or self.model)
        return is_model and self._depth < 2 and not inside_backward()

    def _counts(self) -> dict[str, int]:
        """The number of calls of each attention module so far."""
        return {name: calls.num_calls for name, calls in self.seen._parts.items()}


def _record(model: Any, prompt: Tensor, options: dict[str, Any], before: dict[str, int]) -> GenerationRecord:
    """The record of a generation that begins with the ids `prompt` (B, n).

    `options` are those of the method that decodes. `before` has the number of calls of each module so far.

    In an encoder-decoder `attention_mask` belongs to the encoder. A mask of other sizes than the prompt says nothing
    about its tokens.
    """
    config = options.get("generation_config")
    ends = getattr(config, "_eos_token_tensor", None)
    translates = bool(getattr(model.config, "is_encoder_decoder", False))
    mask = options.get("attention_mask")
    real = options.get("decoder_attention_mask") if translates else mask
    real = real if isinstance(real, Tensor) and real.shape == prompt.shape else None
    return GenerationRecord(
        prompt=prompt.detach().cpu(),
        real=None if real is None else real.detach().bool().cpu(),
        source=mask.detach().bool().cpu() if translates and isinstance(mask, Tensor) and mask.ndim == 2 else None,
        first=0 if translates else _first_position(prompt, config, options),
        ends=[] if ends is None else ends.flatten().tolist(),
        before=before,
    )


def _first_position(prompt: Tensor, config: Any, options: dict[str, Any]) -> int:
    """The position of the first token of the prompt (B, n): not 0 after embeddings, or if a cache is continued.

    A cache is continued with the whole text, or only with its new tokens. Then the mask is longer than the prompt.
    Without a mask transformers notes its length in `_mask_length`.
    """
    embeddings = options.get("inputs_embeds")
    if isinstance(embeddings, Tensor):
        return embeddings.shape[1] - prompt.shape[1]
    past = cached_length(cache_in(options))
    mask = options.get("attention_mask")
    length = mask.shape[1] if isinstance(mask, Tensor) else getattr(config, "_mask_length", -1)
    return past if past and length != prompt.shape[1] else 0


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The tokens (B, I) that a pass read, or their embeddings (B, I, C); None if no argument is known to be these."""
    given = next((kwargs[name] for name in TOKENS if isinstance(kwargs.get(name), Tensor)), None)
    given = args[0] if given is None and args and isinstance(args[0], Tensor) else given
    return given if given is not None and given.ndim >= 2 else None


def _num_cached(kwargs: dict[str, Any], output: Any) -> int | None:
    """The number of tokens in the cache after a pass; None if there is no cache, or it has no length."""
    cache = cache_in(kwargs)
    cache = cache_in(getattr(output, "__dict__", {})) if cache is None else cache  # old names are properties that warn
    return None if cache is None or kwargs.get("use_cache") is False else cached_length(cache)
