"""Transitions: how the memory of a recurrent layer changes from token to token.

The memory is a matrix S of D x E numbers. Token t decays it, erases something, and writes its key and value:

    S_t = A_t S_{t-1} + k_t v_t^T,    A_t = (I - u_t w_t^T) diag(exp g_t),    o_t = S_t^T q_t

So the weight of query i on key j is w_ij = q_i . A_i ... A_{j+1} k_j: the key, transported to the query. Weights may be
negative, and a row has any sum. A transition computes k, g, u and w from the tensors of a call; `Steps` holds them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, fields, is_dataclass, replace
from operator import attrgetter
from typing import ClassVar

import torch
from torch import Tensor

from regard.base.checks import Number, checked
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import Sizes, at_least_float32, pick, to_device
from regard.pieces.call_tensors import tensors_for
from regard.pieces.piece import Piece, computes_as
from regard.pieces.score import FactorScore, Score, with_factor


@dataclass(frozen=True, eq=False)
class Steps:
    """The tensors of a recurrence, with one head for each query head.

    `query` (B, H, I, D) are the queries of the last I tokens, with their scale. All others have J tokens: `key`
    (B, H, J, D) is what is written; `log_decay` (B, H, J, 1 or D) is g, at most 0; `address` (B, H, J, D) is w and
    `erase` u. Without `address` nothing is erased; without `erase`, u is the key. `own` (B, H, I) is added to the
    weight of each query on its own token. If `reads_before`, o_t reads S_{t-1}. If `erases_before`, w_t reads S_{t-1}
    before it decays: A_t = diag(exp g_t) - u_t w_t^T.

    >>> import torch, regard as rg
    >>> one = torch.ones(1, 1, 3, 1)
    >>> steps = rg.transitions.Steps(one, one, log_decay=torch.tensor(0.5).log().expand(1, 1, 3, 1))
    >>> rg.maps.TransportedMap.of_steps(steps)[0, 0, 2]
    tensor([0.2500, 0.5000, 1.0000])
    """

    query: Tensor
    key: Tensor
    _: KW_ONLY
    log_decay: Tensor | None = None
    address: Tensor | None = None
    erase: Tensor | None = None
    own: Tensor | None = None
    reads_before: bool = False
    erases_before: bool = False

    #: The fields with one entry for each query, and those with one for each key.
    ON_ROWS: ClassVar[tuple[str, ...]] = ("query", "own")
    ON_COLS: ClassVar[tuple[str, ...]] = ("key", "log_decay", "address", "erase")
    _PARTS: ClassVar[Callable[[Steps], tuple[Tensor | None, ...]]] = attrgetter(*ON_ROWS, *ON_COLS)

    def tensors(self) -> list[Tensor]:
        """All tensors: those of queries first."""
        return [part for part in self._PARTS(self) if part is not None]

    def _names(self) -> list[str]:
        """The fields that hold a tensor, in the order of `tensors()`."""
        return [name for name in (*self.ON_ROWS, *self.ON_COLS) if getattr(self, name) is not None]

    def on_rows(self) -> list[bool]:
        """For each of `tensors()`, whether it has one entry for each query (else for each key)."""
        return [name in self.ON_ROWS for name in self._names()]

    def with_tensors(self, tensors: Iterable[Tensor]) -> Steps:
        """The same structure with other tensors, in the order of `tensors()`."""
        return replace(self, **dict(zip(self._names(), tensors, strict=True)))

    def after(self, num_tokens: int) -> Steps:
        """The steps without those of the first `num_tokens` keys. All queries must be later than these."""
        names = [name for name in self.ON_COLS if getattr(self, name) is not None]
        return replace(self, **{name: getattr(self, name)[:, :, num_tokens:] for name in names})

    def detach(self) -> Steps:
        tensors = self.tensors()
        return self.with_tensors([t.detach() for t in tensors]) if any([t.requires_grad for t in tensors]) else self

    def select(self, batch: Tensor, head: Tensor) -> Steps:
        """Some batch entries and heads, by indices on the host; for `Steps` of all query heads."""
        return self.with_tensors(pick(t, batch, head) for t in self.tensors())

    def of_heads(self, num_heads: int) -> Steps:
        """Every tensor with this number of heads: heads of keys are repeated for the query heads that share them."""
        tensors = self.tensors()
        if all([t.shape[1] == num_heads for t in tensors]):
            return self
        return self.with_tensors([with_heads(t, num_heads) for t in tensors])


def with_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, G, ...) -> (B, H, ...), each head of x for H / G heads in a row."""
    if x.shape[1] == num_heads:
        return x
    if x.shape[1] == 1:
        return x.expand(-1, num_heads, *x.shape[2:])
    return x.repeat_interleave(num_heads // x.shape[1], 1)


class Transition(Piece):
    """Base of all transitions: `prepare` computes the `Steps` of a call.

    A layer with a transition has a score that is a dot product, and no position of its own, bias, mask or normalizer:
    queries read what earlier tokens wrote, and what the token itself wrote.

    `needs` names the tensors of the call, each with its axes: B batch, H heads, J keys, D width of the keys. They are
    given to `attend` by name, and `prepare` receives them as keywords. Heads of queries that share keys may have
    decays of their own.

    >>> import torch, regard as rg
    >>> class Halving(rg.transitions.Transition):
    ...     def prepare(self, query, key):
    ...         log_half = torch.tensor(0.5).log().expand(*key.shape[:3], 1)
    ...         return rg.transitions.Steps(query, key, log_decay=log_half)
    >>> one = torch.ones(1, 1, 3, 1)
    >>> rg.Attention(rg.Dot(1.0), transition=Halving())(one, one, one).weights[0, 0, 2]
    tensor([0.2500, 0.5000, 1.0000])
    """

    needs: ClassVar[Mapping[str, str]] = {}

    def __repr__(self) -> str:
        """The fields that differ from their defaults; of a tensor its shape."""
        own = [f for f in fields(self) if getattr(self, f.name) is not f.default] if is_dataclass(self) else []
        return f"{type(self).__name__}({', '.join(f'{f.name}={_short(getattr(self, f.name))}' for f in own)})"

    def normalized(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys before the factor of the score: unchanged, unless a subclass makes their length 1."""
        return query, key

    @abstractmethod
    def prepare(self, query: Tensor, key: Tensor, **tensors: Tensor) -> Steps:
        """(B, H, I, D), with the factor of the score, (B, G, J, D) and the tensors of `needs` -> `Steps`."""

    def check(self, sizes: Sizes, positions: Positions) -> None:
        """Refuse tokens that do not follow each other."""
        ends = [stop for _, stop in positions.keys]
        if sizes.J and (ends != [positions.start + sizes.I] or sizes.I > sizes.J):
            raise RegardError(
                f"attend: {type(self).__name__} goes from token to token, so every query is one of the last tokens: it "
                f"needs consecutive keys that end where the queries end, got {sizes.I} queries from position "
                f"{positions.start} on, and keys at {positions.keys}."
            )


def scaled_steps(
    transition: Transition, score: Score, query: Tensor, key: Tensor, tensors: Mapping[str, Tensor]
) -> Steps:
    """The `Steps` of a call, from the encoded queries (B, H, I, D), the keys (B, G, J, D) and the tensors of the call.

    The vectors of the score are normalized before its factor multiplies queries, or the factor would have no effect.
    """
    query, key, factor = _vectors_and_factor(score, query, key, tensors)
    query, key = transition.normalized(query, key)
    query, key = with_factor(factor, query, key) if isinstance(factor, Tensor) else (query * factor, key)
    return transition.prepare(query, key, **tensors_for(transition, tensors)).of_heads(query.shape[1])


def _vectors_and_factor(
    score: Score, query: Tensor, key: Tensor, tensors: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, float | Tensor]:
    """The queries and keys that a score compares, and the factor of their products."""
    factor: float | Tensor = 1.0
    if computes_as(score, FactorScore, "prepare") and isinstance(score.factor, Tensor):
        (query, key), factor = score.vectors(query, key), score.factor
    else:
        query, key = score.prepare(query, key, **tensors_for(score, tensors))
    scale = score.scale(query.shape[-1])
    assert scale is not None, "check refuses other scores"
    return query, key, factor * scale


def _short(value: object) -> str:
    """The text of a field: of a tensor with axes only its shape."""
    return f"tensor of {tuple(value.shape)}" if isinstance(value, Tensor) and value.ndim else repr(value)


def _of_head(x: Tensor | float, like: Tensor) -> Tensor:
    """A number, or one for each head (H,), or for each head and channel (H, D): (1, H, 1, 1 or D)."""
    x = to_device(torch.as_tensor(x, dtype=like.dtype), like.device)
    return x.reshape(1, -1, 1, x.shape[1] if x.ndim == 2 else 1)


def _unit(x: Tensor) -> Tensor:
    """x / |x|, as in flash-linear-attention: x / sqrt(|x|^2 + 1e-6)."""
    x = at_least_float32(x)
    return x * (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() + 1e-6).rsqrt()


def _bonus_weight(piece: str, query: Tensor, key: Tensor, bonus: Tensor) -> Tensor:
    """q_i . (bonus * k_i) for the last tokens, (B, H, I), with a bonus (H, D). The error names the `piece`."""
    if bonus.shape != (query.shape[1], query.shape[3]):
        raise RegardError(
            f"{piece}: bonus must be (heads, width) = {(query.shape[1], query.shape[3])}, got {tuple(bonus.shape)}."
        )
    if not key.shape[2]:  # a call without keys: its queries have no own token
        return query.new_zeros(query.shape[:3])
    keys = with_heads(key[:, :, key.shape[2] - query.shape[2] :], query.shape[1])
    return (query * _of_head(bonus, query) * keys).sum(-1)


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Decay(Transition):
    """S_t = exp(g) S_{t-1} + k_t v_t^T, so w_ij = q_i . k_j exp(g_{j+1} + ... + g_i): a decay of one number a token.

    With `log_decay` the decay is constant: a number, or one for each head (H,), at most 0. That is RetNet (Sun et al.
    2023, arXiv:2307.08621) and lightning attention (Qin et al. 2024, arXiv:2405.17381). Without it, the tensor
    `log_decay` (B, H, J) of the call decides, as in gated RetNet or mLSTM. The token's own key does not decay. RetNet's
    code also divides q, k and the output by sums of decays; its paper calls that an option for numerical stability.

    >>> import torch, regard as rg
    >>> one = torch.ones(1, 1, 3, 1)
    >>> attention = rg.Attention(rg.Dot(1.0), transition=rg.transitions.Decay(torch.tensor(0.5).log()))
    >>> attention(one, one, one).weights[0, 0, 2]
    tensor([0.2500, 0.5000, 1.0000])
    """

    log_decay: Number | Tensor | None = None

    @property
    def needs(self) -> Mapping[str, str]:  # type: ignore[override]
        return {"log_decay": "B H J"} if self.log_decay is None else {}

    def prepare(self, query: Tensor, key: Tensor, log_decay: Tensor | None = None) -> Steps:  # type: ignore[override]
        if log_decay is None:
            if self.log_decay is None:
                raise RegardError(
                    "Decay.prepare: needs log_decay (batch, heads, keys), because this Decay has no constant one. Give "
                    "it to the call, attention(q, k, v, log_decay=...), or to the piece: Decay(log_decay=-0.1)."
                )
            constant = _of_head(self.log_decay, at_least_float32(key))
            _check_heads("Decay", constant, query)
            return Steps(query, key, log_decay=constant.expand(key.shape[0], -1, key.shape[2], 1))
        return Steps(query, key, log_decay=log_decay[..., None])


@checked
@dataclass(frozen=True, eq=False, repr=False)
class ChannelDecay(Transition):
    """S_t = diag(exp g_t) S_{t-1} + k_t v_t^T: every channel of the keys has a decay of its own.

    The tensor `log_decay` (B, H, J, D) of the call is g, at most 0. That is GLA (Yang et al. 2023, arXiv:2312.06635).
    With `complement` the key is multiplied by 1 - exp(g_t): HGRN-2 (Qin et al. 2024, arXiv:2404.07904) is this with
    keys of ones. With `bonus` (H, D) the query reads S_{t-1} + diag(bonus) k_t v_t^T, before the decay and the write:
    RWKV-6 (Peng et al. 2024, arXiv:2404.05892), which calls the bonus u.

    >>> import torch, regard as rg
    >>> one, decay = torch.ones(1, 1, 3, 2), torch.tensor([1.0, 0.5]).log().expand(1, 1, 3, 2)
    >>> attention = rg.Attention(rg.Dot(1.0), transition=rg.transitions.ChannelDecay())
    >>> attention(one, one, one, log_decay=decay).weights[0, 0, 2]
    tensor([1.2500, 1.5000, 2.0000])
    """

    complement: bool = False
    bonus: Tensor | None = None
    needs: ClassVar[Mapping[str, str]] = {"log_decay": "B H J D"}

    def prepare(self, query: Tensor, key: Tensor, log_decay: Tensor) -> Steps:  # type: ignore[override]
        if self.complement:
            heads = max(key.shape[1], log_decay.shape[1])
            key = with_heads(key, heads) * -torch.expm1(with_heads(log_decay, heads))
        if self.bonus is None:
            return Steps(query, key, log_decay=log_decay)
        own = _bonus_weight("ChannelDecay", query, key, self.bonus)
        return Steps(query, key, log_decay=log_decay, own=own, reads_before=True)


@checked
@dataclass(frozen=True, eq=False, repr=False)
class StateSpace(Transition):
    """S_t = exp(d_t a) S_{t-1} + d_t k_t v_t^T, o_t = S_t^T q_t + skip v_t: Mamba's state space, k = B, q = C, v = x.

    The tensor `step` (B, H, J) of the call is d, the length of each step, above 0. `rate` is a, below 0: one number for
    each head (H,) is SSD, Mamba-2 (Dao & Gu 2024, arXiv:2405.21060); one for each head and channel (H, D) is Mamba-1
    (Gu & Dao 2023, arXiv:2312.00752), where each of its channels is a head with values of width 1. `skip` (H,), called
    D there, is added to the weight of every token on itself. Mamba has no scale: use it with Dot(1.0).

    >>> import torch, regard as rg
    >>> one = torch.ones(1, 1, 3, 1)
    >>> attention = rg.Attention(rg.Dot(1.0), transition=rg.transitions.StateSpace(torch.tensor([0.5]).log()))
    >>> attention(one, one, one, step=torch.tensor([[[1.0, 2.0, 1.0]]])).weights[0, 0, 2]
    tensor([0.1250, 1.0000, 1.0000])
    """

    rate: Tensor
    skip: Tensor | None = None
    needs: ClassVar[Mapping[str, str]] = {"step": "B H J"}

    def prepare(self, query: Tensor, key: Tensor, step: Tensor) -> Steps:  # type: ignore[override]
        step = step[..., None]
        rate = _of_head(self.rate, at_least_float32(step))
        _check_heads("StateSpace", rate, query)
        if rate.shape[3] not in (1, key.shape[3]):
            raise RegardError(
                f"StateSpace: rate {tuple(self.rate.shape)} must have one number for each head, or one for each of "
                f"the {key.shape[3]} channels of the keys: (H, {key.shape[3]})."
            )
        heads = max(key.shape[1], step.shape[1])
        own = None
        if self.skip is not None:
            own = _of_head(self.skip, at_least_float32(query))[..., 0]
            own = own.expand(query.shape[0], query.shape[1], query.shape[2])
        return Steps(query, with_heads(key, heads) * with_heads(step, heads), log_decay=step * rate, own=own)


@dataclass(frozen=True, eq=False, repr=False)
class DeltaRule(Transition):
    """Base of the delta rules: tokens overwrite what their keys read. `unit`: queries and keys get the length 1."""

    unit: bool = True

    def normalized(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return (_unit(query), _unit(key)) if self.unit else (query, key)


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Delta(DeltaRule):
    """S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T: each token overwrites what its key reads.

    The tensor `beta` (B, H, J) of the call is how much of it: 0 nothing, 1 everything (Schlag et al. 2021,
    arXiv:2102.11174; chunked by Yang et al. 2024, arXiv:2406.06484). Up to 2 it reflects (Grazzi et al. 2024,
    arXiv:2411.12537). With `unit` queries and keys are divided by their length first, x / sqrt(|x|^2 + 1e-6). Without,
    keys longer than sqrt(2 / beta) let the state grow. The paper's code also offers sums to 1 in place of lengths.

    >>> import torch, regard as rg
    >>> attention = rg.Attention(rg.Dot(1.0), transition=rg.transitions.Delta(unit=False))
    >>> one, beta = torch.ones(1, 1, 3, 1), torch.tensor([[[1.0, 0.25, 0.5]]])
    >>> attention(one, one, one, beta=beta).weights[0, 0, 2]
    tensor([0.3750, 0.1250, 0.5000])
    """

    needs: ClassVar[Mapping[str, str]] = {"beta": "B H J"}

    def prepare(self, query: Tensor, key: Tensor, beta: Tensor) -> Steps:  # type: ignore[override]
        return _delta(query, key, beta, None)


@checked
@dataclass(frozen=True, eq=False, repr=False)
class GatedDelta(DeltaRule):
    """S_t = (I - beta_t k_t k_t^T) exp(g_t) S_{t-1} + beta_t k_t v_t^T: a delta rule with one decay a token.

    The tensors of the call are `log_decay` (B, H, J), at most 0, and `beta` (B, H, J) (Yang et al. 2024,
    arXiv:2412.06464; the linear layers of Qwen3-Next). With one number a token, decay and erasure commute. `unit` as
    in `Delta`.

    >>> import torch, regard as rg
    >>> attention = rg.Attention(rg.Dot(1.0), transition=rg.transitions.GatedDelta(unit=False))
    >>> one, beta = torch.ones(1, 1, 3, 1), torch.tensor([[[1.0, 0.25, 0.5]]])
    >>> half = torch.full((1, 1, 3), 0.5).log()
    >>> attention(one, one, one, log_decay=half, beta=beta).weights[0, 0, 2]
    tensor([0.0938, 0.0625, 0.5000])
    """

    needs: ClassVar[Mapping[str, str]] = {"log_decay": "B H J", "beta": "B H J"}

    def prepare(self, query: Tensor, key: Tensor, log_decay: Tensor, beta: Tensor) -> Steps:  # type: ignore[override]
        return _delta(query, key, beta, log_decay[..., None])


@checked
@dataclass(frozen=True, eq=False, repr=False)
class KimiDelta(DeltaRule):
    """S_t = (I - beta_t k_t k_t^T) diag(exp g_t) S_{t-1} + beta_t k_t v_t^T: a delta rule with a decay a channel.

    The tensors of the call are `log_decay` (B, H, J, D), at most 0, and `beta` (B, H, J) (Kimi Linear, Zhang et al.
    2025, arXiv:2510.26692). The memory decays first, and what is left of it is erased. `unit` as in `Delta`.

    >>> import torch, regard as rg
    >>> attention = rg.Attention(rg.Dot(1.0), transition=rg.transitions.KimiDelta(unit=False))
    >>> one, beta = torch.ones(1, 1, 3, 1), torch.tensor([[[1.0, 0.25, 0.5]]])
    >>> half = torch.full((1, 1, 3, 1), 0.5).log()
    >>> attention(one, one, one, log_decay=half, beta=beta).weights[0, 0, 2]
    tensor([0.0938, 0.0625, 0.5000])
    """

    needs: ClassVar[Mapping[str, str]] = {"log_decay": "B H J D", "beta": "B H J"}

    def prepare(self, query: Tensor, key: Tensor, log_decay: Tensor, beta: Tensor) -> Steps:  # type: ignore[override]
        return _delta(query, key, beta, log_decay)


def _delta(query: Tensor, key: Tensor, beta: Tensor, log_decay: Tensor | None) -> Steps:
    """The steps of a delta rule: each token writes beta k v^T and erases beta k k^T S, so u is beta k and w is k."""
    heads = max(key.shape[1], beta.shape[1])
    written = with_heads(key, heads) * with_heads(beta[..., None], heads)
    return Steps(query, written, log_decay=log_decay, address=key)


@checked
@dataclass(frozen=True, eq=False, repr=False)
class RWKV7(Transition):
    """S_t = (diag(exp g_t) - (a_t * c_t) c_t^T) S_{t-1} + k_t v_t^T: RWKV-7 (Peng et al. 2025, arXiv:2503.14456).

    The tensors of the call are `log_decay` (B, H, J, D), at most 0; `address` c (B, H, J, D), a unit vector that says
    what is erased, which the paper derives from the key before the key is changed; and `rate` a (B, H, J, D) in
    [0, 1], how much of it. What is erased is read before the decay. With `bonus` (H, D), called r_k in the code, the
    weight of a token on itself gets q_i . (bonus * k_i). flash-linear-attention takes -c and a * c as its a and b.

    >>> import torch, regard as rg
    >>> one, half = torch.ones(1, 1, 3, 1), torch.full((1, 1, 3, 1), 0.5)
    >>> attention = rg.Attention(rg.Dot(1.0), transition=rg.transitions.RWKV7())
    >>> attention(one, one, one, log_decay=half.log(), address=one, rate=half / 2).weights[0, 0, 2]
    tensor([0.0625, 0.2500, 1.0000])
    """

    bonus: Tensor | None = None
    needs: ClassVar[Mapping[str, str]] = {"log_decay": "B H J D", "address": "B H J D", "rate": "B H J D"}

    def prepare(  # type: ignore[override]
        self, query: Tensor, key: Tensor, log_decay: Tensor, address: Tensor, rate: Tensor
    ) -> Steps:
        heads = max(address.shape[1], rate.shape[1])
        own = None
        if self.bonus is not None:
            own = _bonus_weight("RWKV7", query, key, self.bonus)
        erase = with_heads(address, heads) * with_heads(rate, heads)
        return Steps(query, key, log_decay=log_decay, address=address, erase=erase, own=own, erases_before=True)


def _check_heads(piece: str, x: Tensor, query: Tensor) -> None:
    """Refuse numbers of other heads than those of the queries."""
    if x.shape[1] not in (1, query.shape[1]):
        raise RegardError(
            f"{piece}: it has numbers for {x.shape[1]} heads, and the queries have {query.shape[1]} heads. "
            "Give one number, or one for each query head."
        )
