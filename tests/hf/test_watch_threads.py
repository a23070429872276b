"""A watch sees the calls of its own thread, whatever other threads watch or run meanwhile."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_modules
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import AttentionInterface

import regard as rg
from extras import needs_transformers
from miniatures import BERT, sharpened
from regard.base.versions import backend_lookup

C, H, SECONDS = 8, 2, 20
#: The method that finds backends.
LOOKUP = backend_lookup()[1]


class Attention(nn.Module):
    """One way to compute attention; `between` runs before it and after it."""

    def __init__(self, between=lambda: None):
        super().__init__()
        self.mix, self.between = nn.Linear(C, 3 * C), between

    def forward(self, x):
        self.between()
        q, k, v = self.mix(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        output = self.attended(q, k, v).transpose(1, 2).flatten(2)
        self.between()
        return output


class ByAttend(Attention):
    def attended(self, q, k, v):
        return rg.Attention()(q, k, v).output


class ByTorch(Attention):
    def attended(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class SoftmaxAttention(Attention):
    def attended(self, q, k, v):
        return (q @ k.mT / 2).softmax(-1) @ v


class Around(nn.Module):
    """A module between two calls of `between`."""

    def __init__(self, inner, between=lambda: None):
        super().__init__()
        self.inner, self.between = inner, between

    def forward(self, x):
        self.between()
        output = self.inner(x, x, x)[0] if isinstance(self.inner, nn.MultiheadAttention) else self.inner(x)
        output = getattr(output, "output", output)
        self.between()
        return output


def by_transformers(between=lambda: None):
    config = transformers.BertConfig(**BERT | {"hidden_size": C, "num_attention_heads": H, "num_hidden_layers": 1})
    model = sharpened(transformers.BertModel._from_config(config, attn_implementation="sdpa").eval())

    class Embedded(nn.Module):
        def forward(self, x):
            return model(inputs_embeds=x).last_hidden_state

    embedded = Embedded()
    embedded.model = model
    return Around(embedded, between)


KINDS = {
    "attend": ByAttend,
    "F.scaled_dot_product_attention": ByTorch,
    "softmax": SoftmaxAttention,
    "nn.MultiheadAttention": lambda between=lambda: None: Around(
        nn.MultiheadAttention(C, H, batch_first=True), between
    ),
    "regard.nn": lambda between=lambda: None: Around(rg.nn.MultiHeadAttention(C, H), between),
    "transformers": by_transformers,
}


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = getattr(AttentionInterface, LOOKUP)
    yield
    assert getattr(AttentionInterface, LOOKUP) is before
    assert not torch_modules._global_forward_hooks and not torch_modules._global_forward_pre_hooks
    assert not rg.nn.listeners


def run_at_once(*jobs):
    """What the jobs return, each in a thread of its own."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(SECONDS) for future in [pool.submit(job) for job in jobs]]


def shapes(seen):
    return [tuple(weights.shape) for name in seen.names for weights in seen.calls(name)]


def kept_apart(models, first_to_leave):
    """Two threads that watch: their calls overlap, then one leaves and the other calls again."""
    entered, ran, left = threading.Barrier(2), threading.Barrier(2), threading.Event()

    def job(number):
        x = torch.randn(1, 3 + number, C)
        with rg.watch(models[number]) as seen:
            entered.wait(SECONDS)
            output = models[number](x)
            ran.wait(SECONDS)
            if number != first_to_leave:
                assert left.wait(SECONDS)
                models[number].between = lambda: None
                models[number](x)
        left.set()
        return x, output, seen

    return run_at_once(lambda: job(0), lambda: job(1))


@pytest.mark.parametrize("first_to_leave", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_that_watch_at_once(kind, first_to_leave):
    inside = threading.Barrier(2)
    models = [KINDS[kind](lambda: inside.wait(SECONDS)).eval() for _ in range(2)]
    found = kept_apart(models, first_to_leave)
    for number, (model, (x, output, seen)) in enumerate(zip(models, found, strict=True)):
        length = 3 + number
        assert shapes(seen) == [(1, H, length, length)] * (1 if number == first_to_leave else 2)
        assert not seen.missing
        model.between = lambda: None
        with rg.watch(model) as alone:
            torch.testing.assert_close(output, model(x), rtol=0, atol=0)
        torch.testing.assert_close(seen.calls(0)[0].dense(), alone[0].dense(), rtol=0, atol=0)


@pytest.mark.parametrize("first_to_leave", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_that_watch_one_model(kind, first_to_leave):
    inside = threading.Barrier(2)
    model = KINDS[kind](lambda: inside.wait(SECONDS)).eval()
    found = kept_apart([model, model], first_to_leave)
    for number, (_, _, seen) in enumerate(found):
        length = 3 + number
        assert shapes(seen) == [(1, H, length, length)] * (1 if number == first_to_leave else 2)
        assert not seen.missing and len(seen) == 1


@pytest.mark.parametrize("first_to_leave", [0, 1])
def test_two_threads_that_enter_one_watch(first_to_leave):
    """Each thread ends its own block, whichever block began last."""
    model = ByTorch()
    watch, began, left = rg.watch(model), threading.Event(), threading.Event()
    entered = threading.Barrier(2)

    def job(number):
        assert number == 0 or began.wait(SECONDS)
        with watch as seen:
            began.set()
            entered.wait(SECONDS)
            if number != first_to_leave:
                assert left.wait(SECONDS)
            model(torch.randn(1, 3 + number, C))
        model(torch.randn(1, 7, C))
        left.set()
        return shapes(seen)

    assert run_at_once(lambda: job(0), lambda: job(1)) == [[(1, H, n, n)] for n in (3, 4)]


def test_a_watch_that_another_thread_ends_sees_no_more_calls():
    model, x = ByTorch(), torch.randn(1, 3, C)
    watch = rg.watch(model)
    seen = watch.__enter__()
    model(x)
    run_at_once(lambda: watch.__exit__(None, None, None))
    model(x)
    assert shapes(seen) == [(1, H, 3, 3)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_that_does_not_watch_is_neither_seen_nor_changed(kind):
    model = KINDS[kind]().eval()
    x, other = torch.randn(1, 3, C), torch.randn(1, 5, C)
    plain = model(other)
    with rg.watch(model) as seen:
        (output,) = run_at_once(lambda: model(other))
        model(x)
    torch.testing.assert_close(output, plain, rtol=0, atol=0)
    assert shapes(seen) == [(1, H, 3, 3)]


def test_a_model_that_ran_in_another_thread_only_is_missing_with_the_reason():
    model = ByAttend()
    with rg.watch(model) as seen:
        run_at_once(lambda: model(torch.randn(1, 3, C)))
    with pytest.raises(rg.RegardError, match="by the watching thread"):
        seen[0]


def test_a_thread_that_is_given_the_context_is_seen():
    model, x = ByAttend(), torch.randn(1, 3, C)
    with rg.watch(model) as seen:
        context = copy_context()
        run_at_once(lambda: context.run(model, x))
        asyncio.run(asyncio.to_thread(model, x))
    assert shapes(seen) == [(1, H, 3, 3)] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_threads_that_share_a_watch_are_told_apart(kind):
    """Two modules run at once, each in a thread with the context of the watch: no map has the name of the other."""
    inside = threading.Barrier(2)
    models = nn.ModuleDict({name: KINDS[kind](lambda: inside.wait(SECONDS)) for name in "ab"}).eval()
    with rg.watch(models, verify=False) as seen:
        jobs = [(copy_context(), models[name], torch.randn(1, n, C)) for name, n in (("a", 3), ("b", 4))]
        run_at_once(*(lambda job=job: job[0].run(*job[1:]) for job in jobs))
    assert not seen.missing
    assert {name[0]: [weights.shape[2] for weights in seen.calls(name)] for name in seen.names} == {"a": [3], "b": [4]}
    assert len(seen) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_one_module_that_runs_in_two_threads_of_a_watch(kind):
    inside = threading.Barrier(2)
    model = KINDS[kind](lambda: inside.wait(SECONDS)).eval()
    with rg.watch(model, verify=False) as seen:
        jobs = [(copy_context(), torch.randn(1, n, C)) for n in (3, 4)]
        run_at_once(*(lambda job=job: job[0].run(model, job[1]) for job in jobs))
    assert sorted(shapes(seen)) == [(1, H, n, n) for n in (3, 4)]


def test_a_context_that_outlives_the_block_is_not_seen():
    model, x = ByAttend(), torch.randn(1, 3, C)
    with rg.watch(model) as seen:
        model(x)
        context = copy_context()
    context.run(model, x)
    assert shapes(seen) == [(1, H, 3, 3)]


def test_tasks_of_asyncio_that_watch_in_turns():
    model = ByAttend()

    async def task(length):
        with rg.watch(model) as seen:
            for _ in range(2):
                model(torch.randn(1, length, C))
                await asyncio.sleep(0)
        return shapes(seen)

    async def both():
        return await asyncio.gather(task(3), task(4))

    assert asyncio.run(both()) == [[(1, H, n, n)] * 2 for n in (3, 4)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_nested_watches_of_one_thread_may_end_in_any_order(order):
    model = nn.Sequential(*(KINDS[kind]() for kind in KINDS)).eval()
    x = torch.randn(1, 3, C)
    watches = [rg.watch(model), rg.watch(model)]
    seen = [watch.__enter__() for watch in watches]
    model(x)
    watches[order[0]].__exit__(None, None, None)
    model(x)
    watches[order[1]].__exit__(None, None, None)
    model(x)
    for place, number in enumerate(order):
        assert {name: len(seen[number].calls(name)) for name in seen[number].names} == dict.fromkeys(
            seen[0].names, 1 + place
        )
    assert len(seen[0]) == len(KINDS)


def watch_between(running, done):
    """A watch of a module of torch in the time between two events."""
    model = ByTorch()
    assert running.wait(SECONDS)
    with rg.watch(model) as seen:
        model(torch.randn(1, 3, C))
    done.set()
    return seen


def test_attend_that_runs_in_one_thread_hides_no_call_of_another():
    """While `attend` runs, what it asks of torch is not heard; in the other thread it is."""
    running, done = threading.Event(), threading.Event()

    def slow(q, k, b, h):
        running.set()
        return (q >= k) & done.wait(SECONDS)

    def attends():
        x = torch.randn(1, H, 4, 4)
        rg.Attention(mask=rg.mask_mod(slow))(x, x, x, engine="dense")

    _, seen = run_at_once(attends, lambda: watch_between(running, done))
    assert shapes(seen) == [(1, H, 3, 3)]


@needs_transformers("5.1", "BERT calls the attention interface")
def test_a_backend_that_runs_in_one_thread_hides_no_call_of_another(monkeypatch):
    running, done = threading.Event(), threading.Event()
    sdpa = transformers.AttentionInterface()["sdpa"]

    def slow(*args, **options):
        running.set()
        assert done.wait(SECONDS)
        return sdpa(*args, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", slow)

    def waits():
        model = by_transformers()
        with rg.watch(model, verify=False) as seen:
            model(torch.randn(1, 4, C))
        return seen

    waited, seen = run_at_once(waits, lambda: watch_between(running, done))
    assert shapes(seen) == [(1, H, 3, 3)] and shapes(waited) == [(1, H, 4, 4)]


def test_listeners_of_modules_belong_to_their_thread():
    module, told = rg.nn.MultiHeadAttention(C, H), []

    class Keeps:
        def on_attention(self, module, weights):
            told.append(weights.shape[2])

    with rg.nn.listeners.to(Keeps()):
        run_at_once(lambda: module(torch.randn(1, 5, C)), lambda: bool(rg.nn.listeners))
        module(torch.randn(1, 3, C))
    assert told == [3]


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(inner, nn.Linear(C, C)), reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_what_checkpointing_computes_again_is_no_second_call(kind, reentrant):
    model, x = Checkpointed(KINDS[kind](), reentrant), torch.randn(1, 3, C, requires_grad=True)
    with rg.watch(model, keep="statistics", verify=False) as seen:
        model(x).sum().backward()
    assert x.grad is not None
    (name,) = seen.names
    assert seen.statistics[name].of(rg.maps.Entropy).shape == (1, H, 3)
    with rg.watch(model, verify=False) as seen:
        model(x).sum().backward()
    assert shapes(seen) == [(1, H, 3, 3)]
