"""`CoreCall`: one call of a recurrent layer, and the functions of transformers that compute such layers.

Each reader takes the arguments of one function by name and returns the call. Tensors are cast to float32 at least, as
these functions do themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.base.shapes import at_least_float32
from regard.edits.layer_edits import LayerEdits
from regard.hf.recurrent.forms import heads_joined
from regard.maps.scored_map import Convolution
from regard.pieces.transition import Steps

#: What a layer is, in the words of the field.
DELTA, STATE_SPACE, LINEAR, GATED, CONVOLUTION = (
    "delta rule",
    "state space",
    "linear attention",
    "gated recurrence",
    "convolution",
)
#: The first running maximum of RWKV is below this number.
FIRST = -1e37
#: Added to the squared norm by the L2 norms of delta rules.
EPSILON = 1e-6


@dataclass(frozen=True, eq=False)
class CoreCall:
    """One call: W . values is the output, or `scale` * (W . values) + `offset`; values and output are (B, H, n, E).

    `form` computes the tensors of W when they are needed: some are larger than the arguments. `before` and `after` are
    the state of the layer before and after the call; an empty `before` is a state of zeros. `edits` changed W.
    """

    kind: str
    form: Callable[[], Steps] | Callable[[], Convolution]
    value: Tensor
    output: Tensor
    before: tuple[Tensor, ...] = ()
    after: tuple[Tensor, ...] = ()
    scale: Tensor | None = None
    offset: Tensor | None = None
    edits: LayerEdits | None = None


#: The arguments of a function by name, and copies of the state before the call under the name "before".
Given = Mapping[str, Any]
#: A reader takes what a function was `given`, and its `result`: the output, alone or with the state after the call.
Reader = Callable[[Given, Any], CoreCall]


def gated_delta_rule(given: Given, result: Any) -> CoreCall:
    """Gated DeltaNet, and Kimi Delta with one decay for each channel of the keys.

    S_t = (I - beta_t k_t k_t^T) diag(exp g_t) S_(t-1) + beta_t k_t v_t^T, and q_t^T S_t is the output.
    """
    value, before = heads_first(given["value"]), given["before"]
    num_heads = value.shape[1]
    given = _picked(given, "query", "key", "g", "beta", "scale", "use_qk_l2norm_in_kernel")

    def form() -> Steps:
        query, key = (_repeated(heads_first(given[name]), num_heads) for name in ("query", "key"))
        if given.get("use_qk_l2norm_in_kernel"):
            query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON) for x in (query, key))
        scale = given.get("scale")
        query = query * (query.shape[-1] ** -0.5 if scale is None else scale)
        decay, beta = at_least_float32(given["g"]).transpose(1, 2), at_least_float32(given["beta"]).transpose(1, 2)
        log_decay = decay if decay.ndim == 4 else decay[..., None]
        return Steps(query, key * beta[..., None], log_decay=log_decay, address=key)

    output, state = result
    return CoreCall(DELTA, form, value, heads_first(output), before, state_copies(state))


def ssd_scan(given: Given, result: Any) -> CoreCall:
    """Mamba-2: all tokens of a call. Values are x (B, n, H, P)."""
    output, state = result if isinstance(result, tuple) else (result, None)
    lower, upper = given.get("dt_limit") or (0.0, float("inf"))
    kept = _parameters(given, "A", "D", "dt_bias")
    dt = _time_steps(given, at_least_float32(given["dt"]), kept["dt_bias"]).clamp(lower, upper).transpose(1, 2)
    return _ssd_call(
        given, kept, dt, heads_first(given["hidden_states"]), heads_first(output), given["before"], state_copies(state)
    )


def ssd_step(given: Given, result: Tensor) -> CoreCall:
    """Mamba-2: one token, without an axis of tokens. Parameters are expanded over the channels of a head.

    `result` (B, H, E) is the output.
    """
    flat = {**given, "B": given["B"][:, None], "C": given["C"][:, None]}
    kept = _parameters({"A": given["A"][:, 0, 0], "D": _first_channel(given, "D")}, "A", "D")
    bias = _first_channel(given, "dt_bias")
    dt = _time_steps(given, at_least_float32(given["dt"][..., 0]), bias)[..., None]
    value, output = (at_least_float32(x)[:, :, None] for x in (given["hidden_states"], result))
    if given.get("z") is not None:
        flat["z"] = given["z"][:, None]
    return _ssd_call(flat, kept, dt, value, output, given["before"], state_copies(given["state"]))


def _ssd_call(
    given: Given, kept: Given, dt: Tensor, value: Tensor, output: Tensor, before: Any, after: Any
) -> CoreCall:
    """The call of Mamba-2: S_t = exp(A dt_t) S_(t-1) + dt_t B_t x_t^T, and (C_t^T S_t + D x_t) silu(z_t) is the output.

    `kept` has copies of A and D, `dt` is (B, H, n), and `value` and `output` are (B, H, n, P). `before` and `after` are
    the state, as in `CoreCall`.
    """
    B, H, n, _ = value.shape
    scale = None if given.get("z") is None else F.silu(heads_first(given["z"]))
    given = _picked(given, "B", "C")

    def form() -> Steps:
        key, query = (_repeated(heads_first(given[name]), H) for name in ("B", "C"))
        own = None if kept["D"] is None else kept["D"][:, None].expand(B, H, n)
        return Steps(query, key * dt[..., None], log_decay=(kept["A"][:, None] * dt)[..., None], own=own)

    return CoreCall(STATE_SPACE, form, value, output, before, after, scale)


def selective_scan(given: Given, result: Any) -> CoreCall:
    """Mamba-1: all tokens of a call, (B, C, n). Each channel is a head with values of width 1."""
    output, state = result if isinstance(result, tuple) else (result, None)
    return _selective_call(
        given, _parameters(given, "A", "D"), given.get("delta_bias"), output, (), state_copies(state)
    )


def selective_step(given: Given, result: Tensor) -> CoreCall:
    """Mamba-1: one token, (B, C)."""
    tensors = {name: given[name][..., None] for name in ("hidden_states", "dt", "B", "C")}
    if given.get("z") is not None:
        tensors["z"] = given["z"][..., None]
    before, after = given["before"], state_copies(given["state"])
    kept, whole = _parameters(given, "A", "D"), {**given, **tensors}
    return _selective_call(whole, kept, given.get("dt_bias"), result[..., None], before, after)


def _selective_call(given: Given, kept: Given, bias: Any, output: Tensor, before: Any, after: Any) -> CoreCall:
    """The call of Mamba-1, as that of Mamba-2, but with a decay A (C, D) for each channel and entry of its state.

    `kept` has copies of A and D, and `bias` (C,) is added to the time steps. `output` is (B, C, n), as the function
    returns it, and `before` and `after` are the state, as in `CoreCall`.
    """
    B, C, n = given["hidden_states"].shape
    dt = at_least_float32(given["dt"]) if bias is None else at_least_float32(given["dt"]) + bias[:, None]
    dt = F.softplus(dt) if given.get("delta_softplus") or given.get("dt_softplus") else dt
    scale = None if given.get("z") is None else F.silu(at_least_float32(given["z"]))[..., None]
    value, output = (at_least_float32(x)[..., None] for x in (given["hidden_states"], output))
    given = _picked(given, "B", "C")

    def form() -> Steps:
        key, query = (at_least_float32(given[name]).transpose(1, 2)[:, None] for name in ("B", "C"))
        own = None if kept["D"] is None else kept["D"][:, None].expand(B, C, n)
        log_decay = kept["A"][:, None] * dt[..., None]
        return Steps(query.expand(B, C, n, -1), key * dt[..., None], log_decay=log_decay, own=own)

    return CoreCall(STATE_SPACE, form, value, output, before, after, scale)


def rwkv(given: Given, result: Any) -> CoreCall:
    """RWKV-4: a weighted mean with weights exp(k_j - (i - 1 - j) decay), and exp(bonus + k_i) of its own token.

    The weights are scaled by the running maximum of the exponents, as the model does, so that no exponent is large.
    """
    output, state = result
    time_decay, bonus = (at_least_float32(given[name]).clone() for name in ("time_decay", "time_first"))
    before, key = given["before"], given["key"]

    def form() -> Steps:
        return _wkv(-time_decay.exp(), bonus, at_least_float32(key), before)

    after = () if state is None else state_copies(*state)
    value, output = (at_least_float32(x).transpose(1, 2)[..., None] for x in (given["value"], output))
    return CoreCall(LINEAR, form, value, output, before, after)


def _wkv(decay: Tensor, bonus: Tensor, key: Tensor, before: tuple[Tensor, ...]) -> Steps:
    """The form of RWKV-4 from keys (B, n, C): one number a token for reading, writing, decay and the own token.

    `decay` and `bonus` (C,) have a number for each channel. `decay` is a logarithm: a weight is multiplied by
    exp(decay), at most 1, at each later token.

    `total` is the sum of the weights of the tokens so far, divided by exp(largest), and `largest` the running maximum
    of the exponents. The state before the call has the weighted sum of the values, `total` and `largest`.
    """
    zeros = torch.zeros_like(key[:, 0])
    _, total, largest = before or (zeros, zeros, zeros - 1e38)
    reads, own, written, log_decays = [], [], [], []
    for k in key.unbind(1):
        top = torch.maximum(largest, bonus + k)
        kept, new = (largest - top).exp(), (bonus + k - top).exp()
        mean = kept * total + new
        reads.append(kept / mean)
        own.append(new / mean)
        top = torch.maximum(largest + decay, k)
        log_decays.append(largest + decay - top)
        written.append((k - top).exp())
        total, largest = log_decays[-1].exp() * total + written[-1], top
    query, keys, log_decay, diagonal = (torch.stack(x, 2) for x in (reads, written, log_decays, own))
    if not before or bool((before[2] < FIRST).all()):
        log_decay[:, :, 0] = 0.0  # there is no earlier state
    return Steps(query[..., None], keys[..., None], log_decay=log_decay[..., None], own=diagonal, reads_before=True)


#: Names of functions -> their readers. All model files of transformers use these names.
READERS: dict[str, Reader] = {
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "torch_recurrent_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "recurrent_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": ssd_scan,
    "mamba2_selective_state_update": ssd_step,
    "mamba_selective_scan": selective_scan,
    "mamba_selective_state_update": selective_step,
    "rwkv_linear_attention": rwkv,
}


#: Readers -> the layout in which their functions return outputs (B, H, n, E).
LAYOUTS: dict[Reader, Callable[[Tensor], Tensor]] = {
    gated_delta_rule: lambda x: x.transpose(1, 2),
    ssd_scan: lambda x: x.transpose(1, 2),
    ssd_step: lambda x: x[:, :, 0],
    selective_scan: lambda x: x[..., 0],
    selective_step: lambda x: x[..., 0, 0],
    rwkv: lambda x: x[..., 0].transpose(1, 2),
}


def heads_first(x: Tensor) -> Tensor:
    """(B, n, H, D) -> (B, H, n, D)."""
    return at_least_float32(x).transpose(1, 2)


def _picked(given: Given, *names: str) -> dict[str, Any]:
    """Only these arguments, so that the values of a call are not held for its weights."""
    return {name: given.get(name) for name in names}


def _repeated(x: Tensor, num_heads: int) -> Tensor:
    """Heads shared by groups, (B, G, n, D) -> (B, H, n, D)."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], 1)


def state_copies(*states: Any) -> tuple[Tensor, ...]:
    """Copies of states: caches are written in place. Empty if there is no state."""
    return tuple(state.detach().clone() for state in states if isinstance(state, Tensor))


def _parameters(given: Given, *names: str) -> dict[str, Tensor | None]:
    """Copies of parameters: an optimizer writes them in place."""
    tensors = {name: given.get(name) for name in names}
    return {name: None if x is None else at_least_float32(x).clone() for name, x in tensors.items()}


def _first_channel(given: Given, name: str) -> Tensor | None:
    """A parameter (H, P) that is the same for all channels of a head, as (H,); None if it was not given."""
    return None if given.get(name) is None else given[name][:, 0]


def _time_steps(given: Given, dt: Tensor, bias: Tensor | None) -> Tensor:
    """The time steps of Mamba-2, from what the layer computed, its bias, and a softplus if the function applies one."""
    dt = dt if bias is None else dt + bias
    return F.softplus(dt) if given.get("dt_softplus") else dt


def heads_of(calls: Sequence[CoreCall]) -> CoreCall:
    """One call from calls that each compute some heads of one layer, as in Zamba.

    The heads are in the order of the calls.
    """
    first = calls[0]
    if len(calls) == 1:
        return first
    forms = [call.form for call in calls]
    together = {
        name: torch.cat([getattr(call, name) for call in calls], 1)
        for name in ("value", "output", "scale", "offset")
        if getattr(first, name) is not None
    }
    states = {
        name: tuple(torch.cat(parts, 1) for parts in zip(*(getattr(call, name) for call in calls), strict=True))
        for name in ("before", "after")
    }
    return replace(first, form=lambda: heads_joined([form() for form in forms]), **together, **states)  # type: ignore[misc]
