"""A run of chunks: everything that does not depend on the state, in the WY form, for all its chunks at once.

In a chunk that starts with the state S, let r_t = w_t^T (the decayed state before t), what token t reads and erases.
Each r_t depends on earlier ones of the chunk, so they solve a triangular system,

    (I + B) R = W S + A V,    A_ts = w_t . k_s,  B_ts = w_t . u_s  (s < t, with the decay between the two),

with the rows of W decayed since the start. So all outputs and the next state are products of matrices:

    N = X_v - X_w S         what the chunk writes; V - R if u = k, else V above -R
    O = Q S + P N           P: dot products of queries with what is written (k, or k and u)
    S' = decay S + K^T N    K: what is written, decayed to the end of the chunk

Yang et al. 2024 (arXiv:2406.06484) call this the WY form of DeltaNet; here it also serves decays by channel and u != k.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard.engine.recurrent.decays import Decays, ReadVectors


@dataclass(frozen=True)
class Kind:
    """Which vectors read the state before the decay of their token: queries (`reads_before`), w (`erases_before`)."""

    reads_before: bool = False
    erases_before: bool = False


@dataclass(frozen=True)
class Tokens:
    """The tensors of N chunks of C tokens, (N, C, ...) each; None for what there is not.

    In the letters above: `address` is w, `erase` is u (None if u is k), and `log_decay` (N, C, 1 or D) is the logarithm
    of the decay of each token.
    """

    query: Tensor | None
    key: Tensor
    log_decay: Tensor
    address: Tensor | None
    erase: Tensor | None


class Chunks:
    """The factors of N chunks, without values and states."""

    def __init__(self, tokens: Tokens, kind: Kind) -> None:
        self.tokens, self.kind = tokens, kind
        self.decays = Decays.of(tokens.log_decay)
        readers = (tokens.address, kind.erases_before), (tokens.query, kind.reads_before)
        self._rows = [ReadVectors(x, before) for x, before in readers if x is not None]
        pairs = self.decays.pairs(self._rows, self._written)
        #: A, and B if u is not k: pairs of addresses with what is written, (N, C, C) each.
        self.erased = pairs.pop(0) if tokens.address is not None else []
        #: P: pairs of queries with what is written, (N, C, C or 2C); None without queries.
        self.read = torch.cat(pairs[0], 2) if pairs else None

    @property
    def _written(self) -> list[Tensor]:
        """The vectors whose products are added to the state: k, and u if it is not k."""
        return [self.tokens.key] if self.tokens.erase is None else [self.tokens.key, self.tokens.erase]

    @cached_property
    def writes(self) -> Tensor:
        """K: what is written, decayed to the end of the chunk, (N, C or 2C, D)."""
        return torch.cat([x * self.decays.rest for x in self._written], 1)

    @cached_property
    def queries(self) -> Tensor | None:
        """Q: the queries, decayed since the start of the chunk."""
        query = self.tokens.query
        return None if query is None else query * self.decays.since_start(self.kind.reads_before)

    @cached_property
    def addresses(self) -> Tensor | None:
        """W: the addresses of what is erased, decayed since the start of the chunk."""
        address = self.tokens.address
        return None if address is None else address * self.decays.since_start(self.kind.erases_before)

    @cached_property
    def total(self) -> Tensor:
        """The decay of the state over the chunk, (N, 1 or D, 1)."""
        return self.decays.total[..., None]

    def solved(self, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """X_v (N, C or 2C, E) and X_w (N, C or 2C, D) of these values: N = X_v - X_w S. X_w None: nothing is erased.

        From R = (I + B)^-1 (W S + A V) follow, if u = k (then A = B), V - R = (I + B)^-1 (V - W S), and else -R.
        """
        if self.addresses is None:
            return value, None
        E = value.shape[2]
        if self.tokens.erase is None:
            solution = solve(self.erased[0], torch.cat((value, self.addresses), 2))
            return solution[..., :E], solution[..., E:]
        erased_values = torch.bmm(self.erased[0].tril(-1), value)
        solution = solve(self.erased[1], torch.cat((erased_values, self.addresses), 2))
        of_state = solution[..., E:]
        return torch.cat((value, -solution[..., :E]), 1), torch.cat((torch.zeros_like(of_state), of_state), 1)


def solve(system: Tensor, right: Tensor, transposed: bool = False) -> Tensor:
    """(I + the part of `system` below the diagonal)^-1 right, or with the transposed matrix.

    `unitriangular` reads neither the diagonal, which it takes for 1, nor the other triangle.
    """
    matrix = system.mT if transposed else system
    return torch.linalg.solve_triangular(matrix, right, upper=transposed, unitriangular=True)


def gradients(
    chunks: Chunks, value: Tensor, solved: tuple[Tensor, Tensor | None], grads: WriteGradients
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value, log_decay, address and erase, from those of what a run of chunks computes.

    `solved` is the result of `Chunks.solved`. The gradient of y = M^-1 x is M^-T dy for x, and -(M^-T dy) y^T for M, of
    which only the part below the diagonal is not constant.
    """
    tokens, E = chunks.tokens, value.shape[2]
    pair_grads: list[list[Tensor]] = []
    decayed_address = None
    grad_value = grads.written
    if chunks.addresses is not None:
        x_value, x_state = solved
        assert x_state is not None and grads.of_state is not None
        C = value.shape[1]
        if tokens.erase is None:  # u = k: N = (I + A)^-1 (V - W S)
            back = solve(chunks.erased[0], torch.cat((grads.written, grads.of_state), 2), transposed=True)
            pair_grads.append([torch.bmm(back, torch.cat((x_value, x_state), 2).mT).neg_().tril_(-1)])
            grad_value = back[..., :E]
        else:  # the second half of N is -R, with (I + B) R = A V + W S
            of_read = torch.cat((grads.written[:, C:].neg(), grads.of_state[:, C:]), 2)
            back = solve(chunks.erased[1], of_read, transposed=True)
            solution = torch.cat((x_value[:, C:].neg(), x_state[:, C:]), 2)
            of_erased = torch.bmm(back, solution.mT).neg_().tril_(-1)
            pair_grads.append([torch.bmm(back[..., :E], value.mT).tril_(-1), of_erased])
            grad_value = grads.written[:, :C] + torch.bmm(chunks.erased[0].tril(-1).mT, back[..., :E])
        decayed_address = back[..., E:]
    if grads.read is not None:
        pair_grads.append(list(grads.read.split(value.shape[1], 2)))
    return _of_tokens(chunks, pair_grads, decayed_address, grads, grad_value)


@dataclass(frozen=True)
class WriteGradients:
    """Gradients of: what is written (N), X_w, P, the decayed queries, K, and the total decay; None: there is none.

    The head of this file defines the letters. X_v has the gradient of N.
    """

    written: Tensor
    of_state: Tensor | None
    read: Tensor | None
    queries: Tensor | None
    writes: Tensor
    total: Tensor


def _of_tokens(
    chunks: Chunks,
    pair_grads: list[list[Tensor]],
    decayed_address: Tensor | None,
    grads: WriteGradients,
    grad_value: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients of the tokens, (N, C, ...) each: query, key, value, log_decay, address and erase.

    `pair_grads` are those of the pairs of addresses and of queries, for each vector that is written, `decayed_address`
    is the gradient of the addresses decayed since the start of the chunk, and `grads` has those of other factors. A
    factor is its vector x times exp(e), so the gradient of the exponent e is x . dx. The exponents are differences of
    sums of log-decays up to a token: plus the sum at the token that reads, minus that at the token that writes.
    """
    tokens, kind, decays = chunks.tokens, chunks.kind, chunks.decays
    row_grads, col_grads = decays.pair_gradients(chunks._rows, chunks._written, pair_grads)
    if decayed_address is not None:
        row_grads[0].addcmul_(decayed_address, decays.since_start(kind.erases_before))
    if grads.queries is not None:
        row_grads[-1].addcmul_(grads.queries, decays.since_start(kind.reads_before))
    writes = grads.writes.split(tokens.key.shape[1], 1)
    at_end = grads.total[..., 0] * decays.total  # the gradient of the sum over the whole chunk
    exponent = torch.zeros_like(tokens.log_decay)  # the gradient of the sum of log-decays up to each token
    for y, col_grad, write in zip(chunks._written, col_grads, writes, strict=True):
        of_write = write * decays.rest
        at_end = at_end + _sum_to(of_write * y, at_end.shape[-1]).sum(1)
        exponent -= _sum_to((col_grad := col_grad.add_(of_write)) * y, exponent.shape[-1])
    for x, row_grad in zip(chunks._rows, row_grads, strict=True):
        of_row = _sum_to(row_grad * x.vectors, exponent.shape[-1])
        if x.before:  # it reads before its own decay, so at the sum up to the token before
            exponent[:, :-1] += of_row[:, 1:]
        else:
            exponent += of_row
    exponent[:, -1] += at_end
    log_decay = exponent.flip(1).cumsum(1).flip(1)  # a log-decay is a part of its own sum and of all later ones
    row = iter(row_grads)
    address = None if tokens.address is None else next(row)
    query = None if tokens.query is None else next(row)
    return query, col_grads[0], grad_value, log_decay, address, col_grads[1] if len(col_grads) > 1 else None


def _sum_to(x: Tensor, width: int) -> Tensor:
    """The sum over channels, (N, C, 1), if the decay has one number a token (`width` 1)."""
    return x.sum(-1, keepdim=True) if width == 1 else x
