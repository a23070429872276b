"""`GenerationRecorder` notes which calls belong to each forward pass of a model, and to each `generate()`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from regard.hf.capture.captured_calls import ModuleCalls
from regard.hf.capture.generation import ForwardPass, GenerationRecord
from regard.hf.capture.module_hooks import inside_backward

#: Names under which models of transformers get their cache, and the tokens of a pass.
CACHES = ("past_key_values", "cache_params", "past_buckets_states", "mems", "state")
TOKENS = ("decoder_input_ids", "input_ids", "decoder_inputs_embeds", "inputs_embeds")


@dataclass(eq=False)
class GenerationRecorder:
    """Observes the forward passes of a model, and the beginning and end of each `generate()`."""

    model: nn.Module
    names: Callable[[], Any]
    calls: dict[str, ModuleCalls]
    records: list[GenerationRecord]

    def __post_init__(self) -> None:
        self._depth = 0
        self._generating: nn.Module | None = None
        self._started: dict[str, int] = {}

    # Generations

    def generation_started(self, model: nn.Module, prompt: Tensor, options: dict[str, Any]) -> None:
        if not self._concerns(model):
            return
        self._depth += 1
        if self._depth > 1:
            self.records[-1].is_nested = True
            return
        self._generating = model if model in self.names() else self.model
        self.records.append(_record(model, prompt, options, self._counts()))

    def generation_ended(self, model: nn.Module, tokens: Tensor | None, beams: Tensor | None) -> None:
        if not self._concerns(model):
            return
        self._depth -= 1
        if self._depth:
            return
        self._generating = None
        record = self.records[-1]
        record.tokens = None if tokens is None else tokens.detach().cpu()
        record.beams = None if beams is None else beams.detach().cpu()

    def _concerns(self, model: nn.Module) -> bool:
        """Whether the model is watched, is a part of the watched model, or contains it."""
        return model in self.names() or any(module is self.model for module in model.modules())

    # Forward passes

    def observes_functions(self, module: nn.Module) -> bool:
        return False

    def function_called(self, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Functions are not observed."""

    def module_started(self, module: nn.Module) -> None:
        if self._is_pass(module):
            self._started = self._counts()

    def module_ended(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if output is None or not self._is_pass(module):
            return
        counts = self._counts()
        calls = {name: range(self._started.get(name, 0), count) for name, count in counts.items()}
        a_pass = ForwardPass(
            _num_tokens(args, kwargs), _num_cached(kwargs, output), {n: r for n, r in calls.items() if r}
        )
        if self._generating is not None:
            self.records[-1].passes.append(a_pass)

    def _is_pass(self, module: nn.Module) -> bool:
        return module is (self._generating or self.model) and not inside_backward()

    def _counts(self) -> dict[str, int]:
        return {name: len(calls.calls) for name, calls in self.calls.items()}


def _record(model: Any, prompt: Tensor, options: dict[str, Any], before: dict[str, int]) -> GenerationRecord:
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
    """The position of the first token of the prompt: not 0 after embeddings, or if an earlier cache is continued.

    A cache is continued with the whole text, or only with its new tokens. Then the mask is longer than the prompt.
    """
    embeddings = options.get("inputs_embeds")
    if isinstance(embeddings, Tensor):
        return embeddings.shape[1] - prompt.shape[1]
    past = _length(options.get("past_key_values"))
    mask = options.get("attention_mask")
    length = mask.shape[1] if isinstance(mask, Tensor) else getattr(config, "_mask_length", -1)
    return past if past and length != prompt.shape[1] else 0


def _num_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    given = next((kwargs[name] for name in TOKENS if isinstance(kwargs.get(name), Tensor)), None)
    given = args[0] if given is None and args and isinstance(args[0], Tensor) else given
    return given.shape[1] if given is not None and given.ndim >= 2 else None


def _num_cached(kwargs: dict[str, Any], output: Any) -> int | None:
    """The number of tokens in the cache after a pass; None if there is no cache, or it has no length."""
    for name in CACHES:
        cache = kwargs.get(name)
        cache = getattr(output, name, None) if cache is None else cache
        if cache is not None and kwargs.get("use_cache") is not False:
            return _length(cache)
    return None


def _length(cache: Any) -> int | None:
    length = getattr(cache, "get_seq_length", None)
    if length is None:
        return None
    try:
        return int(length())
    except (ValueError, TypeError, AttributeError, IndexError):  # a cache without attention layers
        return None
