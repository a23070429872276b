"""`pytest -n N` (tests/tools/workers.py): what many processes find is what one finds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
#: Two files: one whose tests share a process, a folder and a fixture, and one with a failure and a process that ends.
FILES = {
    "test_first": """
        import os, warnings, pytest
        processes, started = set(), []

        @pytest.fixture(scope="module")
        def server():
            started.append(1)
            yield
            started.append(-1)

        @pytest.mark.parametrize("number", range(4))
        def test_one_process(server, tmp_path, number):
            print("captured", number)
            processes.add(os.getpid())
            assert len(processes) == 1 and started == [1] and not list(tmp_path.iterdir())

        @pytest.mark.group("others")
        def test_a_fixture_has_ended():
            assert sum(started) == 0

        def test_a_warning():
            warnings.warn("seen")

        def test_skipped():
            pytest.skip("why")
    """,
    "test_second": """
        import os, pytest

        def test_wrong():
            print("printed words")
            assert {"a": 1} == {"a": 2}

        def test_that_ends_its_process():
            os._exit(7)

        @pytest.mark.group("others")
        def test_of_a_group(): pass

        def test_after_it(): pass
    """,
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork")
def test_many_processes_report_what_one_reports(tmp_path):
    for name, code in FILES.items():
        lines = code.splitlines()
        (tmp_path / f"{name}.py").write_text("\n".join(line[8:] for line in lines))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  group: of one worker\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-p", "workers"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, "-q", "-rA", "-n", "2"],
        cwd=tmp_path,
        env=variables | {"PYTHONPATH": str(TOOLS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    told = done.stdout
    assert done.returncode == 1, told + done.stderr
    assert "2 failed, 8 passed, 1 skipped, 1 warning" in told
    assert "printed words" in told and "captured 3" in told and "seen" in told and "Differing items" in told
    assert "the process of this test ended with status 7" in told
    assert "PASSED test_second.py::test_after_it" in told, "others run what its worker has left"
