"""One process in a folder, and signals that stop a training after it was saved."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from regard.base.errors import RegardError
from regard.lab.runs.guards import alone, stop_signals


def test_two_do_not_work_on_one_folder(tmp_path):
    with alone(tmp_path, "compare"), pytest.raises(RegardError, match="another process"), alone(tmp_path, "compare"):
        pass
    with alone(tmp_path, "compare"):
        pass


def test_the_lock_of_a_dead_process_is_none(tmp_path):
    code = "from pathlib import Path; from regard.lab.runs.guards import alone; "
    code += f"a = alone(Path({str(tmp_path)!r}), 'x'); a.__enter__(); "
    code += "import os, signal; print('held', flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    with process:
        with pytest.raises(RegardError, match="x: another process is working"), alone(tmp_path, "x"):
            pass
        process.kill()
    with alone(tmp_path, "x"):
        pass


def test_a_folder_that_nothing_came_of_is_taken_away_again(tmp_path):
    with pytest.raises(ZeroDivisionError), alone(tmp_path / "new", "train"):
        1 / 0  # noqa: B018
    assert not (tmp_path / "new").exists()
    with alone(tmp_path / "new", "train"):
        (tmp_path / "new" / "weights").touch()
    assert (tmp_path / "new" / "weights").exists()
    (tmp_path / "file").touch()
    with pytest.raises(RegardError, match="is a file"), alone(tmp_path / "file", "train"):
        pass


def test_signals_that_are_ignored_stay_so(heard_signals):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_signals(lambda *_: None) as numbers:
        assert set(numbers) == {signal.SIGINT, signal.SIGTERM}
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
