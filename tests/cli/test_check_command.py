"""`regard check`, its time limit, and its progress."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import regard as rg
from attentions import by_matmul
from regard.cli.app import app
from warm import environment
from wrong_attentions import no_scale


def endless(q, k, v):
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            raise AssertionError("the limit is no error of the function") from None


def test_the_time_limit_ends_a_call_that_does_not_return():
    handler = signal.getsignal(signal.SIGALRM)
    with pytest.raises(rg.RegardError, match=r"stopped after \d s, at the check 'arguments and axes': a call has not"):
        rg.check(endless, limit=0.5)
    assert signal.getsignal(signal.SIGALRM) is handler and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_the_time_limit_says_what_was_found_and_how_to_raise_it(monkeypatch):
    """From the check of gradients on, the clock goes 3 s further at each call."""
    now, checks = [0.0], [""]
    monkeypatch.setattr("regard.diagnosis.progress.time", SimpleNamespace(monotonic=lambda: now[0]))

    def slow(q, k, v):
        now[0] += 3.0 * (checks[-1] == "gradient")
        return no_scale(q, k, v)

    with pytest.raises(rg.RegardError, match=r"at the check 'gradient': \d+ calls took") as error:
        rg.check(slow, limit=10, progress=lambda check, *rest: checks.append(check))
    assert "Found so far: the scores are not scaled; " in str(error.value) and "limit=600" in str(error.value)


def test_the_time_is_checked_between_calls_in_other_threads():
    errors = []

    def in_thread():
        try:
            rg.check(lambda q, k, v: (time.sleep(0.2), by_matmul(q, k, v))[1], limit=0.5)
        except rg.RegardError as error:
            errors.append(str(error))

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert "stopped after" in errors[0]


@pytest.mark.parametrize("limit", [0, -1.0])
def test_a_limit_that_is_no_time_is_refused(limit):
    with pytest.raises(rg.RegardError, match="seconds"):
        rg.check(by_matmul, limit=limit)


def test_the_progress_has_the_running_check_and_the_findings():
    told = []
    report = rg.check(no_scale, limit=None, progress=lambda *state: told.append(state))
    checks = list(dict.fromkeys(check for check, _, _ in told))
    assert checks[:3] == ["arguments and axes", "precision", "weights"] and {"mask", "gradient", "speed"} <= {*checks}
    assert [calls for _, calls, _ in told] == sorted(calls for _, calls, _ in told) and told[-1][1] > 100
    assert told[-1][2] == report.findings


def run(*arguments):
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import math\nfrom helper import root\n"
        "def right(q, k, v):\n    return (q @ k.mT / root(q.shape[-1])).softmax(-1) @ v\n"
        "def wrong(q, k, v):\n    return (q @ k.mT).softmax(-1) @ v\n"
    )
    (tmp_path / "helper.py").write_text("def root(x):\n    return x ** 0.5\n")
    return path


def test_the_command_exits_with_1_if_there_is_a_mistake(file):
    right, wrong = run(f"{file}:right"), run(f"{file}:wrong")
    assert (right.exit_code, wrong.exit_code) == (0, 1)
    assert "right: no mistake found" in right.stdout and "the scores are not scaled" in wrong.stdout
    assert run(f"{file}:wrong", "--scale", "1").exit_code == 0


def test_the_command_prints_json(file):
    told = json.loads(run(f"{file}:wrong", "--json").stdout)
    assert told["ok"] is False and told["mechanism"] == "luong_dot"
    assert told["mistakes"] == ["the scores are not scaled"]
    scale = next(finding for finding in told["findings"] if finding["what"] == "scale")
    assert scale["verdict"] == "wrong" and scale["mistake"] == "the scores are not scaled" and scale["remedy"]


def test_a_target_that_is_not_there_is_one_line(file):
    for target, said in (
        (f"{file}:rigth", "Did you mean 'right'"),
        (f"{file.parent}/none.py:f", "there is no file"),
        ("mine", "is not FILE.py:NAME"),
    ):
        result = run(target)
        assert result.exit_code == 2 and said in result.stderr and "Traceback" not in result.output
    file.write_text("1 / 0\n")
    assert "ZeroDivisionError" in run(f"{file}:right").stderr


def test_the_command_has_a_time_limit(file):
    file.write_text("import time\ndef endless(q, k, v):\n    while True: time.sleep(0.01)\n")
    result = run(f"{file}:endless", "--limit", "0.5")
    assert result.exit_code == 2 and "stopped after" in result.stderr and "--limit" in result.stderr


def test_ctrl_c_says_what_was_found_so_far(file):
    """The function itself presses Ctrl-C in a late call."""
    file.write_text(
        "calls = []\ndef wrong(q, k, v):\n    calls.append(1)\n    if len(calls) > 150: raise KeyboardInterrupt\n"
        "    return (q @ k.mT).softmax(-1) @ v\n"
    )
    result = run(f"{file}:wrong")
    assert result.exit_code == 130 and "Traceback" not in result.output
    assert "at the check" in result.stderr and "the scores are not scaled" in result.stderr


def test_a_terminal_shows_the_running_check(file, commands):
    """In a pseudo-terminal, while a call does not return."""
    file.write_text("import time\ndef slow(q, k, v):\n    time.sleep(2.5)\n    return q + k + v\n")
    master, slave = pty.openpty()
    command = [commands / "regard", "check", f"{file}:slow", "--limit", "2"]
    variables = environment(commands) | {"TERM": "xterm"}
    process = subprocess.Popen(command, stderr=slave, stdout=subprocess.DEVNULL, env=variables)
    os.close(slave)
    written = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(master, 4096):
            written += part
    assert process.wait(60) == 2
    assert b"check: arguments and axes, call 1 of about" in written and b"0:00:01" in written, written
