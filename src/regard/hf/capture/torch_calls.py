"""`AttentionCall`s of torch: of its attention functions, of `nn.MultiheadAttention` and of its encoder layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.base.errors import RegardError
from regard.base.shapes import at_least_float32, spread_indices
from regard.hf.adapters import read_call
from regard.hf.calls import ADAPTED, DIRECT, MULTIHEAD, AttentionCall, Untranslatable, measuring

#: Rows of inputs and weights that are copied, to detect whether they changed after the call.
ROWS = 4


@dataclass(frozen=True, eq=False)
class ProjectionInputs:
    """The inputs of one call, for queries (B, I, C), keys and values (B, J, C), and the three projections.

    `weights` (C, C) and `biases` (C,) are the module's own tensors, for queries, keys and values.
    """

    num_heads: int
    tensors: tuple[Tensor, Tensor, Tensor]
    weights: tuple[Tensor, Tensor, Tensor]
    biases: tuple[Tensor | None, Tensor | None, Tensor | None]

    @staticmethod
    def of(module: nn.MultiheadAttention, inputs: Sequence[Tensor]) -> ProjectionInputs | None:
        """The inputs of a call; None if its keys or values are not just projections of them."""
        adds = module.bias_k is not None or module.bias_v is not None or module.add_zero_attn
        if adds or module.in_proj_weight is None or torch.is_autocast_enabled(inputs[0].device.type):
            return None
        query, key, value = (x.detach() for x in inputs)
        bias = module.in_proj_bias
        biases = (None, None, None) if bias is None else tuple(bias.detach().chunk(3))
        weights = tuple(module.in_proj_weight.detach().chunk(3))
        return ProjectionInputs(module.num_heads, (query, key, value), weights, biases)  # type: ignore[arg-type]

    def shaped(self) -> tuple[Tensor, Tensor, Tensor]:
        """Zeros in the shapes of the queries, keys and values; they take no memory."""
        width = self.weights[0].shape[0] // self.num_heads
        sizes = ((len(x), self.num_heads, x.shape[1], width) for x in self.tensors)
        query, key, value = (x.new_zeros(1).expand(size) for x, size in zip(self.tensors, sizes, strict=True))
        return query, key, value

    def projected(self, number: int, x: Tensor) -> Tensor:
        """The projection of x to queries (0), keys (1) or values (2), (B, H, I, D)."""
        flat = F.linear(x, self.weights[number], self.biases[number])
        return flat.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def folded(self, entries: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A few queries times the key projection, (b, H, r, C), and unprojected keys and values, (b, 1, J, C).

        q_i . (x_j W + c) = (q_i W') . x_j + q_i . c. The last term is the same for every key, so it does not change
        the softmax. For a few rows this avoids projecting all keys and values.
        """
        query, key, value = self.tensors
        q = self.projected(0, query[entries[:, None], rows])
        folded = at_least_float32(q) @ at_least_float32(self.weights[1]).unflatten(0, (self.num_heads, -1))
        scale = (folded.shape[-1] / q.shape[-1]) ** 0.5  # scores are divided by the square root of the width
        key, value = (x if len(x) == len(entries) else x[entries] for x in (key, value))  # no copy of the whole batch
        return folded * scale, key[:, None], value[:, None]

    def project_output(self, mixed: Tensor) -> Tensor:
        """Head outputs (b, H, r, D) from weighted sums of unprojected values, sum_j w_ij x_j (b, H, r, C).

        The weights of a row sum to 1, so the bias is added once.
        """
        weight, bias = self.weights[2].unflatten(0, (self.num_heads, -1)), self.biases[2]
        projected = mixed @ weight.mT.to(mixed.dtype)
        return projected if bias is None else projected + bias.view(self.num_heads, 1, -1)

    def versions(self, with_values: bool = False) -> list[int]:
        """How often each tensor was changed in place. Tensors of inference mode have no counter."""
        last = 3 if with_values else 2
        tensors = (*self.tensors[:last], *self.weights[:last], *(b for b in self.biases[:last] if b is not None))
        return [tensor._version for tensor in tensors if not tensor.is_inference()]

    def sample(self, with_values: bool = False) -> list[Tensor]:
        """A few rows of the inputs and weights of queries and keys, and of values if they are read later."""
        last = 3 if with_values else 2
        inputs = (*self.tensors[:last], *(weight[None] for weight in self.weights[:last]))
        return [x[:, spread_indices(x.shape[1], ROWS, x.device)] for x in inputs]


#: (head outputs (b, H, r, E), batch entries, rows) -> the output of the module for these rows, (b, r, C).
Finish = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class ObservedCall:
    """A call and the output that the model computed: (B, I, H, E) of a backend or a function, (B, I, C) of a module.

    `finish` is the function from head outputs to this output; None if they are equal but for the order of their axes.
    If `is_whole`, it takes all rows of the whole batch at once, and reads only its first argument. `weights` are those
    that a backend returned. With `inputs`, the queries, keys and values are not projected yet, and the call has only
    their shapes.
    """

    call: AttentionCall
    output: Tensor
    finish: Finish | None = None
    inputs: ProjectionInputs | None = None
    weights: Tensor | None = None
    is_whole: bool = False


def observed_module(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, deferred: bool = False
) -> ObservedCall:
    """The call of a module that has an adapter, or of `nn.MultiheadAttention`, after its forward returned `output`.

    With `deferred`, the inputs of `nn.MultiheadAttention` are projected when the map is read.
    """
    if isinstance(module, nn.MultiheadAttention):
        return multihead(module, args, kwargs, output, deferred)
    with measuring.on():
        adapted = read_call(module, args, kwargs)

    first = output[0] if isinstance(output, tuple | list) else output

    def finish(heads: Tensor, *_: Tensor) -> Tensor:
        """The output of the module, as its adapter computes it; a wrong shape is the mistake of the adapter."""
        with measuring.on():
            finished = adapted.finish(heads)
        shape = getattr(finished, "shape", None)
        if shape != first.shape:
            got = type(finished).__name__ if shape is None else tuple(shape)
            raise RegardError(
                f"adapter({type(module).__name__!r}): finish must return a tensor of shape {tuple(first.shape)}, as "
                f"the module does, got {got}."
            )
        return finished

    options = {"is_causal": False, "scaling": adapted.scale, "dropout": adapted.dropout}
    tensors = adapted.query, adapted.key, adapted.value
    call = AttentionCall(module, ADAPTED, read_call, *tensors, adapted.mask, options)
    return ObservedCall(call, first, finish, is_whole=True)


def observed_backend(call: AttentionCall, output: Any) -> ObservedCall:
    """A call of a backend of transformers, which may return its weights beside its output."""
    if not isinstance(output, tuple | list):
        return ObservedCall(call, output)
    first, *others = output
    return ObservedCall(call, first, weights=next((x for x in others if isinstance(x, Tensor)), None))


def sdpa(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> ObservedCall:
    """A call of `F.scaled_dot_product_attention`, and its output. All axes before the last three are the batch."""
    given = sdpa_arguments(args, kwargs)
    query, mask = given["query"], given["attn_mask"]
    if any(given[name].is_nested for name in ("query", "key", "value")):
        raise Untranslatable("its inputs are nested tensors; give padded ones and attn_mask")
    if query.ndim > 2:
        given["query"] = query.expand(*query.shape[:-3], output.shape[-3], -1, -1)  # one head may ask all key heads
    tensors = [given["query"], given["key"], given["value"], mask]
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors if x is not None))
    if any(x.shape[:-3] != batch or x.ndim != 4 for x in tensors[:3]):
        given |= {name: _with_batch(x, batch) for name, x in zip(given, tensors[:3], strict=False)}
        given["attn_mask"] = mask if mask is None or mask.ndim < 4 else _with_batch(mask, batch)
        output = _with_batch(output, batch)
    return ObservedCall(sdpa_call(module, (), given), output.transpose(1, 2))


def sdpa_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `F.scaled_dot_product_attention`, by name."""
    return _arguments(_sdpa, *args, **kwargs)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    """The parameters of `F.scaled_dot_product_attention`, which as a builtin function has no signature."""


def _causal_tensor(mask: Any) -> Any:
    """A mask of `torch.nn.attention.bias` as a boolean tensor; its own numbers are not initialized."""
    if type(mask).__name__ != "CausalBias":
        return mask
    I, J = mask.seq_len_q, mask.seq_len_kv
    aligned = J - I if mask.variant.name == "LOWER_RIGHT" else 0
    return torch.ones(I, J, dtype=torch.bool, device=mask.device).tril(aligned)


def _with_batch(x: Tensor, batch: torch.Size) -> Tensor:
    """A tensor (..., H, n, D) with one batch axis; without an axis of heads it has one head."""
    x = x if x.ndim > 2 else x[None]
    return x.expand(*batch, *x.shape[-3:]).reshape(batch.numel(), *x.shape[-3:])


def sdpa_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionCall:
    """A call of `F.scaled_dot_product_attention` with queries (B, H, I, D), whose mask gets four axes.

    `Untranslatable` for other axes, and for a mask beside is_causal.
    """
    given = sdpa_arguments(args, kwargs)
    query, key, value = (given[name] for name in ("query", "key", "value"))
    mask = _causal_tensor(given["attn_mask"])
    if query.ndim != 4:
        shape = tuple(query.shape)
        raise Untranslatable(
            f"F.scaled_dot_product_attention was called with queries of shape {shape}, which has no separate axes for "
            "batch and heads; give it (batch, heads, length, width)"
        )
    causal = bool(given.get("is_causal"))
    if mask is not None and causal:
        raise Untranslatable("F.scaled_dot_product_attention was given both attn_mask and is_causal; give one of them")
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    options = {"is_causal": causal, "scaling": given.get("scale"), "dropout": given.get("dropout_p")}
    function = F.scaled_dot_product_attention
    return AttentionCall(module, DIRECT, function, query, key, value, mask, options)


def multihead(
    module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, deferred: bool = False
) -> ObservedCall:
    """A call of `nn.MultiheadAttention` on any of its three paths. Queries and keys are projected again.

    With `deferred` they are projected when the map is read, unless it carries gradients.
    """
    if type(module).forward is not nn.MultiheadAttention.forward:
        raise Untranslatable(f"{type(module).__name__} replaces the forward of nn.MultiheadAttention")
    given = multihead_arguments(module, args, kwargs)
    inputs = [given[name] for name in ("query", "key", "value")]
    if any(x.is_nested for x in inputs):
        raise Untranslatable("its inputs are nested tensors; give padded ones and key_padding_mask")
    return _observed(module, module, given, output[0], module.batch_first, deferred)


def multihead_function(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> ObservedCall:
    """A call of `F.multi_head_attention_forward` by a module that has the weights itself."""
    given = multihead_arguments(None, args, kwargs)
    static = [name for name in ("static_k", "static_v") if given[name] is not None]
    if static:
        raise Untranslatable(f"F.multi_head_attention_forward was given {' and '.join(static)}; give key and value")
    layer = SimpleNamespace(
        **given, out_proj=SimpleNamespace(weight=given["out_proj_weight"], bias=given["out_proj_bias"])
    )
    layer.dropout = given["dropout_p"] if given["training"] else 0.0
    layer.in_proj_weight = None if given["use_separate_proj_weight"] else given["in_proj_weight"]
    return _observed(module, layer, given, output[0])


def multihead_arguments(module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `nn.MultiheadAttention`, by name; without a module, of the function of torch."""
    if module is None:
        return _arguments(F.multi_head_attention_forward, *args, **kwargs)
    return _arguments(nn.MultiheadAttention.forward, module, *args, **kwargs)


def _observed(
    module: nn.Module,
    layer: Any,
    given: dict[str, Any],
    output: Tensor,
    batch_first: bool = False,
    deferred: bool = False,
) -> ObservedCall:
    """A call that torch projects with the weights of `layer`: a module, or an object with the same attributes.

    `given` are its arguments, and `output` is what it returned, with the axes that it was given. Inputs without a batch
    axis get one. `batch_first` is the order of axes of all these. With `deferred` queries and keys are projected when
    the map is read. `added` is the number of keys that torch adds (bias_k, add_zero_attn).
    """
    inputs, padded = [given[name] for name in ("query", "key", "value")], given["key_padding_mask"]
    if inputs[0].ndim == 2:
        inputs, output = [x[None] for x in inputs], output[None]
        padded = None if padded is None else padded[None]
    elif not batch_first:
        inputs, output = [x.transpose(0, 1) for x in inputs], output.transpose(0, 1)
    masked, added = given["attn_mask"], (layer.bias_k is not None) + bool(layer.add_zero_attn)
    if added and given["is_causal"] and padded is None and not given["need_weights"]:
        # torch leaves out the mask and aligns the first query with the first of all keys, so the added ones are hidden
        I, J = inputs[0].shape[1], inputs[1].shape[1]
        masked = torch.ones(I, J + added, dtype=torch.bool, device=inputs[0].device).triu(1)
    call, kept = _call(module, layer, inputs, masked, padded, deferred)
    return ObservedCall(call, output, lambda heads, *_: _merged(layer, heads), kept)


def encoder_layer(
    layer: nn.TransformerEncoderLayer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
    deferred: bool = False,
) -> ObservedCall:
    """A call of `nn.TransformerEncoderLayer` on its fused path, which calls none of its modules.

    The fused path returns only the output of the whole layer, so `finish` computes the rest of the layer. With
    `deferred` queries and keys are projected when the map is read.
    """
    given = _arguments(nn.TransformerEncoderLayer.forward, layer, *args, **kwargs)
    src, padded = given["src"], given["src_key_padding_mask"]
    nested = src.is_nested
    if nested:
        lengths = torch.tensor([len(sequence) for sequence in src.unbind()], device=src.device)
        src, output = src.to_padded_tensor(0.0), output.to_padded_tensor(0.0)
        padded = torch.arange(src.shape[1], device=src.device) >= lengths[:, None]
    inputs = [layer.norm1(src) if layer.norm_first else src] * 3

    def finish(heads: Tensor, entries: Tensor, rows: Tensor) -> Tensor:
        x = src[entries[:, None], rows] + _merged(layer.self_attn, heads)
        if nested:  # padding rows were not computed, so they are not compared
            x = x.masked_fill(padded[entries[:, None], rows, None], torch.nan)
        if layer.norm_first:
            return x + layer._ff_block(layer.norm2(x))
        x = layer.norm1(x)
        return layer.norm2(x + layer._ff_block(x))

    call, kept = _call(layer.self_attn, layer.self_attn, inputs, given["src_mask"], padded, deferred)
    return ObservedCall(call, output, finish, kept)


def _arguments(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name, with the defaults."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _call(
    module: nn.Module,
    layer: Any,
    inputs: list[Tensor],
    masked: Tensor | None,
    padded: Tensor | None,
    deferred: bool,
) -> tuple[AttentionCall, ProjectionInputs | None]:
    """The call with projected inputs, (B, n, C) each, and the inputs themselves if it is deferred.

    `layer` has the weights: the module itself, or what `multihead_function` makes of the arguments of a function. In
    both masks, `masked` of pairs and `padded` (B, J) of keys, True means: may not attend. Every query may attend to the
    keys that torch adds at the end.
    """
    kept = ProjectionInputs.of(layer, inputs) if deferred and not torch.is_grad_enabled() else None
    q, k, v = _projected(layer, inputs) if kept is None else kept.shaped()
    mask = _mask(masked, padded, len(q), q.shape[1], inputs[1].shape[1])
    if mask is not None and k.shape[2] > mask.shape[-1]:
        mask = F.pad(mask, (0, k.shape[2] - mask.shape[-1]), value=True if mask.dtype == torch.bool else 0.0)
    options = {"is_causal": False, "dropout": layer.dropout}
    backend = MULTIHEAD if layer is not module else "nn.MultiheadAttention"
    return AttentionCall(module, backend, F.multi_head_attention_forward, q, k, v, mask, options), kept


def _projected(module: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Queries, keys and values (B, H, n, D), with the keys that the module adds (bias_k, add_zero_attn)."""
    separate = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    weights = separate if module.in_proj_weight is None else module.in_proj_weight.chunk(3)
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    q, *kv = (F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))
    for number, added in enumerate((module.bias_k, module.bias_v)):
        own = [] if added is None else [added.to(q.dtype).expand(len(q), 1, -1)]
        zero = [q.new_zeros(len(q), 1, q.shape[-1])] if module.add_zero_attn else []
        kv[number] = torch.cat([kv[number], *own, *zero], 1) if own or zero else kv[number]
    return [x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for x in (q, *kv)]


def _mask(masked: Tensor | None, padded: Tensor | None, B: int, H: int, J: int) -> Tensor | None:
    """Both masks as one (B or 1, H or 1, I or 1, J): True = may attend, or numbers added to the scores.

    `masked` is (I, J) or (B H, I, J), and `padded` (B, J). Booleans in them: True = may not attend. None without both.
    """
    given = []
    if masked is not None:
        given.append(masked[None, None] if masked.ndim == 2 else masked.unflatten(0, (B, H)))
    if padded is not None:
        given.append(padded.view(B, 1, 1, J))
    if not given:
        return None
    if all(mask.dtype == torch.bool for mask in given):
        return ~(given[0] | given[-1])
    return torch.stack(torch.broadcast_tensors(*(_additive(mask) for mask in given))).sum(0)


def _additive(mask: Tensor) -> Tensor:
    """A mask as numbers to add to the scores: -inf where a boolean one is True."""
    return (
        torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask
    )


def _merged(module: Any, heads: Tensor) -> Tensor:
    """Head outputs (b, H, r, E) through the output projection, (b, r, C)."""
    out = module.out_proj
    return F.linear(heads.transpose(1, 2).flatten(2).to(out.weight.dtype), out.weight, out.bias)
