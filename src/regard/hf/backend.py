"""`register` makes Regard a backend of transformers: `attn_implementation="regard"`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.attention_output import attend_editors, attend_listeners
from regard.base.checks import checked
from regard.base.errors import MissingPackage, RegardError
from regard.base.positions import Positions
from regard.base.shapes import in_autocast_dtype, is_autocast
from regard.base.versions import check_register
from regard.engine.decoding import decode
from regard.engine.kept_plans import Repeat, Request, is_plain_call, kept_plans
from regard.engine.kernel.attention import is_few
from regard.engine.kernel.library import SETTING, load_fast
from regard.engine.kernel.operator import attention
from regard.engine.kernel.structures import has_address
from regard.engine.ring import Ring
from regard.engine.transforms import is_transformed
from regard.hf.calls import HARMLESS, UNDERSTOOD, AttentionCall, MaskCache, Translation, Untranslatable, translate
from regard.hf.masks.graph_masks import GraphMask
from regard.hf.masks.span_masks import OURS, SpanMask, spans_mask
from regard.hf.operator_calls import call_operator, fits_operator
from regard.pieces.normalizer import any_coarse

#: Masks and biases that the layers of a model share, read once per forward.
_masks = MaskCache()
#: How a call runs: (B, H, I, D), (B, G, J, D), (B, G, J, E) -> (B, I, H, E).
Way = Callable[[Tensor, Tensor, Tensor], Tensor]
#: The ways of the last kinds of calls: the layers of a model, and the tokens after a cache of one size, share them.
_ways: dict[tuple[Any, ...], Way] = {}
#: How many are kept: a model has one for each of its kinds of layers.
KEPT = 8
#: The types of options that decide by their numbers.
NUMBERS = float, int


@checked
def register() -> None:
    """Run any Hugging Face model on Regard's engines: load it with `attn_implementation="regard"`.

    Masks become spans instead of n x n tensors: causal, windows, chunks, padding, packed sequences. Softcaps, sinks,
    position biases, shared heads, caches, dropout and gradients work as in the model, and outputs equal those of sdpa
    up to rounding. A model that Regard cannot run raises a `RegardError` when it is built or at its first call.
    Calling `register` twice changes nothing. Inside `Ring.as_default` a model runs on the share of each rank, without
    padding and with its `position_ids`.

    >>> import torch, transformers, regard as rg
    >>> rg.register()
    >>> config = transformers.LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=20)
    >>> model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="regard").eval()
    >>> model(torch.tensor([[3, 1, 4, 1, 5]])).logits.shape
    torch.Size([1, 5, 20])
    """
    if find_spec("transformers") is None:
        raise MissingPackage("register", "transformers", "hf")
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    check_register()
    if OURS in AttentionInterface():
        return
    from regard.hf.compiled import attention_function, mark_mask_functions, mask_maker

    AttentionInterface.register(OURS, attention_function(run))
    AttentionMaskInterface.register(OURS, mask_maker(spans_mask))
    mark_mask_functions()
    _refuse_models_with_backends_of_their_own(PreTrainedModel)


def run(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The backend function of transformers: (B, H, I, D), (B, G, J, D), (B, G, J, E) -> (B, I, H, E), None.

    `attention_mask` is the `SpanMask` that this backend makes, or a tensor of the model; None allows what the options
    and the module say.
    """
    kind = _kind(module, query, key, value, attention_mask, options)
    way = None if kind is None else _ways.get(kind)
    if way is None:
        way = _way(AttentionCall(module, OURS, run, query, key, value, attention_mask, options, to_run=True))
        if kind is not None:
            for oldest in tuple(_ways)[: max(0, len(_ways) + 1 - KEPT)]:  # a copy: other threads may keep ways, too
                _ways.pop(oldest, None)
            _ways[kind] = way
    return way(query, key, value), None


def _kind(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
) -> tuple[Any, ...] | None:
    """All that decides how a call runs, if it is numbers and the rule of a mask; None if anything else decides.

    A tensor among the options decides by its numbers, and a ring by its ranks.
    """
    given = [(n, x) for n, x in options.items() if x is not None and n not in HARMLESS]
    if not (mask is None or type(mask) is SpanMask) or not all([isinstance(x, NUMBERS) for _, x in given]):
        return None
    if Ring.default() is not None or options.get("output_attentions") or not is_plain_call(query, key, value):
        return None
    masked = None if mask is None else (mask.rule.mask, mask.rule.start, mask.rule.first, mask.shape)
    learns = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    dtypes = query.dtype, key.dtype, value.dtype, torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    causal = options.get("is_causal") is None and getattr(module, "is_causal", True)
    setting = os.environ.get(SETTING)  # which kernels may run
    return masked, query.shape, key.shape, value.shape, *dtypes, learns, causal, setting, *given


def _way(call: AttentionCall) -> Way:
    """How a call runs: a function of queries, keys and values that serves all calls of its kind."""
    decoded = _decoding(call)
    if decoded is not None:
        return decoded
    if call.options.get("output_attentions"):
        raise RegardError(
            f"regard: {type(call.module).__name__} was called with output_attentions, which returns all weights at "
            "once. `with rg.watch(model) as seen` computes any of them on demand."
        )
    try:
        translation = translate(call, _masks)
    except Untranslatable as reason:
        raise RegardError(
            f"regard: the attention of {type(call.module).__name__} cannot be run: {reason}. "
            "Set attn_implementation='sdpa' or 'eager' for this model."
        ) from None
    if Ring.default() is not None:
        output = _run_share(translation, call.key, call.value, call.options.get("position_ids"))
        return lambda query, key, value: _heads_last(output)
    attend, positions = translation.attention, translation.positions
    if translation.query is call.query:
        return _attending(attend, positions)
    scaled = translation.query  # by a tensor
    return lambda query, key, value: _heads_last(attend(scaled, key, value, positions=positions).output)


def _attending(attention: Attention, positions: Positions) -> Way:
    """A call of `attend`. The later ones of its kind repeat what its plan computes, where nobody asks for their maps.

    Such a call is the engine alone, without the checks and the map of `attend`, which take 0.3 milliseconds in a model.
    """
    repeats: list[Repeat] = []

    def way(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if repeats and not (attend_listeners or attend_editors):
            result = repeats[0].run(query, key, value)
            if result is not None:
                return _heads_last(result.output)
        output = attention(query, key, value, positions=positions).output
        if not (repeats or attention.dropout or is_autocast(query.device)):
            kept = kept_plans.find(Request(attention, query, key, value, positions, None, None, "auto"))[0]
            repeats.extend([] if kept is None or kept.repeat is None else [kept.repeat])
        return _heads_last(output)

    return way


def _heads_last(output: Tensor) -> Tensor:
    """(B, H, I, E) -> (B, I, H, E), contiguous."""
    return output.transpose(1, 2).contiguous()


def _decoding(call: AttentionCall) -> Way | None:
    """How the few queries of decoding run, by the kernel without a plan; None if it does not run such a call.

    Planning takes longer than the arithmetic: with a cache that grows, 0.60 milliseconds a call in place of 0.20.
    As many queries as keys are no decoding, and take the usual path. So do calls that the operator cannot express, and
    calls without a query or a key, at which torch's kernel divides by zero.
    """
    mask, options = call.mask, call.options
    tensors = call.query, call.key, call.value, options.get("s_aux")
    if not call.query.ndim == call.key.ndim == call.value.ndim == 4 or not all(t.numel() for t in tensors[:3]):
        return None
    num_queries, num_keys = call.query.shape[2], call.key.shape[2]
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if not is_few(call.query.shape[1] // call.key.shape[1] * num_queries, learns) or num_queries == num_keys:
        return None
    if Ring.default() is not None or is_transformed():
        return None
    if isinstance(mask, SpanMask):
        rule = mask.recognized(call.query.shape[0], num_queries, num_keys)
        mask = GraphMask.of(rule, num_queries, num_keys) or mask
    query, key, value = (in_autocast_dtype(t) for t in tensors[:3])
    if not (mask is None or isinstance(mask, GraphMask)) or not all(map(has_address, (query, key, value))):
        return None
    if options.get("dropout") or not fits_operator(query, key, value, options):
        return None
    # Float32 is too coarse for the share of so large a sink. Planning finds an engine that does not need it.
    if options.get("s_aux") is not None and any_coarse(options["s_aux"]):
        return None
    if _is_plain(mask, num_queries, num_keys, options):
        scale = query.shape[3] ** -0.5 if options.get("scaling") is None else float(options["scaling"])
        if not is_autocast(query.device):
            return lambda query, key, value: _heads_last(decode(query, key, value, scale)[0])
        cast = in_autocast_dtype
        return lambda query, key, value: _heads_last(decode(cast(query), cast(key), cast(value), scale)[0])
    if load_fast() is None:
        return None
    options = {name: options.get(name) for name in UNDERSTOOD} | {"is_causal": call.causal}

    def by_operator(*tensors: Tensor) -> Tensor:
        query, key, value = map(in_autocast_dtype, tensors)
        return call_operator(attention, None, query, key, value, mask, options)

    return by_operator


def _is_plain(mask: GraphMask | None, num_queries: int, num_keys: int, options: dict[str, Any]) -> bool:
    """Whether one query attends to all keys, by a softmax of scaled dot products.

    The query has position `mask.start`, and the keys have `mask.first` and those after it. The query sees them all if
    it is not before the last key, if the first key is inside its window, and if no key is padding.
    """
    if num_queries > 1 or options.get("softcap") or options.get("s_aux") is not None:
        return False
    if mask is None:
        return True
    stop = mask.first + num_keys
    is_late = not mask.is_causal or mask.start >= stop - 1
    is_near = not mask.window or mask.start - mask.first < mask.window
    # Keys behind the end of `real` are not written yet.
    is_real = mask.real is None or (mask.real.shape[1] >= stop and bool(mask.real[:, mask.first : stop].all()))
    return bool(is_late and is_near and is_real) and mask.groups is None


def _run_share(translation: Translation, key: Tensor, value: Tensor, position_ids: Tensor | None) -> Tensor:
    """The output for this rank's share of the tokens. The ring knows their positions."""
    seen = translation.attention(translation.query, key, value)
    positions = seen.weights.grid.query
    if position_ids is not None and not bool((position_ids == positions).all()):
        raise RegardError(
            f"regard: inside Ring.as_default this rank has the tokens at the positions {int(positions[0])} to "
            f"{int(positions[-1])}, and position_ids are {int(position_ids.min())} to {int(position_ids.max())}. Give "
            "each rank its own: model(ring.share(ids, axis=1), position_ids=ring.share(torch.arange(n)[None], axis=1))."
        )
    return seen.output


def _refuse_models_with_backends_of_their_own(base: Any) -> None:
    """Refuse "regard" for models without the attention interface, which accept any name and run their own code."""
    original = base.get_correct_attn_implementation

    @wraps(original)
    def get_correct_attn_implementation(self: Any, requested_attention: Any, is_init_check: bool = False) -> Any:
        if requested_attention == OURS and not self._can_set_attn_implementation():
            raise RegardError(
                f"regard: {type(self).__name__} computes attention in its own code, without a backend, so "
                "attn_implementation='regard' would change nothing. Load it without; rg.watch may capture its maps."
            )
        return original(self, requested_attention, is_init_check)

    base.get_correct_attn_implementation = get_correct_attn_implementation
