"""The recurrence: token by token, in chunks, and as weights, for every transition, against the definition."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from extras import needs_transformers
from regard.base.spans import Spans
from regard.engine.recurrent import Transport, recur, rows_of_steps
from regard.engine.recurrent import chunked as chunked_module
from regard.engine.recurrent import engine as engine_module
from regard.engine.recurrent import transport as transport_module
from regard.pieces.transition import GatedDelta, KimiDelta, Steps
from transports import NAMES, by_definition, drawn, steps_of

every_transition = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of 4 tokens and runs of two chunks, so that short sequences have many."""
    monkeypatch.setattr(chunked_module, "CHUNK", 4)
    monkeypatch.setattr(chunked_module, "RUN", 12)
    monkeypatch.setattr(transport_module, "CHUNK", 4)
    monkeypatch.setattr(transport_module, "RUN", 12)


@pytest.mark.parametrize(("J", "I"), [(21, 21), (21, 7), (21, 1), (3, 3), (1, 1), (8, 0), (0, 0)])
@every_transition
def test_outputs_are_the_weights_times_the_values(name, J, I):
    transition, q, k, v, tensors = drawn(name, J, I)
    steps = steps_of(transition, q, k, tensors)
    output, _ = recur(steps, v)
    torch.testing.assert_close(output, by_definition(steps) @ v)


@every_transition
def test_tokens_one_by_one_in_parts_and_at_once_agree(name, monkeypatch):
    transition, q, k, v, tensors = drawn(name, 19)
    whole, last = recur(steps_of(transition, q, k, tensors), v)
    for few, sizes in ((4, [1] * 19), (0, [1] * 19), (30, [19]), (4, [6, 0, 1, 12])):
        monkeypatch.setattr(engine_module, "FEW", few)
        outputs, state, start = [], None, 0
        for size in sizes:
            part = slice(start, start := start + size)
            here = {tensor: x[:, :, part] for tensor, x in tensors.items()}
            steps = steps_of(transition, q[:, :, part], k[:, :, part], here)
            output, state = recur(steps, v[:, :, part], state)
            outputs.append(output)
        torch.testing.assert_close(torch.cat(outputs, 2), whole)
        torch.testing.assert_close(state, last)


@every_transition
def test_any_rows_and_columns_of_weights(name):
    for I in (21, 6):
        transition, q, k, _, tensors = drawn(name, 21, I)
        steps = steps_of(transition, q, k, tensors)
        expected, transport = by_definition(steps).flatten(0, 1), Transport(steps)
        for rows in (torch.arange(I), torch.tensor([0]), torch.tensor([I // 2, I - 1])):
            for until in (0, 9):
                seen = torch.zeros(len(expected), len(rows), 24, dtype=torch.float64)
                for start, weights in transport.sweep(rows, until):
                    seen[:, :, start : start + 4] = weights
                assert not seen[:, :, 21:].any()
                torch.testing.assert_close(seen[:, :, until:21], expected[:, rows, until:])


@every_transition
def test_gradients_are_those_of_the_definition(name):
    """Of every tensor of the call and of the state before it; the definition is differentiated by autograd."""
    transition, q, k, v, tensors = drawn(name, 11)
    state = torch.randn(*q.shape[:2], q.shape[3], v.shape[3], dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (q, k, v, *tensors.values())]
    steps = steps_of(transition, q, k, tensors)
    output, last = recur(steps, v, state.requires_grad_())
    by_step, last_by_step = token_by_token(steps, v, state)
    found, expected = (
        torch.autograd.grad(o.sin().sum() + (s**2).sum(), [*leaves, state], retain_graph=True)
        for o, s in ((output, last), (by_step, last_by_step))
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("reads_before", [False, True])
@pytest.mark.parametrize("erasing", ["nothing", "its key", "another", "its key before", "another before"])
def test_every_form_of_a_transition(width, reads_before, erasing):
    """Those that no mechanism of the catalog has, too: outputs, weights and gradients."""
    torch.manual_seed(0)
    q, k, w, u, v = (torch.randn(1, 2, 11, n, dtype=torch.float64).requires_grad_() for n in (4, 4, 4, 4, 5))
    decay = -torch.rand(1, 2, 11, width, dtype=torch.float64)
    leaves = [q, k, v, decay.requires_grad_()] + [w] * (erasing != "nothing") + [u] * ("another" in erasing)
    steps = Steps(
        *(q, k),
        log_decay=decay,
        address=None if erasing == "nothing" else w,
        erase=u if "another" in erasing else None,
        reads_before=reads_before,
        erases_before="before" in erasing,
    )
    output, last = recur(steps, v)
    by_step, last_by_step = token_by_token(steps, v, torch.zeros(1, 2, 4, 5).double())
    torch.testing.assert_close(output, by_step)
    transport = Transport(steps)
    weights = torch.cat([part for _, part in transport.sweep(torch.arange(11), 0)][::-1], 2)[..., :11]
    torch.testing.assert_close(weights, by_definition(steps).detach().flatten(0, 1))
    found, expected = (
        torch.autograd.grad(o.sin().sum() + s.sum(), leaves, retain_graph=True)
        for o, s in ((output, last), (by_step, last_by_step))
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


@every_transition
def test_activation_checkpointing_gives_the_same_gradients(name):
    transition, q, k, v, tensors = drawn(name, 21)
    leaves = [t.requires_grad_() for t in (q, k, v, *tensors.values())]

    def layer(q, k, v, *others):
        return recur(steps_of(transition, q, k, dict(zip(tensors, others, strict=True))), v)[0]

    along = torch.randn_like(v)
    found = torch.autograd.grad(checkpoint(layer, *leaves, use_reentrant=False), leaves, along)
    for one, other in zip(found, torch.autograd.grad(layer(*leaves), leaves, along), strict=True):
        torch.testing.assert_close(one, other)


@every_transition
def test_the_default_device_of_torch_does_not_matter(name):
    """Indices of the host stay on the host."""
    transition, q, k, _, tensors = drawn(name, 21)
    steps = steps_of(transition, q.requires_grad_(), k, tensors)
    with torch.device("meta"):
        weights = rows_of_steps(steps, torch.tensor([2, 9, 20], device="cpu"), Spans.of((0, 21)))
        few = Transport(steps.detach()).few_rows(torch.tensor([2, 9], device="cpu"), 0)
        weights.sum().backward()
    expected = by_definition(steps)
    torch.testing.assert_close(weights, expected[:, :, [2, 9, 20]])
    assert few is None or few.device.type == "cpu"


def token_by_token(steps, v, state):
    """S_t and o_t in the order of time."""
    outputs = []
    for t in range(v.shape[2]):
        before = state
        state = state if steps.log_decay is None else state * steps.log_decay[:, :, t, :, None].exp()
        new = state + steps.key[:, :, t, :, None] * v[:, :, t, None]
        if steps.address is not None:
            erase = steps.key if steps.erase is None else steps.erase
            found = steps.address[:, :, t, None] @ (before if steps.erases_before else state)
            new = new - erase[:, :, t, :, None] * found
        state = new
        output = (steps.query[:, :, t, None] @ (before if steps.reads_before else state))[:, :, 0]
        outputs.append(output if steps.own is None else output + steps.own[:, :, t, None] * v[:, :, t])
    return torch.stack(outputs, 2), state


@pytest.mark.parametrize("strength", [0.01, 60.0, torch.inf])
@pytest.mark.parametrize("name", ["decay", "gla", "rwkv_6", "gated_deltanet", "kimi_delta"])
def test_strong_decays_neither_overflow_nor_lose_weak_ones(name, strength, monkeypatch):
    """In float32, with strong decays between weak ones, as a document that ends; chunks of the usual size."""
    monkeypatch.undo()
    transition, q, k, v, tensors = drawn(name, 150)
    decay = tensors["log_decay"]
    decay.mul_(0.01)[:, :, 5::17] = -strength
    decay[:, 0] = -strength
    if "beta" in tensors:
        tensors["beta"][:, 1] = 2.0
    exact, _ = token_by_token(steps_of(transition, q, k, tensors), v, torch.zeros(2, 3, 4, 5).double())
    single = [x.float().requires_grad_() for x in (q, k, v, *tensors.values())]
    named = dict(zip(tensors, single[3:], strict=True))
    output, state = recur(steps_of(transition, single[0], single[1], named), single[2])
    torch.testing.assert_close(output.double(), exact, rtol=1e-4, atol=1e-5 * float(exact.abs().max()))
    grads = torch.autograd.grad(output.square().sum() + state.sum(), single)
    assert all(torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("name", ["ssd", "kimi_delta"])
def test_the_dtype_of_the_inputs_is_that_of_no_state(name):
    transition, q, k, v, tensors = drawn(name, 40)
    exact, _ = recur(steps_of(transition, q, k, tensors), v)
    for dtype in (torch.bfloat16, torch.float16):
        q_, k_, v_, *rest = (x.to(dtype) for x in (q, k, v, *tensors.values()))
        output, state = recur(steps_of(transition, q_, k_, dict(zip(tensors, rest, strict=True))), v_)
        assert state.dtype == torch.float32
        assert (output.double() - exact).abs().max() < 0.1 * exact.abs().max()


def test_strides_do_not_matter():
    transition, q, k, v, tensors = drawn("kimi_delta", 9)
    expected, _ = recur(steps_of(transition, q, k, tensors), v)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    assert torch.equal(recur(steps_of(transition, q, k, tensors), v)[0], expected)


def test_an_expanded_state_gets_the_gradient_of_all_heads():
    transition, q, k, v, tensors = drawn("gated_deltanet", 6)
    state = torch.zeros((), dtype=torch.float64)
    output, last = recur(steps_of(transition, q, k, tensors), v, state)
    torch.testing.assert_close(output, recur(steps_of(transition, q, k, tensors), v)[0])
    assert last.shape == (2, 3, 4, 5)


@needs_transformers("5.23", "the function has these arguments")
def test_against_transformers_gated_delta_rule():
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 70, 3, 8)
    g, beta = -torch.rand(2, 70, 3), torch.rand(2, 70, 3)
    ours = [x.transpose(1, 2) for x in (q, k, v, g, beta)]
    steps = _scaled(GatedDelta(), *ours[:2], log_decay=ours[3], beta=ours[4])
    output, state = recur(steps, ours[2])
    for function in (module.torch_recurrent_gated_delta_rule, module.torch_chunk_gated_delta_rule):
        theirs, last = function(q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
        torch.testing.assert_close(output, theirs.transpose(1, 2), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)
    weights = by_definition(steps)
    assert (weights < 0).float().mean() > 0.1


def test_against_transformers_kimi_delta():
    module = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 70, 3, 8)
    g, beta = -torch.rand(2, 70, 3, 8), torch.rand(2, 70, 3)
    ours = [x.transpose(1, 2) for x in (q, k, v, g, beta)]
    output, state = recur(_scaled(KimiDelta(), *ours[:2], log_decay=ours[3], beta=ours[4]), ours[2])
    theirs, last = module.recurrent_kimi_delta_attention(
        q, k, v, g, beta, initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(output, theirs.transpose(1, 2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)


def _scaled(transition, q, k, **tensors) -> Steps:
    q, k = transition.normalized(q, k)
    return transition.prepare(q * q.shape[-1] ** -0.5, k, **tensors)
