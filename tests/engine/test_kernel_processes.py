"""The kernel engine beside threads, forks and Ctrl-C, and what it reads and writes of memory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import regard as rg
from kernels import LEVELS, VARIANTS, at_level, every_level, needs_kernel
from regard.engine.kernel import running
from warm import environment

pytestmark = needs_kernel
TOOLS = Path(__file__).parents[1] / "tools"
posix = pytest.mark.skipif(os.name != "posix", reason="forks, signals and protected pages of POSIX")
#: Problems whose work is worth three threads, forward and backward: (sizes, pieces).
LARGE = {
    "plain": ((1, 2, 2, 400, 400, 32, 48), lambda: {}),
    "shared keys": (
        (1, 4, 1, 300, 300, 64, 64),
        lambda: {"mask": rg.causal(), "normalizer": rg.normalizers.LearnedSink(4)},
    ),
    "additive": ((1, 2, 1, 300, 300, 16, 16), lambda: {"score": rg.scores.Additive(16, 16, 64), "mask": rg.causal()}),
    "entries": ((3, 2, 2, 400, 400, 32, 32), lambda: {"mask": rg.padding([400, 7, 350])}),
    "biases": (
        (2, 2, 2, 300, 260, 32, 32),
        lambda: {"bias": (rg.biases.T5Bias(2), rg.biases.Softcap(3.0)), "mask": rg.masks.dilated(90, 2)},
    ),
}


@pytest.fixture
def threads():
    """Sets the number of threads of torch; the number before comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


WAYS = ("team", "pool")


def use(way, monkeypatch):
    """Run the shares on the threads of torch's OpenMP runtime, or on a pool of Python; lists the numbers of threads."""
    if way == "team" and running._openmp() is None:
        pytest.skip("torch's threads are not those of libgomp here")
    if way == "pool":
        monkeypatch.setattr(running, "_openmp", lambda: None)
    numbers, starts = [], getattr(running, f"_in_{way}")

    def start(*arguments):
        numbers.append(next(each for each in arguments if isinstance(each, running.Workspace)).num_threads)
        starts(*arguments)

    monkeypatch.setattr(running, f"_in_{way}", start)
    return numbers


def problem(name):
    (B, H, G, I, J, D, E), pieces = LARGE[name]
    torch.manual_seed(0)
    tensors = torch.randn(B, H, I, D), torch.randn(B, G, J, D), torch.randn(B, G, J, E)
    return rg.Attention(**pieces()), [t.requires_grad_() for t in tensors], torch.randn(B, H, I, E)


def results(attention, tensors, along):
    """Output, log-sum-exp and gradients."""
    seen = attention(*tensors, engine="kernel")
    gradients = torch.autograd.grad(seen.output, [*tensors, *attention.parameters()], along)
    return [seen.output, seen.weights.row_statistic[0], *gradients]


def equal(one, other):
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@every_level
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LARGE)
def test_results_do_not_depend_on_the_number_of_threads(name, way, level, threads, monkeypatch):
    started = use(way, monkeypatch)
    case, found = problem(name), []
    for number in (1, 2, 3, 3):
        threads(number)
        with at_level(level):
            found.append(results(*case))
    assert started == [2] * 2 + [3] * 4  # forward and backward, and 3 threads twice
    assert all(equal(each, found[0]) for each in found[1:])


@pytest.mark.parametrize("way", WAYS)
def test_two_threads_of_python_may_call_at_once(way, threads, monkeypatch):
    use(way, monkeypatch)
    threads(2)
    cases = [problem(name) for name in LARGE] * 3
    alone = [results(*case) for case in cases]
    with ThreadPoolExecutor(4) as callers:
        together = list(callers.map(lambda case: results(*case), cases))
    assert all(equal(one, other) for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize("num_earlier_calls", [0, 1])
def test_an_interrupted_call_leaves_its_memory_to_the_threads_that_still_compute(
    num_earlier_calls, threads, monkeypatch
):
    """After Ctrl-C in one thread the others go on for a moment: they must not write into memory that is used again."""
    threads(2)
    caught, resume, share = [], threading.Event(), running._share

    def interrupted(function, call, memory, more):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        resume.wait(30)
        caught.append([(t.data_ptr(), t.clone()) for t in call.tensors])
        share(function, call, memory, more)
        caught.append([(t.data_ptr(), t) for t in call.tensors])

    use("pool", monkeypatch)  # the threads of OpenMP are not interrupted: the call returns first
    monkeypatch.setattr(running, "_share", interrupted)
    attention, tensors, _ = problem("plain")
    tensors = [t.detach().requires_grad_(num_earlier_calls == 0) for t in tensors]
    with monkeypatch.context() as finished:
        finished.setattr(running, "_share", share)
        for _ in range(num_earlier_calls):  # a later call repeats the plan of the first
            attention(*tensors, engine="kernel")
    with pytest.raises(KeyboardInterrupt):
        attention(*tensors, engine="kernel")
    del tensors
    rubbish = [torch.full((1 << 18,), 7.0) for _ in range(50)]  # takes what was freed
    resume.set()
    running._pool(2).shutdown()
    running._pools.clear()
    before, after = caught
    assert [place for place, _ in before] == [place for place, _ in after]
    assert all(bool((x == 7).all()) for x in rubbish)
    monkeypatch.undo()
    expected = attention(*problem("plain")[1], engine="kernel").output
    assert any(torch.equal(t, expected) for _, t in after if t.shape == expected.shape)
    assert any(t.shape == expected.shape[:3] for _, t in after), "the log-sum-exp is written too"


@pytest.fixture
def run_python(commands):
    """Run Python in a process of its own, as a user would."""

    def run(*arguments, timeout=60):
        own = environment(commands)
        own["PYTHONPATH"] += f"{os.pathsep}{TOOLS}"
        command = [commands / "python", *arguments]
        return subprocess.run(command, env=own, capture_output=True, text=True, timeout=timeout)

    return run


SETUP = """
import os, signal, sys, threading, time
import torch, regard as rg
torch.set_num_threads(2)
q, k, v = (torch.randn(1, 4, 512, 64, requires_grad=True) for _ in range(3))
def call():
    output = rg.Attention(mask=rg.causal())(q, k, v, engine="kernel").output
    return [output, *torch.autograd.grad(output.sum(), (q, k, v))]
expected = call()
same = lambda found: all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
"""


@posix
def test_a_forked_child_calls_again(run_python):
    """The threads of the parent do not exist in the child, which starts its own."""
    done = run_python(
        "-c",
        SETUP
        + """
child = os.fork()
if child == 0:
    torch.set_num_threads(1)  # torch's own threads do not survive a fork
    from regard.engine.kernel import running
    torch.get_num_threads = lambda: 2
    os._exit(0 if same(call()) and len(running._pools) == 1 else 3)
deadline = time.monotonic() + 30
while time.monotonic() < deadline:
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        break
    time.sleep(0.01)
else:
    os.kill(child, signal.SIGKILL)
    sys.exit("the child hangs")
assert os.waitstatus_to_exitcode(status) == 0, status
assert same(call())
""",
    )
    assert done.returncode == 0, done.stderr


@posix
def test_control_c_ends_a_call_and_the_next_one_is_right(run_python):
    done = run_python(
        "-c",
        SETUP
        + """
main = os.getpid()
for delay in (0.0, 0.001, 0.003, 0.01, 0.03):
    try:
        threading.Timer(delay, lambda: os.kill(main, signal.SIGINT)).start()
        while True:
            call()
    except KeyboardInterrupt:
        pass
    assert same(call())
print("right")
""",
    )
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


def test_a_thread_may_call_after_the_main_thread_has_ended(run_python):
    """Python starts no threads any more then, so the calling thread computes every share."""
    done = run_python(
        "-c",
        SETUP
        + """
def later():
    threading.main_thread().join()
    time.sleep(0.2)
    print("right" if same(call()) else "wrong")
threading.Thread(target=later).start()
""",
    )
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


@posix
def test_nothing_outside_of_a_tensor_is_read_or_written(run_python):
    done = run_python(TOOLS / "kernel_guards.py", *VARIANTS, timeout=120)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), f"{done.stdout[-300:]}{done.stderr[-2000:]}"
    sources = "".join(path.read_text() for path in (TOOLS.parents[1] / "kernels").glob("*.c"))
    assert done.stdout.splitlines()[-2].split() == sorted(re.findall(r"EXPORT void NAMED\((\w+)\)", sources))


@posix
def test_the_guards_see_a_key_too_many(run_python):
    done = run_python(TOOLS / "kernel_guards.py", LEVELS[0], "--short", timeout=120)
    assert done.returncode == -signal.SIGSEGV and "done" not in done.stdout
