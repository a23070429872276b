"""Every module of the zoo by every function that takes a module, against its formula in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import regard as rg
from regard.hf.capture import module_rerun
from watching import assert_identical
from zoo import ZOO, B, C, N

PAIR = (0, 4, 1)  # head, query, key
pytestmark = pytest.mark.parametrize("name", ZOO)


def made(name):
    """The specimen, a model that holds its module, an input, and the parts of the formula."""
    specimen = ZOO[name]
    module, x = specimen.make().eval(), torch.randn(B, N, C)
    with torch.no_grad():
        parts = specimen.parts(copy.deepcopy(module).double(), x.double())
    return specimen, nn.ModuleDict({"layer": module}), x, parts


def run(specimen, model, x):
    with torch.no_grad():
        return specimen.run(model["layer"], x)


def is_refused(why, call):
    """Whether it should be refused; then it is, in these words."""
    if why is not None:
        with pytest.raises(rg.RegardError, match=why):
            call()
    return why is not None


def assert_equal(found, exact):
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=0)


@pytest.mark.parametrize("small", [0, module_rerun.SMALL], ids=["run again", "small"])
def test_the_map_is_the_formula_and_the_output_is_unchanged(name, small, monkeypatch):
    monkeypatch.setattr(module_rerun, "SMALL", small)
    specimen, model, x, parts = made(name)

    def look():
        with rg.watch(model) as seen:
            return run(specimen, model, x), seen

    plain = run(specimen, model, x)
    with torch.no_grad():
        assert_equal(plain, parts.output(parts.weights()))
    if not is_refused(specimen.watch, look):
        output, seen = look()
        assert_identical(plain, output)
        assert len(seen) == 1 and not seen.missing
        assert_equal(seen[0].dense(), parts.weights())


def test_a_knocked_out_pair_is_a_masked_one(name):
    specimen, model, x, parts = made(name)
    head, query, key = PAIR

    def edited():
        with rg.edit(model, rg.KnockOut(rg.Where(heads=head, queries=query, keys=key))):
            return run(specimen, model, x)

    if not is_refused(specimen.edit, edited):
        with torch.no_grad():
            assert_equal(edited(), parts.output(parts.weights(PAIR)))


def test_a_gated_head_is_scaled(name):
    specimen, model, x, parts = made(name)
    gates = torch.linspace(0, 1, parts.query.shape[1]) if parts.query.shape[1] > 1 else torch.tensor([0.5])

    def gated():
        with rg.hf.gated(model, {"layer": gates}):
            return run(specimen, model, x)

    if not is_refused(specimen.gate, gated):
        with torch.no_grad():
            assert_equal(gated(), parts.output(parts.weights(), gates))


def test_a_pruned_head_is_gone(name):
    specimen, model, x, parts = made(name)
    before = copy.deepcopy(model.state_dict())
    if is_refused(specimen.prune, lambda: rg.prune(model, {"layer": [0]})):
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    else:
        rg.prune(model, {"layer": [0]})
        with torch.no_grad():
            kept = torch.arange(parts.query.shape[1]) > 0
            assert_equal(run(specimen, model, x), parts.output(parts.weights(), kept))


def test_no_mistake_is_found(name):
    specimen, model, *_ = made(name)
    report = rg.check(model["layer"])
    assert report.mistakes == () and report.ok is (True if specimen.mechanism else None), str(report)
    assert report.mechanism == specimen.mechanism
