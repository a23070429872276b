"""Transitions with drawn tensors, and their weights by definition: one matrix A_t for each token, multiplied out."""

from __future__ import annotations

import torch

from regard.catalog import mechanisms
from regard.catalog.entry import DRAWS
from regard.pieces.transition import (
    RWKV7,
    ChannelDecay,
    Decay,
    Delta,
    GatedDelta,
    KimiDelta,
    StateSpace,
)

B, H, D, E = 2, 3, 4, 5


def _drawn(J, width=None, scale=1.0):
    return scale * torch.rand(B, H, J, *(() if width is None else (width,)), dtype=torch.float64)


def _unit(J):
    return torch.nn.functional.normalize(torch.randn(B, H, J, D, dtype=torch.float64), dim=-1)


#: name: the transition, and what draws the tensors of a call of J tokens.
TRANSITIONS = {
    "retnet": (lambda: Decay(torch.tensor([-0.1, -0.5, -2.0])), lambda J: {}),
    "one number": (lambda: Decay(-0.3), lambda J: {}),
    "decay": (Decay, lambda J: {"log_decay": -_drawn(J)}),
    "gla": (ChannelDecay, lambda J: {"log_decay": -_drawn(J, D)}),
    "hgrn_2": (lambda: ChannelDecay(complement=True), lambda J: {"log_decay": -_drawn(J, D)}),
    "rwkv_6": (lambda: ChannelDecay(bonus=torch.randn(H, D).double()), lambda J: {"log_decay": -_drawn(J, D)}),
    "ssd": (lambda: StateSpace(-torch.rand(H), skip=torch.rand(H)), lambda J: {"step": _drawn(J)}),
    "mamba_1": (lambda: StateSpace(-torch.rand(H, D)), lambda J: {"step": _drawn(J)}),
    "deltanet": (Delta, lambda J: {"beta": _drawn(J, scale=2.0)}),
    "gated_deltanet": (GatedDelta, lambda J: {"log_decay": -_drawn(J), "beta": _drawn(J, scale=2.0)}),
    "kimi_delta": (KimiDelta, lambda J: {"log_decay": -_drawn(J, D), "beta": _drawn(J, scale=2.0)}),
    "rwkv_7": (
        lambda: RWKV7(bonus=torch.randn(H, D).double()),
        lambda J: {"log_decay": -_drawn(J, D, 0.6), "address": _unit(J), "rate": _drawn(J, D)},
    ),
}


def _from_catalog():
    """Transitions of the catalog that are not above, with the tensors that they need in their calls."""
    above = {type(build()) for build, _ in TRANSITIONS.values()}
    sizes = {"num_heads": H, "head_dim": D}
    for name, entry in mechanisms().items():
        if entry.family != "transported":
            continue
        arguments = entry.tiny | {argument: size for argument, size in sizes.items() if argument in entry.tiny}
        transition = entry.build(**arguments).double().transition
        if type(transition) not in above:
            yield name, (lambda own=transition: own, lambda J, own=transition: _needed(own, J))


def _needed(transition, J):
    sizes = {"B": B, "H": H, "J": J, "D": D}
    tensors = {}
    for name, axes in transition.needs.items():
        draw, _ = DRAWS.get(name, (torch.clone, ""))
        tensors[name] = draw(torch.rand([sizes[axis] for axis in axes.split()], dtype=torch.float64))
    return tensors


TRANSITIONS |= dict(_from_catalog())
NAMES = sorted(TRANSITIONS)


def drawn(name, J, I=None, seed=0):
    """The transition, query (B, H, I, D), key, value, and the tensors of the call, in float64."""
    torch.manual_seed(seed)
    build, tensors = TRANSITIONS[name]
    q, k = torch.randn(2, B, H, J, D, dtype=torch.float64)
    v = torch.randn(B, H, J, E, dtype=torch.float64)
    return build(), q[:, :, J - (J if I is None else I) :], k, v, tensors(J)


def steps_of(transition, q, k, tensors, factor=0.5):
    """The `Steps` of a call with scores q . k times a factor; the factor comes after a norm."""
    q, k = transition.normalized(q, k)
    return transition.prepare(q * factor, k, **tensors).of_heads(q.shape[1])


def by_definition(steps):
    """The weights (B, H, I, J), from one D x D matrix for each token; shares no code with the engine."""
    I, J, width = steps.query.shape[2], steps.key.shape[2], steps.key.shape[3]
    weights = steps.query.new_zeros(*steps.query.shape[:3], J)
    matrices = [_matrix(steps, t, width) for t in range(J)]
    for i in range(I):
        token = i + J - I
        x = steps.query[:, :, i]
        for j in range(token, -1, -1):
            if not (steps.reads_before and j == token):
                weights[:, :, i, j] = (x * steps.key[:, :, j]).sum(-1)
                x = (x[:, :, None] @ matrices[j])[:, :, 0]
        if steps.own is not None:
            weights[:, :, i, token] += steps.own[:, :, i]
    return weights


def _matrix(steps, t, width):
    decay = steps.key.new_zeros(()) if steps.log_decay is None else steps.log_decay[:, :, t]
    matrix = torch.diag_embed(decay.exp().expand(*steps.key.shape[:2], width))
    if steps.address is None:
        return matrix
    erase = steps.key if steps.erase is None else steps.erase
    address = steps.address[:, :, t, None]
    return matrix - erase[:, :, t, :, None] @ (address if steps.erases_before else address @ matrix)
