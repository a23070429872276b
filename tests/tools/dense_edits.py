"""Attention as whole matrices with edits written out pair by pair, and drawn edits: the oracle of tests of edits."""

from __future__ import annotations

import itertools

import torch

import regard as rg


class Dense:
    """A backend that computes whole matrices, and applies edits to them pair by pair; positions end at the last key."""

    def __init__(self, number=lambda module: module.layer_idx):
        self.edits, self.number = [], number

    def __call__(self, module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **_):
        share = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(share, 1) for x in (key, value))
        s = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        s = s if softcap is None else torch.tanh(s / softcap) * softcap
        s = s + torch.zeros_like(s) if attention_mask is None else s + attention_mask
        w = self.weights(s.masked_fill(s < -1e30, -torch.inf), self.number(module), s_aux)
        return (w @ value).transpose(1, 2).contiguous(), w

    def weights(self, s, layer, s_aux=None):
        """The edited softmax of scores (B, H, I, J) of a layer; -inf is masked."""
        self.start = s.shape[3] - s.shape[2]
        own = [e for e in self.edits if layer in e["layers"]]
        for e in own:
            if e["kind"] == "steer":
                s = self.where(e, s, s + e["number"])
            elif e["kind"] == "knock":
                s = self.where(e, s, torch.full_like(s, -torch.inf))
        allowed = ~s.isneginf()
        if s_aux is not None:
            s = torch.cat([s, s_aux.view(1, -1, 1, 1).expand(len(s), -1, s.shape[2], 1)], -1)
        w = torch.exp(s - s.logsumexp(-1, True)).nan_to_num(0.0)[..., : allowed.shape[3]]
        for e in own:
            if e["kind"] == "scale":
                w = self.where(e, w, w * e["number"])
            elif e["kind"] == "zero":
                w = self.where(e, w, torch.zeros_like(w))
            elif e["kind"] == "uniform":
                shared = self.where(e, torch.zeros_like(w), allowed.to(w.dtype))
                rows = e | {"keys": range(99)}
                w = self.where(rows, w, torch.where(shared.any(-1, True), shared / shared.sum(-1, True), w))
        return w

    def where(self, e, old, new):
        chosen = torch.zeros(old.shape[1:], dtype=torch.bool)
        for h, i, j in itertools.product(*(range(n) for n in old.shape[1:])):
            chosen[h, i, j] = h in e["heads"] and i + self.start in e["queries"] and j in e["keys"]
        return torch.where(chosen, new, old)


def drawn(rng, N):
    """One edit of a model with 2 layers of 4 heads and N tokens, as rg's value and as the oracle reads it."""

    common = rng.randrange(N)  # the mask allows this pair of a query and a key

    def some(n, most):
        chosen = rng.sample(range(n), rng.randint(1, most))
        chosen = list(dict.fromkeys([common, *chosen])) if n == N else chosen
        kind = rng.randint(0, 3)
        if kind == 0:
            return None, range(99)
        if kind == 1:
            return slice(min(chosen), None), range(min(chosen), 99)
        return (chosen, chosen) if kind == 2 else (chosen[0], chosen[:1])

    parts = {"layers": some(2, 2), "heads": some(4, 3), "queries": some(N, 4), "keys": some(N, 4)}
    kind, number = rng.choice(["steer", "knock", "scale", "zero", "uniform"]), rng.uniform(-3, 3)
    typed = {name: part[0] for name, part in parts.items()}
    where = rg.Where(**typed)
    edit = {
        "steer": lambda: rg.edits.AddToScores(where, number),
        "knock": lambda: rg.KnockOut(where),
        "scale": lambda: rg.edits.ScaleWeights(where, number),
        "zero": lambda: rg.KnockOut(where, renormalize=False),
        "uniform": lambda: rg.edits.ReplaceWeights(where, "uniform"),
    }[kind]()
    return edit, {name: part[1] for name, part in parts.items()} | {"kind": kind, "number": number}
