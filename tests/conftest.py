"""What every test runs under: an empty home, signals as in a terminal, poisoned memory, and a count of the laws."""

from __future__ import annotations

import os
import signal
import tempfile
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, register_random, settings

from regard.engine.kept_plans import kept_plans
from warm import end_server, warm_commands

pytest_plugins = ["extras"]
# No test reads what a developer's machine holds.
CACHES = ("REGARD_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "HF_HOME", "HF_HUB_CACHE", "TORCH_HOME")
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers have the home of the process that started them
    EMPTY, WARM = (tempfile.TemporaryDirectory(prefix=name, ignore_cleanup_errors=True) for name in ("home", "warm"))
    os.environ["HOME"], os.environ["PYTEST_WARM_COMMANDS"] = EMPTY.name, WARM.name
    Path(WARM.name, "owner").write_text(str(os.getpid()))
    for name in CACHES:
        os.environ.pop(name, None)
# Unless told, torch's compiler asks the C++ compiler in each process whether it knows vectors, and precompiles some
# hundred megabytes of headers for three programs: 14 processor seconds.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
if not torch.accelerator.is_available():  # a seed of absent devices is kept for later with its stack: a millisecond
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        devices.manual_seed_all = lambda seed: None
# A shell without job control starts background work with Ctrl-C ignored; the tests that send it would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A drawn test that fails prints a line that draws the same example again.
settings.register_profile("default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("deep", parent=settings.get_profile("default"), max_examples=1000)
settings.register_profile("mutation", parent=settings.get_profile("default"), derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


class TorchRandom:
    """torch's random numbers, which hypothesis seeds before each example, as it does Python's and NumPy's."""

    seed, getstate, setstate = (
        staticmethod(function) for function in (torch.manual_seed, torch.get_rng_state, torch.set_rng_state)
    )


TORCH_RANDOM = TorchRandom()  # hypothesis holds only a weak reference
register_random(TORCH_RANDOM)


def _poisoned(make):
    def empty(*args, **kwargs):
        tensor = make(*args, **kwargs)
        if tensor.is_floating_point() and tensor.device.type != "meta":
            tensor.detach().fill_(float("nan"))
        return tensor

    return empty


#: The same functions in every test, because torch.compile remembers those of its first use.
POISONED = [
    (owner, name, _poisoned(getattr(owner, name)))
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))
]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Memory that nobody wrote is NaN, so that reading it cannot pass for an answer."""
    for owner, name, poisoned in POISONED:
        monkeypatch.setattr(owner, name, poisoned)
    monkeypatch.setattr("regard.engine.kernel.running.MOST_KEPT_FLOATS", 0)  # kept memory would hold old numbers


@pytest.fixture(autouse=True)
def new_plans():
    """Every test plans its first calls itself: another test may have changed what a plan depends on."""
    kept_plans.clear()


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks, chunks and tiles of a few tokens, so that tiny problems cross many of their borders."""
    monkeypatch.setattr("regard.engine.blocked.LARGEST_BLOCK", 7)
    monkeypatch.setattr("regard.engine.linear.CHUNK", 4)
    monkeypatch.setattr("regard.engine.recurrent.transport.CHUNK", 2)
    monkeypatch.setattr("regard.maps.attention_map.TILE", (5, 4))
    monkeypatch.setattr("regard.maps.transported_map.TILE", (5, 4))
    monkeypatch.setattr("regard.maps.attention_map.GAP", 1)
    monkeypatch.setattr("regard.maps.attention_map.WORKSPACE", 4096)


def pytest_collectstart():
    """A file draws the same pieces in every process: torch begins each with another seed."""
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """So do fixtures of a file, whichever test asks first."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def heard_signals():
    """No signal is ignored, as some are where the tests run in the background."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def commands():
    """A folder of `python`, `regard` and `torchrun` that start without importing torch."""
    return warm_commands(Path(os.environ["PYTEST_WARM_COMMANDS"]))


def pytest_unconfigure():
    if "PYTEST_XDIST_WORKER" not in os.environ:
        end_server(Path(WARM.name))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Where `--dist loadgroup` asks for groups, whole files are groups as well."""
    from file_scheduler import FileScheduling

    return FileScheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_collection_modifyitems(items):
    """Workers of xdist must collect the same names, so a name must not hold an address."""
    if named := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"Give these tests ids; theirs hold addresses in memory: {named}")


def law_of(nodeid):
    """The name of the test, or the law that it was given."""
    test, _, given = nodeid.split("::")[1].removeprefix("test_").partition("[")
    return given.rstrip("]").partition("-")[2] if test == "the_laws_hold" else test


def pytest_terminal_summary(terminalreporter):
    """The seconds of each folder, those of fixtures too, and how many law x mechanism cases ran, by law."""
    seconds = Counter()
    for report in chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0].rpartition("/")[0]] += report.duration
    terminalreporter.section("seconds")
    for folder, duration in seconds.most_common():
        terminalreporter.write_line(f"{duration:7.1f}  {folder}")
    passed = [r.nodeid for r in terminalreporter.stats.get("passed", []) if "test_laws.py" in r.nodeid]
    laws = Counter(law_of(nodeid) for nodeid in passed)
    if laws:
        terminalreporter.section("laws")
        for law, count in sorted(laws.items()):
            terminalreporter.write_line(f"{count:5d}  {law.replace('_', ' ')}")
        terminalreporter.write_line(f"{sum(laws.values()):5d}  law x mechanism cases")
