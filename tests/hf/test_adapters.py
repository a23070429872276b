"""Adapters of hand-written attention that no rule recognizes: watched, edited, and read by head.

To test a new adapter, add its module to `MODELS`: the module, its input, and the weights that it computes with.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import regard as rg
from regard.hf import adapters
from watching import assert_identical, assert_verified, watched

B, H, N, C = 2, 2, 6, 8


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(adapters, "_adapters", dict(adapters._adapters))
    rg.hf.adapter("RegionMixer", output="last", num_heads="groups")(read_regions)
    rg.hf.adapter(PixelMixer, output="last")(read_pixels)
    rg.hf.adapter("SharedMixer")(read_shared)


def linears(*names):
    return nn.ModuleDict({name: nn.Linear(C, C) for name in names})


class Mixer(nn.Module):
    """Keeps the weights (B, H, N, N) that it computed with; `value_heads` is the number of heads of its values."""

    used: torch.Tensor
    value_heads = H


class RegionMixer(Mixer):
    """The scores have the keys on the second axis, and the heads on the last."""

    def __init__(self):
        super().__init__()
        self.theta, self.phi, self.g, self.last = (nn.Linear(C, C) for _ in range(4))
        self.groups = H

    def forward(self, x):
        t, p, g = (layer(x).unflatten(-1, (self.groups, -1)) for layer in (self.theta, self.phi, self.g))
        a = self.change(torch.einsum("bihd,bjhd->bjih", t, p).softmax(1))
        return x + self.last(torch.einsum("bjih,bjhd->bihd", a, g).flatten(2))

    def change(self, a):
        self.used = a.permute(0, 3, 2, 1)
        return a


def read_regions(module, x):
    q, k, v = (f(x).unflatten(-1, (module.groups, -1)).transpose(1, 2) for f in (module.theta, module.phi, module.g))
    return rg.hf.AdaptedCall(q, k, v, lambda heads: x + module.last(heads.transpose(1, 2).flatten(2)), scale=1.0)


class PixelMixer(Mixer):
    """A non-local block (Wang et al. 2018): pixels (B, C, 2, 3), one head."""

    value_heads = 1

    def __init__(self):
        super().__init__()
        self.theta, self.phi, self.g, self.last = (nn.Conv2d(C, C, 1) for _ in range(4))

    def forward(self, x):
        t, p, g = (layer(x).flatten(2) for layer in (self.theta, self.phi, self.g))
        self.used = torch.softmax(p.mT @ t * 0.3, 1).mT[:, None]
        return x + self.last((g @ self.used[:, 0].mT).unflatten(-1, x.shape[2:]))


def read_pixels(module, x):
    q, k, v = (layer(x).flatten(2).mT[:, None] for layer in (module.theta, module.phi, module.g))
    shaped = lambda heads: heads[:, 0].mT.unflatten(-1, x.shape[2:])  # noqa: E731
    return rg.hf.AdaptedCall(q, k, v, lambda heads: x + module.last(shaped(heads)), scale=0.3)


class SharedMixer(Mixer):
    """Causal, with one key and value for all heads; the last token of the second text is padding. Returns a pair."""

    value_heads = 1

    def __init__(self):
        super().__init__()
        self.parts = linears("first", "second", "third", "fourth")
        self.real = torch.arange(N) < torch.tensor([[N], [N - 1]])

    def forward(self, x, *, shift=0.0):
        t, p, g = self.parts["first"](x), self.parts["second"](x)[..., : C // H], self.parts["third"](x)[..., : C // H]
        t = t.unflatten(-1, (H, -1)).permute(2, 0, 1, 3)
        s = torch.einsum("hbid,bjd->jhbi", t, p) / (C // H) ** 0.5
        a = s.masked_fill(~allowed(self).permute(3, 1, 0, 2), -torch.inf).softmax(0)
        self.used = a.permute(2, 1, 3, 0)
        return self.parts["fourth"](torch.einsum("jhbi,bjd->bihd", a, g).flatten(2)) + shift, None


def allowed(module):
    return torch.ones(N, N, dtype=torch.bool).tril() & module.real[:, None, None]


def read_shared(module, x, *, shift=0.0):
    q = module.parts["first"](x).unflatten(-1, (H, -1)).transpose(1, 2)
    k, v = (module.parts[name](x)[:, None, :, : C // H] for name in ("second", "third"))
    finish = lambda heads: module.parts["fourth"](heads.transpose(1, 2).flatten(2)) + shift  # noqa: E731
    return rg.hf.AdaptedCall(q, k, v, finish, allowed(module))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer = SharedMixer()

    def forward(self, input):
        return self.mixer(input, shift=0.5)[0]


MODELS = {
    "regions": (lambda: nn.Sequential(RegionMixer()), (B, N, C)),
    "pixels": (lambda: nn.Sequential(PixelMixer()), (B, C, 2, 3)),
    "shared": (Shared, (B, N, C)),
}


def made(name):
    torch.manual_seed(0)
    build, size = MODELS[name]
    model = build().eval()
    return model, {"input": torch.randn(size)}, next(part for part in model.modules() if isinstance(part, Mixer))


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_that_the_module_computes_with(name):
    model, inputs, module = made(name)
    with torch.no_grad():
        plain = model(**inputs)
    outputs, seen = watched(model, inputs, keep="qkv")
    assert_identical(plain, outputs)
    assert_verified(seen)
    torch.testing.assert_close(seen[0].dense(), module.used, atol=1e-6, rtol=1e-5)
    assert seen[0].value.shape[:3] == (B, module.value_heads, N) and not seen.missing
    with rg.watch(model, grad=True) as live:
        loss = model(**inputs).sum() + seen[0].entropy().sum()
        of_map = torch.autograd.grad(live[0].dense().square().sum(), next(model.parameters()))[0]
    assert torch.isfinite(loss) and of_map.abs().max() > 0


@pytest.mark.parametrize("name", MODELS)
def test_without_its_adapter_nothing_is_known(name):
    adapters._adapters.clear()
    model, inputs, _ = made(name)
    with pytest.raises(rg.RegardError, match=r"no attention that can be captured.*\(regard.hf.adapter\)"):
        watched(model, inputs)


@torch.no_grad()
def test_an_edit_changes_what_the_module_computes():
    model, inputs, module = made("regions")
    with rg.edit(model, rg.KnockOut(rg.Where(heads=1, queries=[2, 3], keys=0))) as run, rg.watch(model) as seen:
        edited = model(**inputs)

    def without(a):
        a = a.clone()
        a[:, 0, 2:4, 1] = 0
        return a / a.sum(1, keepdim=True)

    module.change = without
    torch.testing.assert_close(edited, model(**inputs), atol=1e-6, rtol=1e-5)
    assert run.calls == {"0": 1} and seen[0].dense()[:, 1, 2:4, 0].abs().max() == 0 and len(seen.calls(0)) == 1
    source = torch.zeros(B, H, N, C // H)
    module.change = lambda a: a * torch.tensor([1.0, 0.0])
    with rg.edit(model, rg.edits.ActivationPatch(rg.Where(heads=1), part="output", source=source)):
        del module.change
        patched = model(**inputs)
    module.change = lambda a: a * torch.tensor([1.0, 0.0])
    torch.testing.assert_close(patched, model(**inputs), atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_a_pair_keeps_its_other_parts_under_an_edit():
    model, inputs, module = made("shared")
    with rg.edit(model, rg.KnockOut(rg.Where(heads=0, queries=4, keys=4))):
        output, other = model.mixer(inputs["input"])
    assert output.shape == (B, N, C) and other is None and not torch.equal(output, module(inputs["input"])[0])


def test_heads_are_parts_of_its_output():
    model, inputs, module = made("regions")
    outputs, seen = watched(model, inputs, keep="qkv")
    parts = seen.head_part(0).sum(1) + seen.bias_part(0) + inputs["input"]
    torch.testing.assert_close(parts, outputs, atol=1e-5, rtol=1e-5)
    with torch.no_grad(), rg.hf.gated(model, {"0": torch.tensor([0.0, 1.0])}), rg.watch(model, keep="qkv") as seen:
        gated = model(**inputs)
    torch.testing.assert_close(
        seen.head_part(0)[:, 1] + module.last.bias + inputs["input"], gated, atol=1e-5, rtol=1e-5
    )


def test_a_wrong_adapter_gives_no_map():
    @rg.hf.adapter("RegionMixer")
    def wrong(module, x):
        q, k, v = (f(x).unflatten(-1, (H, -1)).transpose(1, 2) for f in (module.theta, module.phi, module.g))
        return rg.hf.AdaptedCall(q, k, v, lambda heads: x + module.last(heads.transpose(1, 2).flatten(2)))

    model, inputs, _ = made("regions")
    with pytest.raises(rg.RegardError, match="recomputed weights times values differ"):
        watched(model, inputs)
    edit = rg.KnockOut(rg.Where(heads=1, queries=2, keys=0))
    with pytest.raises(rg.RegardError, match="adapter of RegionMixer does not read"), rg.edit(model, edit):
        model(**inputs)
    rg.hf.adapter("RegionMixer")(lambda module, x: x)
    with pytest.raises(rg.RegardError, match=r"must return a regard\.hf\.AdaptedCall"):
        watched(model, inputs)


@pytest.mark.parametrize("finished", [lambda heads: (heads, None), lambda heads: heads[:1].transpose(1, 2).flatten(2)])
def test_a_finish_of_another_kind_or_shape_is_refused(finished):
    @rg.hf.adapter("RegionMixer")
    def wrong(module, x):
        call = read_regions(module, x)
        return rg.hf.AdaptedCall(call.query, call.key, call.value, finished)

    model, inputs, _ = made("regions")
    with pytest.raises(rg.RegardError, match=r"finish must return a tensor of shape \(2, 6, 8\)"):
        watched(model, inputs)


def test_a_finish_without_the_heads_verifies_nothing():
    @rg.hf.adapter("RegionMixer")
    def wrong(module, x):
        call = read_regions(module, x)
        return rg.hf.AdaptedCall(call.query, call.key, call.value, lambda heads: module.forward(x))

    model, inputs, _ = made("regions")
    with torch.no_grad(), rg.watch(model) as seen:
        model(**inputs)
    check = seen.verify()["0"]
    assert check.ok is None and "does not depend on the outputs of its heads" in check.note


def test_a_subclass_has_the_adapter_of_its_class():
    class Named(RegionMixer):
        pass

    model = nn.Sequential(Named()).eval()
    _, seen = watched(model, {"input": torch.randn(B, N, C)}, verify="all")
    torch.testing.assert_close(seen[0].dense(), model[0].used, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("given", [3, None, int, RegionMixer().eval()])
def test_other_kinds_are_refused(given):
    with pytest.raises(rg.RegardError, match="give a class of modules"):
        rg.hf.adapter(given)


@pytest.mark.parametrize(
    ("name", "value"), [("query", torch.ones(2, 3, 4)), ("mask", 1), ("finish", 2), ("scale", "1"), ("dropout", None)]
)
def test_other_fields_are_refused(name, value):
    x = torch.ones(1, 1, 2, 4)
    fields = {"query": x, "key": x, "value": x, "finish": lambda heads: heads} | {name: value}
    with pytest.raises(rg.RegardError, match=rf"AdaptedCall\({name}=...\)"):
        rg.hf.AdaptedCall(**fields)
