"""The ring engine: one sequence over the ranks of a process group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, get_ident
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from regard.attention import Attention, Family, Scored, Transported
from regard.base.checks import checked
from regard.base.errors import RegardError, nearest
from regard.base.positions import Positions, check_positions
from regard.base.spans import Spans
from regard.engine.problem import Problem
from regard.engine.ring.choosing import with_chosen_keys
from regard.engine.ring.digests import Contents, words
from regard.engine.ring.exchange import Agreement, Exchange
from regard.engine.ring.gathering import Gathered
from regard.engine.ring.plan import RingPlan
from regard.engine.ring.rank_share import RankShare, ShareProblem, of_all_keys
from regard.engine.ring.ring_call import RingCall
from regard.engine.ring.route import Route
from regard.engine.ring.sharding import LAYOUTS, ShardPositions, shares, shares_of
from regard.engine.ring.state_passing import StatePassing
from regard.engine.transforms import HIDDEN_GRADIENTS, TRANSFORMED, differentiable_once, is_transformed, uncompiled
from regard.pieces.call_tensors import needs_of
from regard.pieces.contents import split_tensors

#: The rings of the open blocks of `as_default`, each with its thread. A tuple, so that code that torch.compile compiled
#: outside of these blocks notices them; it notices neither a ContextVar nor a threading.local.
_defaults: tuple[tuple[int, Ring], ...] = ()
_changing = Lock()
#: The class of a call on one rank, for each family of weights.
CALLS: dict[type[Family], type[RingCall | StatePassing]] = {Scored: RingCall, Transported: StatePassing}


@checked
@dataclass(frozen=True)
class Ring:
    """One sequence over many ranks: `attend(..., engine=Ring())` where each rank gives its share of q, k and v.

    Keys and values are sent from rank to rank while earlier ones are computed. Each rank receives only the keys that
    the spans of the mask allow its queries. Partial outputs are merged exactly by the row statistic (Liu et al. 2023,
    arXiv:2310.01889). Every rank of the group must call `attend`, and `backward` for gradients. Gradients of q, k and
    v are complete. Gradients of parameters are those of the work of this rank; their sum over all ranks is the
    gradient of one process. As under data parallelism, a training loop adds (or, with DDP, averages) them.

    `group` is a process group, or a device mesh of one dimension; by default all processes. `layout` says which
    tokens a rank holds. "contiguous": consecutive tokens, any number for each rank. "zigzag": one piece from the start
    and one from the end, which balances the work of a causal mask. `share` cuts the tokens of this rank from a whole
    tensor. `ranks` is the number of ranks; with it `plan` needs no process group. `as_default` runs modules on the
    ring.

    >>> import torch, regard as rg
    >>> x = torch.randn(1, 8, 65_536, 64)
    >>> plan = rg.plan(x, x, x, attention=rg.Attention(mask=rg.causal() & rg.window(256)), engine=rg.Ring(ranks=8))
    >>> plan.sent(0), plan.sent(7)      # 255 keys and values of float32 to the next rank; the last has no next one
    (1044480, 0)
    """

    group: Any = None
    layout: str = "contiguous"
    ranks: int | None = None
    name: ClassVar[str] = "ring"

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise RegardError(f"Ring: there is no layout {self.layout!r}. {nearest(str(self.layout), LAYOUTS)}")
        if self.ranks is not None and (not isinstance(self.ranks, int) or self.ranks < 1):
            raise RegardError(f"Ring(ranks={self.ranks!r}): the number of ranks is an integer of at least 1.")

    @staticmethod
    def of(engine: object) -> Ring | None:
        """The ring that an engine argument means: itself, `Ring()` for "ring", the default for "auto", else None."""
        if isinstance(engine, str):
            return Ring() if engine == Ring.name else Ring.default() if engine == "auto" else None
        return engine if isinstance(engine, Ring) else None

    @staticmethod
    def default() -> Ring | None:
        """The ring of the innermost block of `as_default` that is open in this thread."""
        return _default_here() if _defaults else None

    @contextmanager
    def as_default(self) -> Iterator[None]:
        """Inside the block, every `attend` whose engine is "auto" runs on this ring.

        So do the modules of `regard.nn` and models of `regard.register`: each rank gives them its share of the tokens.
        Masks are those of the whole sequence. Positions that a module would count from its first token are refused.
        Other threads do not see the block. The backward pass may run after it, but not the forward pass of a
        checkpoint.

        >>> import torch, torch.distributed as dist, regard as rg
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # a group of one
        >>> module, ring, x = rg.nn.MultiHeadAttention(8, 2, is_causal=True), rg.Ring(), torch.randn(1, 5, 8)
        >>> with ring.as_default():
        ...     output, _ = module(ring.share(x, axis=1))
        >>> torch.allclose(output, module(x).output, atol=1e-6)
        True
        >>> dist.destroy_process_group()
        """
        global _defaults
        entry = get_ident(), self
        with _changing:
            _defaults = (*_defaults, entry)
        try:
            yield
        finally:
            with _changing:
                _defaults = tuple(other for other in _defaults if other is not entry)

    def share(self, x: Tensor, axis: int = 2) -> Tensor:
        """This rank's tokens of a whole tensor."""
        exchange = self.exchange()
        share = shares(x.shape[axis], exchange.ranks, self.layout)[exchange.rank]
        return x.index_select(axis, share.tensor(x.device))

    def gather(self, x: Tensor) -> Tensor:
        """A whole tensor (B, H, n, ...) from the shares of all ranks, in order. Collective, and so is its backward.

        The gradient of a share is the sum of the gradients that all ranks have for it. If all ranks compute the same
        loss from the whole tensor, divide it by the number of ranks.
        """
        exchange = self.exchange()
        others = f"{tuple(x.shape[:2])} + {tuple(x.shape[3:])} in {x.dtype} on {x.device.type}"
        request = {"shape but for the tokens": others, "layout": self.layout}
        request["gradients"] = "wanted" if x.requires_grad and torch.is_grad_enabled() else "none"
        agreement = exchange.agree("gather", request, (x.shape[2], 0))
        held = shares_of([count for count, _ in agreement.lengths], self.layout, "tokens")
        return Gathered.apply(exchange, agreement.number, held, *differentiable_once("ring", x))  # type: ignore[return-value]

    def exchange(self) -> Exchange:
        """The ranks of the group."""
        if not dist.is_available() or not dist.is_initialized():
            raise RegardError(
                "attend: the ring engine needs the processes of a group. Start them with `torchrun --nproc-per-node N "
                "SCRIPT`, and let each call torch.distributed.init_process_group('gloo' on CPUs, 'nccl' on GPUs). "
                "Without a group, plan(..., engine=Ring(ranks=N)) shows what N ranks would do."
            )
        exchange = Exchange(_group(self.group))
        if self.ranks not in (None, exchange.ranks):
            raise RegardError(
                f"Ring(ranks={self.ranks}): the group has {exchange.ranks} ranks. Start {self.ranks}, or omit ranks."
            )
        return exchange

    def start_call(
        self, share: RankShare, seed: int | None = None, check: Callable[[], None] = lambda: None
    ) -> RingCall | StatePassing:
        """This rank's share of a call, after a handshake of all ranks. Collective.

        If a rank refuses its share, also by `check`, all ranks raise its error. With dropout (`seed` is not None) the
        seed of rank 0 is that of the call.
        """
        if is_transformed():  # a transform allows no messages, so this rank refuses alone
            raise RegardError(f"attend: the ring engine cannot run here: {TRANSFORMED}. Call it outside the transform.")
        exchange = self.exchange()
        share, agreement = self._agree(exchange, share, seed, check)
        counts = zip(*agreement.lengths, strict=True)
        held = [shares_of(count, self.layout, name) for count, name in zip(counts, ("queries", "keys"), strict=True)]
        share = with_chosen_keys(share, exchange, agreement.number, *held)
        route = _route(share, held)
        rows, keys = route.queries[exchange.rank], route.keys[exchange.rank]
        problem = ShareProblem(
            *(share.attention, share.query, share.key, share.value),
            ShardPositions(rows.intervals[0][0], keys, rows),
            share.sizes,
            seed=None if seed is None else agreement.seed,
            call_tensors=share.tensors,
            whole=of_all_keys(share, share.attention.bias, exchange, agreement.number, held[1]),
            all_keys=Spans.union(interval for of_rank in route.keys for interval in of_rank),
        )
        return CALLS[share.attention.family](problem, route, exchange, agreement.number)

    def plan(self, share: RankShare, check: Callable[[], None] = lambda: None) -> RingPlan:
        """The plan of these ranks and shares; without a process group, of whole tensors on `ranks` ranks.

        `check` refuses arguments of this rank, as in `start_call`.
        """
        if (reason := CALLS[share.attention.family].unplanned) is not None:
            raise RegardError(f"attend: {reason}")
        if self.ranks is not None and not (dist.is_available() and dist.is_initialized()):
            check()
            share = _checked(share)
            held = [shares(length, self.ranks, self.layout) for length in (share.sizes.I, share.sizes.J)]
            return RingPlan.of(share, _route(share, held), self.layout)
        ring_call = self.start_call(share, check=check)
        return RingPlan.of(share.checked(), ring_call.route, self.layout, ring_call.exchange.rank)

    def _agree(
        self, exchange: Exchange, share: RankShare, seed: int | None, check: Callable[[], None]
    ) -> tuple[RankShare, Agreement]:
        """The share after checks, and the handshake of all ranks. If a rank refuses, all ranks raise its error.

        `check` raises the error of this rank for arguments that do not fit. `seed` is None without dropout. All ranks
        must make the same request. It describes pieces by their repr, and by a digest what a repr hides.
        Digests of learned values are compared only until they were equal once.
        """
        request: Mapping[str, str] | RegardError
        learned: dict[str, Contents] = {}  # with a learned tensor that was not compared yet
        lengths = 0, 0
        try:
            check()
            share = _checked(share)
            exchange.check_device(share.query.device.type)
            contents = {name: Contents.of(getattr(share.attention, name)) for name in Attention.piece_order}
            contents |= {f"tensor {name}": Contents.of(tensor) for name, tensor in share.shared_tensors().items()}
            request = self._request(share)
            request["dropout"] = "none" if seed is None else str(share.attention.dropout)
            request |= {f"contents of the {name}": each.digest for name, each in contents.items() if each.hidden}
            compared = exchange.compared
            learned = {name: each for name, each in contents.items() if any(t not in compared for t in each.learned)}
            lengths = share.sizes.I, share.sizes.J
        except RegardError as error:
            request = error
        learned_values = {f"learned values of the {name}": each.learned_digest for name, each in learned.items()}
        agreement = exchange.agree("attend", request, lengths, learned_values, seed or 0)
        exchange.compared.update((t, True) for each in learned.values() for t in each.learned)
        return share, agreement

    def _request(self, share: RankShare) -> dict[str, str]:
        """The request of this rank, by name; all ranks must make the same request."""
        attention, sizes, (query, key, value) = share.attention, share.sizes, (share.query, share.key, share.value)
        call_tensors = {"q": query, "k": key, "v": value, **dict(sorted(share.tensors.items()))}
        wanted = [name for name, t in call_tensors.items() if t.requires_grad]
        wanted += [name for name, p in attention.named_parameters() if p.requires_grad]
        tensors = [f"{name} ({' '.join(axes)}) in {share.tensors[name].dtype}" for name, axes in share.axes()]
        return {
            "batch size": str(sizes.B),
            "number of query heads": str(sizes.H),
            "number of key/value heads": str(sizes.G),
            "widths": f"{sizes.D} of queries, {key.shape[-1]} of keys, {sizes.E} of values",
            "number format": f"{query.dtype} on {query.device.type}",
            "pieces": words(attention.with_mask(None)),
            "mask": words(attention.mask),
            "gradients": ", ".join(wanted) if wanted and torch.is_grad_enabled() else "none",
            "tensors of the call": ", ".join(tensors) or "none",
            "layout": self.layout,
            "positions": repr(share.positions) if share.positions else "aligned to the end",
        }


@uncompiled
def _default_here() -> Ring | None:
    """The ring of the innermost open block of this thread, whose number torch's compiler cannot read."""
    thread = get_ident()
    return next((ring for of_thread, ring in reversed(_defaults) if of_thread == thread), None)


def _group(group: Any) -> dist.ProcessGroup | None:
    """The process group of the argument `group`: itself, or that of a mesh of one dimension; None stays None."""
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim == 1:
            return group.get_group()
        raise RegardError(
            f"Ring(group=...): a mesh of {group.ndim} dimensions {group.mesh_dim_names} is many groups. Name the "
            "dimension of the sequence: mesh['sequence']."
        )
    raise RegardError(
        f"Ring(group=...): expected a process group or a device mesh of one dimension, got {type(group).__name__}."
    )


def _checked(share: RankShare) -> RankShare:
    """The share with its tensors after checks; an error if the ring cannot run it."""
    share = share.checked()
    attention, positions, sizes = share.attention, share.positions, share.sizes
    check_positions(positions)
    unmergeable = attention.normalizer.merge_refusal
    reason = None if unmergeable is None else f"the weights of {attention.normalizer!r} {unmergeable}"
    if reason is None and positions is not None and len(positions.keys.intervals) != 1:
        reason = f"its keys must have contiguous positions, and {positions.keys} are several intervals"
    if reason is None and _hides_gradients(share):
        reason = HIDDEN_GRADIENTS
    if reason is None and sizes.is_empty:
        reason = (
            "each rank must hold at least one batch entry, query and key, and this one holds "
            f"{sizes.B}, {sizes.I} and {sizes.J}"
        )
    if reason is not None:
        able = "" if unmergeable is None else " Engines that can: dense, blocked, each on one device."
        raise RegardError(f"attend: the ring engine cannot run {attention!r}: {reason}.{able}")
    return share


def _hides_gradients(share: RankShare) -> bool:
    """`Problem.hides_gradients` of the first token. Pieces of this package alone hide none."""
    if not split_tensors(share.attention)[1].is_foreign:
        return False
    first, positions = share.first_token(), Positions.aligned_to_end(1, 1)
    inputs = first.attention, first.query, first.key, first.value
    return Problem(*inputs, positions, first.sizes, call_tensors=first.tensors).hides_gradients


def _route(share: RankShare, held: Sequence[Sequence[Spans]]) -> Route:
    """The route between the positions of all queries and keys, once the pieces accept the sizes of the whole call.

    `held` are the tokens of each rank, counted from 0: those of queries, and those of keys.
    """
    attention, sizes, positions = share.attention, share.sizes, share.positions
    I, J = (sum(map(len, shares)) for shares in held)
    positions = positions or Positions.aligned_to_end(I, J)
    positions.check(J)
    attention.check(dataclasses.replace(sizes, I=I, J=J), positions, share.key.shape[-1])
    ((first, _),) = positions.keys
    if attention.position is not None:  # a table may be shorter than the sequence: all ranks raise, not only the last
        attention.position.check(positions.queries(I) | positions.keys)
    _check_own_queries(share, held)
    queries, keys = ([s.shift(by) for s in shares] for shares, by in zip(held, (positions.start, first), strict=True))
    return Route(attention.mask, queries, keys)


def _check_own_queries(share: RankShare, held: Sequence[Sequence[Spans]]) -> None:
    """Refuse shares whose queries are not its keys, for pieces that read tensors of the own keys at the queries.

    `held` has the queries of each rank, then the keys of each rank.
    """
    attention = share.attention
    reader = attention.transition or (attention.position if needs_of(attention.position) else None)
    if reader is None:
        return
    for rank, (queries, keys) in enumerate(zip(*held, strict=True)):
        if queries != keys:
            raise RegardError(
                f"attend: in a ring {type(reader).__name__} needs the queries and keys of the same tokens on each "
                f"rank, and rank {rank} holds queries {queries} and keys {keys}."
            )
