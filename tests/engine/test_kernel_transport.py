"""Few rows of weights of recurrent layers by the compiled kernels: those of the definition, in every layout."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from kernels import every_level, needs_kernel
from regard.engine.kernel import transport as kernel_transport
from regard.engine.recurrent import Transport
from regard.engine.recurrent import transport as transport_module
from regard.maps.transported_map import TransportedMap
from regard.pieces.transition import Steps
from transports import NAMES, by_definition, drawn, steps_of

pytestmark = needs_kernel


def decays_by_one_number(name):
    transition, q, k, _, tensors = drawn(name, 1)
    steps = steps_of(transition, q, k, tensors)
    return steps.log_decay is None or steps.log_decay.shape[3] == 1


SCALAR = list(filter(decays_by_one_number, NAMES))


def single(steps, layout=lambda x: x):
    return steps.with_tensors(layout(x.float()) for x in steps.tensors())


@every_level
@pytest.mark.parametrize("name", SCALAR)
def test_few_rows_are_those_of_the_definition(name, level, monkeypatch):
    monkeypatch.setenv("REGARD_KERNEL", level)
    for J, I in ((70, 70), (70, 9), (1, 1)):
        transition, q, k, _, tensors = drawn(name, J, I)
        steps = steps_of(transition, q, k, tensors)
        exact = by_definition(steps)
        for layout in (lambda x: x, lambda x: x.mT.contiguous().mT if x.ndim == 4 else x):
            transport = Transport(single(steps, layout))
            for rows in (torch.arange(min(I, 9)), torch.tensor([I - 1]), torch.tensor([0, I // 2])[: 1 + (I > 1)]):
                for until in (0, J // 2):
                    found = transport.few_rows(rows, until)
                    torch.testing.assert_close(
                        found[..., until:].double(), exact[:, :, rows, until:], rtol=1e-4, atol=1e-5
                    )


@every_level
def test_wide_keys(level, monkeypatch):
    monkeypatch.setenv("REGARD_KERNEL", level)
    torch.manual_seed(0)
    q, k, w = torch.randn(3, 1, 2, 40, 37).double().unbind(0)
    steps = Steps(q, k / 12, log_decay=-torch.rand(1, 2, 40, 1).double(), address=w / 12)
    found = Transport(single(steps)).few_rows(torch.tensor([3, 39]), 0)
    torch.testing.assert_close(found.double(), by_definition(steps)[:, :, [3, 39]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strength", [1.0, 60.0, torch.inf])
def test_weights_behind_strong_decays_are_zero(strength):
    """Queries that have decayed to 0 end the pass; a decay of 0 hides what is before it."""
    transition, q, k, _, tensors = drawn("gated_deltanet", 300)
    tensors["log_decay"].mul_(0.01)[:, :, 100:200:20] = -strength
    steps = steps_of(transition, q, k, tensors)
    found = Transport(single(steps)).few_rows(torch.tensor([99, 250, 299]), 0)
    exact = TransportedMap.of_steps(steps).tile(rows=torch.tensor([99, 250, 299]))
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-6)
    assert found[:, :, 0, :100].any()
    assert strength < torch.inf or not found[:, :, 1:, :180].any()


def test_a_row_of_a_map_needs_no_factors(monkeypatch):
    """Many rows do, and give the same weights."""
    transition, q, k, v, tensors = drawn("gated_deltanet", 80)
    attention = rg.Attention(transition=transition)
    single = [x.float() for x in (q, k, v)], {name: x.float() for name, x in tensors.items()}
    weights = attention(*single[0], **single[1]).weights
    row, tile, part = weights[1, 2, 50], weights.tile(rows=[9, 3, 9], cols=[7, 1]), weights.select(0, 1)[0, 0, 60]
    assert "factors" not in vars(weights.transport)
    dense = weights.dense()
    assert "factors" in vars(weights.transport)
    for found, expected in (
        (row, dense[1, 2, 50]),
        (tile, dense[:, :, [9, 3, 9]][..., [7, 1]]),
        (part, dense[0, 1, 60]),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(kernel_transport.Library, "has", lambda self, name: False)  # a library of an earlier build
    torch.testing.assert_close(weights[1, 2, 50], row, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(SCALAR)))
def test_other_transitions_run_in_torch(name):
    transition, q, k, _, tensors = drawn(name, 9)
    assert Transport(single(steps_of(transition, q, k, tensors))).few_rows(torch.tensor([3]), 0) is None


def test_what_the_kernel_does_not_compute_runs_in_torch():
    transition, q, k, _, tensors = drawn("gated_deltanet", 40)
    steps = steps_of(transition, q, k, tensors)
    many = torch.arange(transport_module.MOST_ROWS + 1)
    assert Transport(steps).few_rows(many[:2], 0) is None, "float64"
    assert Transport(single(steps)).few_rows(many, 0) is None
    assert Transport(single(steps)).few_rows(many[:0], 0) is None
    assert Transport(single(steps)).few_rows(many[1:], 0) is not None
