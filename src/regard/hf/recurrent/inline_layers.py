"""Recurrent layers that compute inside one module: read from its inputs, its output and those of its parts."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.base.shapes import at_least_float32
from regard.hf.calls import Untranslatable
from regard.hf.names import cache_in
from regard.hf.recurrent.core_calls import CONVOLUTION, GATED, LINEAR, CoreCall, heads_first, state_copies
from regard.maps.scored_map import Convolution
from regard.pieces.transition import Steps


@dataclass(eq=False)
class Seen:
    """One call of a module: its arguments, its state before the call, and inputs and outputs of its parts."""

    given: dict[str, Any]
    before: tuple[Tensor, ...] = ()
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)


class InlineReader(Protocol):
    """Reads one kind of module. `parts` are the parts whose inputs and outputs it needs. The last one reads the output
    of the recurrence; without parts the module returns it.

    `state_before` gets the arguments by name before the module runs, and returns copies of its state; empty if it has
    none. `read` gets what was seen of the run, and what the module returned (`output`), and returns the call of the
    recurrence. Both get the module itself.
    """

    @property
    def parts(self) -> tuple[str, ...]: ...
    def state_before(self, module: Any, given: dict[str, Any]) -> tuple[Tensor, ...]: ...
    def read(self, module: Any, seen: Seen, output: Any) -> CoreCall: ...


class Lightning:
    """MiniMax: linear attention with one decay for each head."""

    parts = ("qkv_proj", "norm")

    def state_before(self, module: Any, given: dict[str, Any]) -> tuple[Tensor, ...]:
        cache = cache_in(given)
        return () if cache is None else state_copies(cache.get_linear_cache(module.layer_idx))

    def read(self, module: Any, seen: Seen, output: Any) -> CoreCall:
        heads, mask = module.num_attention_heads, seen.given.get("attention_mask")
        qkv = module.act_fn(seen.outputs["qkv_proj"])
        if mask is not None and mask.shape[1] == qkv.shape[1]:  # a step gets a mask of all tokens, and ignores it
            qkv = qkv * mask[:, :, None]
        query, key, value = (heads_first(x) for x in qkv.unflatten(-1, (heads, -1)).chunk(3, -1))
        decay = -at_least_float32(module.slope_rate).detach().clone()

        def form() -> Steps:
            return Steps(query, key, log_decay=decay.expand(*key.shape[:3], 1))

        core = heads_first(seen.inputs["norm"].unflatten(-1, (heads, -1)))  # the norm reads the recurrence's output
        return CoreCall(LINEAR, form, value, core, seen.before, state_copies(*output[1:2]))


class RealGated:
    """RecurrentGemma's RG-LRU: each channel is a head; h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t x_t."""

    parts = ()

    def state_before(self, module: Any, given: dict[str, Any]) -> tuple[Tensor, ...]:
        return state_copies(module.recurrent_states)

    def read(self, module: Any, seen: Seen, output: Any) -> CoreCall:
        x, positions = seen.given["activations"], seen.given["position_ids"]
        log_decay, written = _real_gates(module, x, positions)

        def form() -> Steps:
            return Steps(torch.ones_like(written)[..., None], written[..., None], log_decay=log_decay[..., None])

        value, core = (at_least_float32(y).transpose(1, 2)[..., None] for y in (x, output))
        before = () if bool((positions[:, 0] == 0).all()) else seen.before
        return CoreCall(GATED, form, value, core, before, state_copies(module.recurrent_states))


def _real_gates(module: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """log a_t and sqrt(1 - a_t^2) i_t, (B, C, n) each, from activations x (B, n, C) and their positions (B, n).

    Position 0 resets the state: a_t is 0 there, and the second factor is i_t.
    """
    blocks = x.unflatten(-1, (module.num_attention_heads, -1))
    gates = [
        (torch.einsum("bnhc,hcd->bnhd", blocks, weight) + bias).sigmoid().flatten(2)
        for weight, bias in (
            (module.input_gate_weight, module.input_gate_bias),
            (module.recurrent_gate_weight, module.recurrent_gate_bias),
        )
    ]
    log_decay = -8.0 * gates[1] * F.softplus(module.recurrent_param)
    reset = (positions == 0)[..., None]
    factor = torch.where(reset, 1.0, (1 - (2 * log_decay).exp()).sqrt())
    log_decay = log_decay.masked_fill(reset, -torch.inf)
    return at_least_float32(log_decay).transpose(1, 2), at_least_float32(factor * gates[0]).transpose(1, 2)


class MatrixMemory:
    """xLSTM's mLSTM: q^T C_t / max(|q^T n_t|, exp(-m_t)), scaled by the running maximum m_t of the exponents."""

    parts = ()

    def state_before(self, module: Any, given: dict[str, Any]) -> tuple[Tensor, ...]:
        return state_copies(*(given.get(name) for name in ("c_initial", "n_initial", "m_initial")))

    def read(self, module: Any, seen: Seen, output: Any) -> CoreCall:
        given = seen.given
        output, states = output if isinstance(output, tuple) else (output, ())
        query, key, value = (at_least_float32(given[name]) for name in ("query", "key", "value"))
        new, kept = at_least_float32(given["igate"]), F.logsigmoid(at_least_float32(given["fgate"]))
        before, epsilon = seen.before, module.config.eps

        def form() -> Steps:
            return _matrix_memory(query, key, new, kept, before, epsilon)

        return CoreCall(LINEAR, form, value, at_least_float32(output), before, state_copies(*(states or ())))


def _matrix_memory(
    query: Tensor, key: Tensor, new: Tensor, kept: Tensor, before: tuple[Tensor, ...], epsilon: float
) -> Steps:
    """The form of mLSTM. Queries and keys are (B, H, n, D), the gates `new` and `kept` are logarithms (B, H, n).

    `total` is n_t and `largest` is m_t. The state `before` the call has C, n and m; it is empty at the start of a text.
    `epsilon` is added to each denominator.
    """
    query = query * query.shape[-1] ** -0.5
    total = torch.zeros_like(key[:, :, 0]) if not before else at_least_float32(before[1])
    largest = torch.zeros_like(new[..., 0]) if not before else at_least_float32(before[2]).reshape(new.shape[:2])
    log_decays, written, norms = [], [], []
    for t in range(new.shape[-1]):
        top = torch.maximum(largest + kept[..., t], new[..., t])
        log_decays.append(largest + kept[..., t] - top)
        written.append(key[:, :, t] * (new[..., t] - top).exp()[..., None])
        total, largest = log_decays[-1].exp()[..., None] * total + written[-1], top
        norms.append(torch.maximum((query[:, :, t] * total).sum(-1).abs(), (-top).exp()) + epsilon)
    log_decay, keys, norm = (torch.stack(x, 2) for x in (log_decays, written, norms))
    return Steps(query / norm[..., None], keys, log_decay=log_decay[..., None])


class GatedConvolution:
    """LFM2: a convolution over a few tokens, between a gate for its inputs and one for its outputs."""

    parts = ("in_proj", "out_proj")

    def state_before(self, module: Any, given: dict[str, Any]) -> tuple[Tensor, ...]:
        cache = cache_in(given)
        if cache is None or not hasattr(cache, "get_conv_state"):
            return ()
        return state_copies(cache.get_conv_state(module.layer_idx, state_idx=0))

    def read(self, module: Any, seen: Seen, output: Any) -> CoreCall:
        if any(isinstance(child, nn.Conv2d) for child in module.children()):
            raise Untranslatable("it convolves patches of pictures in two directions; maps are of tokens in one")
        width = module.conv_kernel_size
        in_gate, out_gate, x = (at_least_float32(y).transpose(1, 2) for y in seen.outputs["in_proj"].chunk(3, -1))
        taps = at_least_float32(module.conv.weight[:, 0]).detach().flip(-1).clone()
        bias = module.conv.bias
        offset = None if bias is None else (out_gate * at_least_float32(bias).detach()[:, None])[..., None]

        def form() -> Convolution:
            return Convolution(out_gate, in_gate, taps)

        state = (in_gate * x)[..., -width:]  # the cache holds the last `width` inputs, zeros before the first
        after = F.pad(torch.cat([*(b.to(state) for b in seen.before), state], -1), (width, 0))[..., -width:]
        core = at_least_float32(seen.inputs["out_proj"]).transpose(1, 2)[..., None]
        return CoreCall(CONVOLUTION, form, x[..., None], core, seen.before, (after,), offset=offset)


#: Names of module classes end with these -> their readers.
INLINE: dict[str, InlineReader] = {
    "LightningAttention": Lightning(),
    "Rglru": RealGated(),
    "xLSTMBackend": MatrixMemory(),
    "ShortConv": GatedConvolution(),
}


def inline_reader(module: nn.Module) -> InlineReader | None:
    """The reader of a module of transformers that computes a recurrent layer itself; None for other modules."""
    name, place = type(module).__name__, type(module).__module__
    if not place.startswith("transformers."):
        return None
    return next((reader for end, reader in INLINE.items() if name.endswith(end)), None)


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a module's forward, by name."""
    try:
        return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    except TypeError as error:  # pragma: no cover - the forward itself raised it before
        raise Untranslatable(f"the arguments of {type(module).__name__} do not fit its forward: {error}") from error
