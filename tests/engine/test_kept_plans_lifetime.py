"""Kept plans hold no tensor of a call, and threads and forked processes use them safely."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest

import regard as rg
from plan_calls import LEARNED, anew, assert_equal, inputs, results
from regard.engine import kept_plans as kept_plans_file
from regard.engine.kept_plans import kept_plans


@pytest.mark.parametrize("name", ["table", "sink", "additive"])
def test_kept_plans_hold_no_tensor_of_a_call(name):
    attention, tensors = LEARNED[name](), inputs(30, 30, 30, grad=True)
    seen = attention(*tensors)
    seen.output.sum().backward()
    seen = attention(*tensors)
    assert len(kept_plans) == 1
    watched = [weakref.ref(t) for t in (*tensors, *attention.parameters(), seen.output)]
    del attention, tensors, seen
    gc.collect()
    assert not [ref() for ref in watched if ref() is not None]


def test_memory_is_released_without_the_collector():
    attention, tensors = rg.Attention(mask=rg.causal()), inputs(200, 200, 200)
    gc.disable()
    try:
        for _ in range(2):
            seen = attention(*tensors)
        watched = [weakref.ref(t) for t in (*tensors, seen.output)]
        del tensors, seen
        assert not [ref() for ref in watched if ref() is not None]
    finally:
        gc.enable()


def test_threads_share_plans(monkeypatch):
    monkeypatch.setattr(kept_plans_file, "MOST_PLANS", 6)
    attention, sizes = rg.Attention(mask=rg.causal(), bias=rg.ALiBi(2)), range(20, 36)
    cases = {n: inputs(n, n, n) for n in sizes}
    expected, wrong = {n: anew(attention, case) for n, case in cases.items()}, []

    def work(first):
        try:
            for turn in range(40):
                n = sizes[(first + turn * 7) % len(sizes)]
                assert_equal(results(attention, cases[n]), expected[n])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(kept_plans) <= 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="only where processes fork")
@pytest.mark.filterwarnings("ignore:os.fork")  # of packages with threads, if another test imported one
def test_a_forked_process_keeps_plans():
    attention, tensors = rg.Attention(mask=rg.causal()), inputs(9, 9, 9)
    results(attention, tensors)
    with kept_plans._lock:  # as another thread may hold it at the fork
        child = os.fork()
        if not child:
            attention(*tensors)
            attention(*inputs(4, 4, 4))
            os._exit(0 if len(kept_plans) == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
