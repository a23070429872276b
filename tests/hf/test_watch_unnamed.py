"""Attention that no name shows: `rg.watch` finds it by what it computes, and takes no other softmax for attention."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import regard as rg

B, N, C, H = 2, 5, 8, 2


class Mixing(nn.Module):
    """Mixes values by a softmax; the weights that it computes with are kept in `used`."""

    used: torch.Tensor

    def mixed(self, scores, values):
        self.used = scores.softmax(-1)
        return self.used @ values


class Core(Mixing):
    def forward(self, a, b, c):
        return self.mixed(a @ b.mT / a.shape[-1] ** 0.5, c)


class CoreOfEinsum(Mixing):
    def forward(self, a, b, c):
        self.used = torch.softmax(torch.einsum("bhid,bhjd->bhij", a, b), -1)
        return torch.einsum("bhij,bhjd->bhid", self.used, c)


class CoreOfLayer(Mixing):
    def __init__(self):
        super().__init__()
        self.normalize = nn.Softmax(dim=-1)

    def forward(self, a, b, c):
        self.used = self.normalize((a.unsqueeze(-2) * b.unsqueeze(-3)).sum(-1))
        return self.used @ c


class Around(nn.Module):
    """Projections without names of attention, around a core without parameters."""

    def __init__(self, core, num_heads=H):
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(C, C) for _ in range(4))
        self.core, self.num_heads = core, num_heads

    def forward(self, x):
        split = lambda y: y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # noqa: E731
        parts = (split(layer(x)) for layer in (self.first, self.second, self.third))
        return self.last(self.core(*parts).transpose(1, 2).flatten(2))


class AllInOne(Mixing):
    """Projections of any name in the same module, one head."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(C, C) for _ in range(3))

    def forward(self, x):
        return self.mixed(self.first(x) @ self.second(x).mT, self.third(x))


class Aligner(Mixing):
    """Additive scores of one state and the states of an encoder; the sum over the states."""

    def __init__(self):
        super().__init__()
        self.of_state, self.of_memory, self.score = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, 1)

    def shares(self, state, memory):
        hidden = torch.tanh(self.of_state(state)[:, None] + self.of_memory(memory))
        self.used = self.score(hidden).squeeze(-1).softmax(-1)
        return self.used

    def forward(self, state, memory):
        return (self.shares(state, memory)[:, None] @ memory)[:, 0]


class AlignerOfWeights(Aligner):
    def forward(self, state, memory):
        return self.shares(state, memory)


class Steps(nn.Module):
    """A decoder that calls an aligner, which returns the context or only its weights."""

    def __init__(self, aligner):
        super().__init__()
        self.aligner, self.cell, self.rows = aligner, nn.GRUCell(C, C), []

    def forward(self, memory):
        state, self.rows = memory[:, -1], []
        for _ in range(3):
            found = self.aligner(state, memory)
            self.rows.append(self.aligner.used)
            state = self.cell(found if found.shape[-1] == C else (found[:, None] @ memory)[:, 0], state)
        return state


class Pool(Mixing):
    """One vector for a text: its tokens, weighted by a learned score."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(C, 1)

    def forward(self, x):
        self.used = self.score(x).squeeze(-1).softmax(-1)
        return torch.einsum("bj,bjc->bc", self.used, x)


FOUND = {
    "a core": lambda: Around(Core()),
    "a core of einsum": lambda: Around(CoreOfEinsum()),
    "a core with a layer of softmax": lambda: Around(CoreOfLayer()),
    "one module": AllInOne,
    "pooling": Pool,
}


def used(model):
    return next(module.used for module in model.modules() if isinstance(module, Mixing))


@pytest.mark.parametrize("make", FOUND.values(), ids=FOUND)
def test_a_softmax_that_weights_tokens_is_attention(make):
    model, x = make().eval(), torch.randn(B, N, C)
    with torch.no_grad():
        expected = model(x)
        with rg.watch(model) as seen:
            assert torch.equal(model(x), expected)
    torch.testing.assert_close(seen[0].dense().reshape(used(model).shape), used(model))
    assert not seen.missing and seen[0].shape[0] == B


@pytest.mark.parametrize("kind", [Aligner, AlignerOfWeights])
def test_the_steps_of_a_decoder_form_one_map(kind):
    model, memory = Steps(kind()).eval(), torch.randn(B, 7, C)
    with torch.no_grad(), rg.watch(model) as seen:
        model(memory)
    torch.testing.assert_close(seen["aligner"].dense()[:, 0], torch.stack(model.rows, 1))


def test_every_block_of_a_model_is_found():
    model = nn.Sequential(nn.Embedding(9, C), *(Around(Core()) for _ in range(3)), nn.Linear(C, 9))
    with torch.no_grad(), rg.watch(model) as seen:
        model(torch.randint(9, (B, N)))
    assert [*seen.maps] == [f"{n}.core" for n in (1, 2, 3)]
    for n in (1, 2, 3):
        torch.testing.assert_close(seen[f"{n}.core"].dense(), model[n].core.used)


def test_values_are_kept():
    model, x = Around(Core()).eval(), torch.randn(B, N, C)
    with torch.no_grad(), rg.watch(model, keep="qkv") as seen:
        model(x)
        expected = model.third(x).unflatten(-1, (H, -1)).transpose(1, 2)
    torch.testing.assert_close(seen[0].value, expected)


def test_weights_that_are_changed_are_missing_with_the_reason():
    class Changed(Core):
        def mixed(self, scores, values):
            return (scores.softmax(-1) * 0.5) @ values

    model = nn.ModuleDict({"known": rg.nn.MultiHeadAttention(C, H), "core": Around(Changed())})
    model.forward = lambda x: model["core"](model["known"](x).output)
    with torch.no_grad(), rg.watch(model) as seen:
        model(torch.randn(B, N, C))
    assert "changes its weights after the softmax" in seen.missing["core.core"]


class Experts(nn.Module):
    """A router; as many experts as tokens, so that no size tells them from tokens."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(C, N), nn.ModuleList(nn.Linear(C, C) for _ in range(N))

    def logits(self, x):
        return self.router(x)

    def forward(self, x):
        shares = self.logits(x).softmax(-1)
        results = torch.stack([expert(x) for expert in self.experts], -2)
        return torch.einsum("bte,btec->btc", shares, results)


class GatedRouter(Experts):
    """A product of two layers of the input before the router compares no tokens."""

    def __init__(self):
        super().__init__()
        self.up, self.gate = nn.Linear(C, C), nn.Linear(C, C)

    def logits(self, x):
        return self.router(self.up(x) * self.gate(x).sigmoid())


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(C, N)

    def forward(self, x):
        return self.layer(x).softmax(-1)


class MeanOfLayers(nn.Module):
    """The mean of several layers, by a softmax of learned numbers."""

    def __init__(self):
        super().__init__()
        self.layers, self.shares = nn.ModuleList(nn.Linear(C, C) for _ in range(3)), nn.Parameter(torch.randn(3))

    def forward(self, x):
        layers = torch.stack([layer(x) for layer in self.layers])
        return (self.shares.softmax(0)[:, None, None, None] * layers).sum(0)


class MeanOfInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.shares = nn.Parameter(torch.randn(N))

    def forward(self, x):
        return self.shares.softmax(0) @ x


NOT_FOUND = {kind.__name__: kind for kind in (Experts, GatedRouter, Classifier, MeanOfLayers, MeanOfInputs)}


@pytest.mark.parametrize("make", NOT_FOUND.values(), ids=NOT_FOUND)
def test_other_softmaxes_are_no_attention(make):
    """Alone there is an error that says how attention is known; beside attention nothing is missing."""
    model, x = make().eval(), torch.randn(B, N, C)
    words = "has no attention that can be captured.*a product of two tensors from the inputs"
    with torch.no_grad(), pytest.raises(rg.RegardError, match=words), rg.watch(model):
        model(x)
    both = nn.Sequential(Around(Core()), model)
    with torch.no_grad(), rg.watch(both) as seen:
        both(x)
    assert [*seen.maps] == ["0.core"] and not seen.missing
