"""`translate` turns one call of an attention backend into an `Attention` with the same weights.

A Hugging Face attention module calls `backend(module, query, key, value, attention_mask, **options)`. Which arguments
change the weights depends on the backend: SDPA reads `is_causal`, eager does not; eager and SDPA have a window in the
mask, flash kernels in an option. If the weights are not certain, `translate` raises `Untranslatable` with the reason:
no map is better than a wrong one.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.base.context import ContextFlag
from regard.base.positions import Positions
from regard.base.shapes import at_least_float32, has_numbers
from regard.edits.layer_edits import CallEdits, EditedTile, LayerEdits
from regard.hf.masks.graph_masks import GraphMask
from regard.hf.masks.mask_tensors import Recognized, recognize
from regard.hf.masks.span_masks import OURS, SpanMask
from regard.pieces.bias import Bias, Softcap
from regard.pieces.data_masks import padding
from regard.pieces.grid import Grid
from regard.pieces.mask import Mask, causal, window
from regard.pieces.mask_checks import own_copy
from regard.pieces.normalizer import LearnedSink, Normalizer, Softmax
from regard.pieces.score import Dot
from regard.pieces.tensor_bias import LearnedBias, bias_of

#: The reason for models on the meta device.
NO_NUMBERS = "its tensors are on the meta device and hold no numbers; load the model's weights first"
#: The reason for calls whose tensors are those of a transform.
TRANSFORMED = "it ran inside of torch.func or torch.export, where its tensors hold no numbers to keep"
#: The backend of modules that call torch's fused attention directly.
DIRECT = "F.scaled_dot_product_attention"
#: The backend of modules that call torch's function of multi-head attention directly.
MULTIHEAD = "F.multi_head_attention_forward"
#: The backend of modules that have an adapter.
ADAPTED = "an adapter"
#: The backend of modules that compute a softmax themselves. Their calls have shapes, but no queries, keys and values.
OWN_SOFTMAX = "its own softmax"
#: The backend of recurrent layers. Their calls have shapes, but no queries, keys and values.
RECURRENCE = "a recurrence"
#: Whether this thread runs a module again for a watch or an edit. Observers do not see such a run.
measuring = ContextFlag("measuring")
#: Options that `translate` reads.
UNDERSTOOD = {"scaling", "is_causal", "sliding_window", "softcap", "s_aux", "position_bias", "dropout"}
#: Options that do not change the weights, or that eager and SDPA do not read.
HARMLESS = {
    "cache_position", "deterministic", "layer_idx", "num_items_in_batch", "output_attentions", "output_hidden_states",
    "position_embeddings", "position_ids", "return_dict", "target_dtype", "training", "use_cache",
}  # fmt: skip
#: Lengths of packed sequences: only flash kernels read them, for other backends they are in the mask.
PACKING = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


class Untranslatable(Exception):
    """The reason why a call cannot be turned into an `Attention`."""


def check_numbers(tensor: Tensor) -> None:
    """Raise `Untranslatable` for the tensor of a call whose numbers cannot be read."""
    if not has_numbers(tensor):
        raise Untranslatable(NO_NUMBERS if tensor.is_meta else TRANSFORMED)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of a backend: the calling module, the backend's name and function, and the arguments.

    A call `to_run` is computed by Regard, not watched: it has gradients and dropout. `logsumexp` is what the kernel of
    the backend returned for its rows, if it was observed, and `states` those of reductions that it computed. `edits`
    change its scores and weights (`regard.edit`).
    `place` has the numbers of its first query and key, if the caller knows them, and `known` the attention. `patched`
    is the output (B, I, H, E) if an edit patched it.
    """

    module: nn.Module
    backend: str
    function: Callable[..., Any]
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    options: dict[str, Any]
    to_run: bool = False
    logsumexp: Tensor | None = None
    states: Mapping[Any, list[Tensor]] = field(default_factory=dict)
    edits: CallEdits | None = None
    place: tuple[int, int] | None = None
    known: Translation | None = None
    patched: Tensor | None = None

    def run(self) -> Any:
        """What the backend returns for these tensors, without the edits."""
        return self.function(self.module, self.query, self.key, self.value, self.mask, **self.options)

    def with_edits(self, edits: LayerEdits, place: tuple[int, int]) -> AttentionCall:
        """The call with more edits; `place` has the numbers of its first query and key in the whole sequence."""
        return replace(self, edits=CallEdits(edits, *place) if self.edits is None else self.edits.and_then(edits))

    def needs_gradient(self, tensor: Tensor) -> bool:
        """Whether the tensor must receive gradients: from the output of a backend, or from a map that carries them."""
        return tensor.requires_grad and torch.is_grad_enabled()

    @property
    def flash(self) -> bool:
        return "flash" in self.backend

    @property
    def causal(self) -> bool:
        """Whether the call asks for a causal mask. As in transformers, a module that does not say so is causal."""
        option = self.options.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if option is None else option)

    @property
    def dropout(self) -> float:
        return float(self.options.get("dropout") or 0.0)

    @property
    def drops(self) -> bool:
        """Whether weights were dropped. torch's own functions apply their dropout argument in eval mode, too."""
        return self.dropout > 0 and (self.module.training or self.backend in (DIRECT, MULTIHEAD))


class CallObserver:
    """Base of observers of the calls of a thread: a watch, an edit, a recorder. Each method does nothing by default.

    `module_started` and `module_ended` enclose the forward of a module. `function_called` reports a call of a function
    of torch, if `observes_functions` returned True for the module that runs; `backend_called` a call of a backend.
    Three methods report edits: `call_edited` a call of torch or of a module in its edited form, in place of the plain
    call (an `ObservedCall`, or an `EditedProbe` if its weights were measured, both in hf/capture/); `softmax_edited`
    how the softmax is changed that is reported next; `output_patched` the patched outputs (B, H, I, E) of the heads of
    a module. `generation_started` and `generation_ended` enclose `generate()`: `prompt` (R, P) and `tokens` (N, L) are
    ids, and `beams` the row of the cache from which beam search took each new token; `tokens` and `beams` are None
    where there are none, as after an error.
    """

    def observes_functions(self, module: nn.Module) -> bool:
        return False

    def module_started(self, module: nn.Module) -> None: ...

    def module_ended(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None: ...

    def function_called(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None: ...

    def backend_called(self, call: AttentionCall, output: Any) -> None: ...

    def call_edited(self, observed: Any) -> None: ...

    def softmax_edited(self, change: Callable[..., Tensor]) -> None: ...

    def output_patched(self, module: nn.Module, output: Tensor) -> None: ...

    def generation_started(self, model: nn.Module, prompt: Tensor, options: dict[str, Any]) -> None: ...

    def generation_ended(self, model: nn.Module, tokens: Tensor | None, beams: Tensor | None) -> None: ...


@dataclass(frozen=True, eq=False)
class Translation:
    """The attention, the positions, and the query (already scaled if the scale is a tensor).

    The attention has the edits of scores; `edits` has those of weights, which follow.
    """

    attention: Attention
    positions: Positions
    query: Tensor
    edits: LayerEdits | None = None

    def edited(self, weights: Tensor, grid: Grid, whole: Grid) -> Tensor:
        """The weights of a tile after the edits of weights; `whole` has all keys of the call."""
        if self.edits is None:
            return weights
        tile = EditedTile(grid, whole, self.attention.mask, self.attention.normalizer.row_sum)
        return self.edits.weights(weights, tile)


@dataclass(eq=False)
class MaskCache:
    """Masks and biases that were already read: the layers of a model share them, so each is read once per forward."""

    _entries: dict[int, tuple[weakref.ref[Tensor], int, Any]] = field(default_factory=dict)

    def get(self, tensor: Tensor, read: Callable[[Tensor], Any]) -> Any:
        """The result of `read(tensor)`, cached until the tensor changes or is freed."""
        version = -1 if tensor.is_inference() else tensor._version  # inference tensors count no changes
        number = id(tensor)
        entry = self._entries.get(number)
        if entry is not None and entry[0]() is tensor and entry[1] == version:
            return entry[2]
        result = read(tensor)
        self._entries[number] = (weakref.ref(tensor, lambda _: self._entries.pop(number, None)), version, result)
        return result


def translate(call: AttentionCall, masks: MaskCache) -> Translation:
    """The attention that this call computes; raises `Untranslatable` if this is not certain."""
    _check(call)
    factor, query = _scale(call)
    recognized, additive = _masking(call, masks)
    positions = recognized.positions(call.query.shape[2], call.key.shape[2])
    attention = Attention(
        Dot(factor),
        bias=_biases(call, additive, positions, masks),
        mask=recognized.mask,
        normalizer=_normalizer(call),
        dropout=call.dropout if call.to_run else 0.0,
    )
    attention = attention.train(call.to_run)
    if call.edits is None:
        return Translation(attention, positions, query)
    edits = call.edits.placed(positions)
    return Translation(edits.attention(attention), positions, query, edits if edits.changes_weights else None)


def _check(call: AttentionCall) -> None:
    """Raise `Untranslatable` for shapes that no attention has, and for options that may change the weights."""
    q, k, v = call.query, call.key, call.value
    if not q.ndim == k.ndim == v.ndim == 4 or len({q.shape[0], k.shape[0], v.shape[0]}) > 1 or q.shape[1] % k.shape[1]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        raise Untranslatable(f"query, key and value have shapes {shapes}, not (batch, heads, length, width)")
    if q.shape[-1] != k.shape[-1]:
        raise Untranslatable(f"queries have width {q.shape[-1]}, keys {k.shape[-1]}")
    unknown = unread_options(call)
    if unknown:
        raise Untranslatable(f"the option {', '.join(map(repr, unknown))} may change its weights in an unknown way")


def unread_options(call: AttentionCall) -> list[str]:
    """Options of the call that `translate` does not know and that the backend may read.

    The eager functions and SDPA of transformers only read the options in their signature. For any other backend every
    option counts.
    """
    given = {name for name, value in call.options.items() if value is not None and value is not False}
    unknown = given - UNDERSTOOD - HARMLESS - (set() if call.flash else PACKING)
    if call.backend in ("eager", "sdpa") and getattr(call.function, "__module__", "").startswith("transformers."):
        unknown &= set(inspect.signature(call.function).parameters)
    return sorted(unknown)


def _scale(call: AttentionCall) -> tuple[float | None, Tensor]:
    """The factor of the scores (None: 1 / sqrt(D)), and the query.

    A tensor with one number becomes a float, unless it must receive gradients. Any other tensor multiplies the query
    here, and the factor is 1. A call that Regard computes keeps the dtype of the query; a map may have a wider one.
    """
    scaling = call.options.get("scaling")
    if scaling is None or (not isinstance(scaling, Tensor) and scaling == call.query.shape[-1] ** -0.5):
        return None, call.query
    if not isinstance(scaling, Tensor):
        return float(scaling), call.query
    learned = call.needs_gradient(scaling)
    if scaling.numel() == 1 and not learned:
        return float(scaling), call.query
    scaled = call.query * (scaling if learned else scaling.detach())
    if scaled.shape != call.query.shape:
        raise Untranslatable(f"'scaling' is a tensor of shape {tuple(scaling.shape)}")
    return 1.0, scaled.to(call.query.dtype) if call.to_run else scaled


def _normalizer(call: AttentionCall) -> Normalizer:
    """Softmax, or softmax with a sink of each head: `s_aux` has the scores of keys without a value.

    If the sinks must receive gradients, the normalizer holds the parameter of the model itself, else a copy.
    """
    sinks = call.options.get("s_aux")
    if sinks is None:
        return Softmax()
    if sinks.numel() != call.query.shape[1]:
        raise Untranslatable(f"the sinks 's_aux' have shape {tuple(sinks.shape)}, not one number for each head")
    normalizer = LearnedSink(call.query.shape[1]).requires_grad_(False)
    if call.needs_gradient(sinks):
        if not isinstance(sinks, nn.Parameter) or sinks.ndim != 1:
            raise Untranslatable("the sinks 's_aux' are computed, not a parameter, and must receive gradients")
        normalizer.sink = sinks
    else:
        normalizer.sink.data = at_least_float32(sinks.detach().reshape(-1)).clone()
    return normalizer


def _biases(call: AttentionCall, additive: Bias | None, positions: Positions, masks: MaskCache) -> list[Bias]:
    """The biases in their order: every backend first caps the scaled product and then adds to it."""
    cap = call.options.get("softcap")
    biases: list[Bias] = [Softcap(float(cap))] if cap else []
    sizes = positions, call.query.shape[2], call.key.shape[2]
    if isinstance(call.mask, Tensor) and call.needs_gradient(call.mask):
        biases.append(LearnedBias(_four_axes(call.mask), positions))
    elif additive is not None:
        biases.append(additive)
    position_bias = call.options.get("position_bias")
    if position_bias is not None and call.needs_gradient(position_bias):
        biases.append(LearnedBias(_four_axes(position_bias), positions))
    elif position_bias is not None:
        biases.append(masks.get(position_bias, lambda tensor: bias_of(_four_axes(tensor), *sizes)))
    return biases


def _masking(call: AttentionCall, masks: MaskCache) -> tuple[Recognized, Bias | None]:
    """The mask, and the bias if `attention_mask` also has numbers to add.

    A mask of two axes is read by flash kernels only: it says which keys are real, and the kernel adds the other rules.
    """
    mask = call.mask
    if mask is None or (call.flash and isinstance(mask, Tensor) and mask.ndim == 2):
        return _implicit(call, mask), None
    if isinstance(mask, SpanMask):
        return mask.recognized(call.query.shape[0], call.query.shape[2], call.key.shape[2]), None
    if isinstance(mask, GraphMask):
        return mask.recognized(), None
    if not isinstance(mask, Tensor):
        raise Untranslatable(
            f"its mask is a {type(mask).__name__}, which Regard cannot read; use attn_implementation='sdpa'"
        )
    # The single query of a causal call may be a step of decoding (`recognize`).
    sizes = call.query.shape[0], call.query.shape[2], call.key.shape[2], call.causal

    def read(tensor: Tensor) -> tuple[Recognized, Bias | None]:
        """The rule of a mask tensor, and a bias if it has other numbers than 0 and -inf."""
        tensor = _four_axes(tensor)[..., : sizes[2]]  # backends of older transformers leave out columns without a key
        if tensor.dtype == torch.bool:
            return recognize(tensor, *sizes), None
        # transformers writes the lowest number for -inf: it and all numbers near it forbid a pair.
        allowed = tensor > (torch.finfo(tensor.dtype).min / 2 if tensor.dtype.is_floating_point else -(2**30))
        recognized = recognize(allowed, *sizes)
        if not bool(((tensor != 0) & allowed).any()):
            return recognized, None
        kept = tensor if call.to_run else own_copy(tensor)  # a user may change it in place after the call
        return recognized, bias_of(kept, recognized.positions(*sizes[1:3]), *sizes[1:3])

    return masks.get(mask, read)


def _implicit(call: AttentionCall, real: Tensor | None) -> Recognized:
    """The mask that the backend applies itself when there is no mask tensor; `real` (B, n): keys that are no padding.

    Eager adds no rule of its own, and SDPA makes a single query causal only if a module calls it directly. A window is
    an option that flash kernels read; eager, SDPA and Regard have it in the mask. `real` may begin before the keys.
    """
    I, J = call.query.shape[2], call.key.shape[2]
    rules: list[Mask] = []
    start = None  # the last query stands at the last key
    if call.causal and call.backend != "eager" and (I > 1 or call.flash or call.backend == DIRECT):
        rules.append(causal())
        start = None if call.flash or I == J else 0  # torch aligns the first query with the first key
    size = call.options.get("sliding_window")
    if size and call.backend not in ("eager", "sdpa", OURS, DIRECT):
        rules.append(window(int(size)))
    if real is not None:
        rules.append(padding(real[:, -J:].bool()))
    return Recognized(reduce(and_, rules) if rules else None, start)


def _four_axes(tensor: Tensor) -> Tensor:
    """A mask or a bias (I, J) or (B, H, I, J) with four axes."""
    if tensor.ndim == 2:
        return tensor[None, None]
    if tensor.ndim == 4:
        return tensor
    raise Untranslatable(f"its mask or bias has shape {tuple(tensor.shape)}, not (batch, heads, queries, keys)")
