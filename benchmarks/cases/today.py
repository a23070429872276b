"""Mechanisms of today's models: encodings before the kernel, learned biases of positions and gates, sigmoid weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import regard as rg
from benchmarks.case import Aim, BenchSettings, Case, Side, allowed_pairs
from benchmarks.peers import sdpa
from regard.catalog import mechanism

HEADS, WIDTH, LENGTH = 8, 64, 2048
#: Bytes of one number for each pair.
DENSE = HEADS * LENGTH * LENGTH * 4
SMALL = Aim("memory", 0.25)


def attentions() -> dict[str, rg.Attention]:
    """By mechanism: an attention with the same random parameters at every call."""
    tokens = torch.arange(LENGTH)
    coordinates = torch.stack((tokens // 64, tokens % 64))
    arguments = {
        "qk_norm": {"head_dim": WIDTH},
        "scalable_softmax": {"num_heads": HEADS},
        "position_temperature": {"floor": 256},
        "yarn": {"head_dim": WIDTH, "factor": 4.0, "trained_length": 512},
        "longrope": {"factors": [1.0 + m / 8 for m in range(WIDTH // 2)], "extension": 4.0, "trained_length": 512},
        "multimodal_rope": {"coordinates": torch.stack((tokens, *coordinates)), "sections": (8, 12, 12)},
        "axial_rope": {"coordinates": coordinates, "head_dim": WIDTH},
        "pope": {"num_heads": HEADS, "head_dim": WIDTH},
        "kerple": {"num_heads": HEADS},
        "fire": {"num_heads": HEADS},
        "sigmoid": {},
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = {name: mechanism(name).build(**given) for name, given in arguments.items()}
    return {name: attention for name, attention in built.items() if isinstance(attention, rg.Attention)}


def cases(setting: BenchSettings) -> Iterator[Case]:
    """Forward at 2,048 tokens."""
    if setting.device == "cuda":
        return
    for name, attention in attentions().items():
        yield _case(setting, name, attention, _peer(name, attention))
    gates = Side("SDPA, dense bias of each call", forgets_in_torch, (Aim("time", 1.5), SMALL), needs=3 * DENSE)
    attention = rg.Attention(bias=rg.biases.ForgettingBias(), mask=rg.causal())
    yield _case(setting, "forgetting", attention, gates, ours=forgets)


def _case(
    setting: BenchSettings,
    name: str,
    attention: rg.Attention,
    peer: Side,
    ours: Callable[..., Callable[..., Tensor]] | None = None,
) -> Case:
    return Case(
        group="today",
        work=f"{name}, n = {LENGTH:,}, {HEADS} heads of {WIDTH}, forward",
        inputs=setting.inputs(*[(1, HEADS, LENGTH, WIDTH)] * 3),
        mechanism=name,
        attention=attention if ours is None else None,
        ours=ours,
        peers=(peer,),
        flops=lambda: 4 * HEADS * WIDTH * allowed_pairs(attention.mask, LENGTH, LENGTH),
    )


def _peer(name: str, attention: rg.Attention) -> Side:
    if name == "sigmoid":
        return Side("eager", sigmoid_in_torch, (Aim("faster", 1), SMALL), needs=4 * DENSE)
    if attention.bias:
        return Side("eager", partial(sdpa.eager, attention), (Aim("faster", 1), SMALL), needs=4 * DENSE)
    return Side("SDPA after the same encoding", partial(encoded, attention), (Aim("time", 1.1),))


def encoded(attention: rg.Attention, *inputs: Tensor) -> Callable[..., Tensor]:
    """torch's kernel for queries and keys that are encoded at each call."""
    assert attention.position is not None
    position, scale = attention.position, attention.score.scale(WIDTH)
    is_causal = attention.mask is not None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = position.encode_both(q, k, rg.types.Positions.aligned_to_end(LENGTH, LENGTH))
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)  # type: ignore[arg-type]

    return run


def sigmoid_in_torch(*inputs: Tensor) -> Callable[..., Tensor]:
    """The formula, all pairs at once."""
    offset = torch.arange(1, LENGTH + 1).log()[:, None]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * WIDTH**-0.5 - offset).sigmoid().tril() @ v

    return run


def gates_of(keys: Tensor) -> Tensor:
    """Logarithms of gates that a layer could have computed, (B, H, J)."""
    return F.logsigmoid(4 + keys[..., 0])


def forgets(*inputs: Tensor) -> Callable[..., Tensor]:
    """Forgetting attention with these gates."""
    attention = rg.Attention(bias=rg.biases.ForgettingBias(), mask=rg.causal())
    return lambda q, k, v: attention(q, k, v, log_forget=gates_of(k)).output


def forgets_in_torch(*inputs: Tensor) -> Callable[..., Tensor]:
    """The same with a dense bias of each call."""
    later = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sums = gates_of(k).cumsum(-1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=sums[..., None] - sums[..., None, :] + later)

    return run
