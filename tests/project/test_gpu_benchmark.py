"""`make gpu` runs whole without a GPU, on the pretend accelerator; and what it would say of a wrong one."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

import regard as rg
from regard.engine.gpu.statistics import is_installed

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

pytest.importorskip("transformers")

from benchmarks.gpu import __main__ as command  # noqa: E402
from benchmarks.gpu import report, rows  # noqa: E402
from benchmarks.gpu.machine import Machine  # noqa: E402

PAGES = [ROOT / name for name in report.PAGES]
HERE = Machine(torch.device("cpu"), small=True)


def part(name):
    return importlib.import_module(f"benchmarks.gpu.{name}")


def dry_run(folder, *more):
    command = [sys.executable, "-m", "benchmarks.gpu", "--pretend", "--out", str(folder), *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_a_part_runs_alone_on_the_pretend_accelerator(tmp_path):
    done = dry_run(tmp_path, "overhead")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert [path.name for path in tmp_path.iterdir()] == ["overhead.json"]
    assert all(row.keys() >= part("overhead").FIELDS for row in rows.read(tmp_path / "overhead.json"))


@pytest.mark.example
@pytest.mark.skipif(not is_installed(), reason="Triton is not installed: pip install triton, on Linux")
def test_the_dry_run_is_whole(tmp_path):
    """Every part has its rows, each with all its fields; nothing is an error, and the pages stay as they are."""
    before = [page.read_bytes() for page in PAGES]
    done = dry_run(tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = report.read(tmp_path, command.PARTS)
    for name, measured in found.items():
        fields = part(name).FIELDS
        assert any("refused" not in row for row in measured), name
        for row in measured:
            wanted = fields[row["work"]] if name == "kernels" else fields
            assert wanted <= row.keys() or "refused" in row, row
            assert row["device"] == "dry run (pretend)" and "warnings" not in row, row
    refused = [row["refused"] for measured in found.values() for row in measured if "refused" in row]
    assert len(refused) == 1 and "gloo" in refused[0]
    bits, names = part("bits"), ("dtype", "kernel", "check")
    checks = {tuple(row[name] for name in names) for row in found["bits"] if row["model"] == bits.SMALL}
    assert checks == set(product(bits.DTYPES, bits.KERNELS, bits.CHECKS))
    assert {row["form"] for row in found["kernels"]} == set(part("kernels").FORMS)
    again = dry_run(tmp_path, "overhead", "backend")  # what is measured is not measured again
    assert again.returncode == 0 and report.read(tmp_path, command.PARTS) == found
    assert [page.read_bytes() for page in PAGES] == before
    assert report.write(ROOT, found) == 2 and [page.read_bytes() for page in PAGES] == before


def test_without_a_gpu_one_sentence_says_how_to_run_it_dry(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu", "bits", "--out", str(tmp_path)])
    assert command.main() == 2
    assert 'no CUDA device here; a dry run needs none: make gpu ARGS="--pretend"' in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# A row says when something is wrong


def setting(dtype="float32"):
    bits = part("bits")
    return bits.BenchSettings(HERE, bits.SMALL, 24, dtype, "math")


@pytest.fixture
def row():
    bits = part("bits")
    return lambda check: rows.attempt(rows.Job({}, lambda: bits.CHECKS[check](setting())))


def test_right_checks_hold(row):
    for check in part("bits").CHECKS:
        assert row(check)["holds"], check


def test_a_watch_that_changes_a_bit_is_found(row, monkeypatch):
    class Changing:
        def __init__(self, model):
            self.model, self.watch = model, watch(model)

        def __enter__(self):
            self.model.lm_head.weight.data[0, 0] += 1e-3
            return self.watch.__enter__()

        def __exit__(self, *error):
            self.model.lm_head.weight.data[0, 0] -= 1e-3
            return self.watch.__exit__(*error)

    watch = rg.watch
    monkeypatch.setattr(rg, "watch", Changing)
    for check in ("watch", "generate", "generate, static cache"):
        found = row(check)
        assert not found["identical"] and not found["holds"], check


def test_wrong_weights_are_found(row, monkeypatch):
    scores = part("models").Call.scores
    monkeypatch.setattr(part("models").Call, "scores", lambda *args: 1.001 * scores(*args))
    found = row("watch")
    assert found["identical"] and found["difference"] > found["limit"] and not found["holds"]


@pytest.mark.parametrize("wrong", [rg.KnockOut(rg.Where(layers=1, keys=3)), rg.KnockOut(rg.Where(layers=1, heads=2))])
def test_an_edit_of_other_heads_is_found(wrong):
    found = part("bits").edit(wrong, True, setting())
    assert not found["identical"] and not found["holds"]


def test_an_edit_of_another_key_is_found():
    found = part("bits").edit(rg.KnockOut(rg.Where(layers=1, heads=1, keys=2)), True, setting())
    assert found["identical"] and found["difference"] > found["limit"] and not found["holds"]


def test_wrong_logits_of_the_backend_are_found(monkeypatch):
    backend = part("backend")
    assert backend.differences(HERE, "float32")["holds"]
    on_both = backend.on_both
    monkeypatch.setattr(backend, "on_both", lambda *args: (both := on_both(*args)) | {"regard": both["regard"] * 1.01})
    assert not backend.differences(HERE, "float32")["holds"]


# Rows and pages


def test_rows_are_written_one_by_one_and_the_rest_comes_next_time(tmp_path):
    ran, path = [], tmp_path / "part.json"

    def job(number, run=dict):
        return rows.Job({"number": number}, lambda: ran.append(number) or run())

    def broken():
        assert [row["number"] for row in rows.read(path)] == [1]
        raise ValueError("a kernel that fails")

    jobs = [job(1), job(2, broken), job(3)]
    assert rows.measure(jobs, HERE, path, seconds=-1) == 3 and ran == []
    assert rows.measure(jobs[:2], HERE, path, seconds=60) == 0
    assert rows.measure(jobs, HERE, path, seconds=60) == 0 and ran == [1, 2, 3]
    first, second, third = rows.read(path)
    assert second["error"] == "ValueError: a kernel that fails" and "error" not in first | third


def test_refusals_are_results_only_where_they_are_expected():
    def refuse():
        raise rg.RegardError("this is refused")

    def without_kernel():
        raise RuntimeError("No available kernel. Aborting execution.")

    assert rows.attempt(rows.Job({}, refuse, may_refuse=True)) == {"refused": "this is refused"}
    assert "error" in rows.attempt(rows.Job({}, refuse))
    assert "refused" in rows.attempt(rows.Job({}, without_kernel))


def test_only_rows_of_a_gpu_are_written_between_the_marks(tmp_path):
    row = {"key": "a", "model": "M", "tokens": 8192, "dtype": "bfloat16", "kernel": "flash", "check": "watch"}
    row |= {
        "identical": True,
        "difference": 1e-7,
        "limit": 1e-5,
        "holds": True,
        "key_heads": "shared",
        "device": "A GPU",
    }
    found = {key: [] for key in command.PARTS} | {"bits": [row]}
    for page in PAGES:
        copy = tmp_path / page.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(page.read_text("utf-8"), "utf-8")
    assert report.write(tmp_path, found | {"bits": [row | {"device": "dry run (pretend)"}]}) == 2
    assert report.write(tmp_path, {key: [] for key in command.PARTS}) == 2
    assert [(tmp_path / page.relative_to(ROOT)).read_bytes() for page in PAGES] == [page.read_bytes() for page in PAGES]
    assert report.write(tmp_path, found) == 0
    benchmarks, readme = ((tmp_path / name).read_text("utf-8") for name in report.PAGES)
    assert "| M | 8,192 | bfloat16 | watch | identical, 1.0e-07 |" in benchmarks
    assert "On one A GPU, in 1 of 1 checks" in readme and "No GPU has run Regard yet" not in readme
    for page, text in zip(PAGES, (benchmarks, readme), strict=True):
        outside = [
            whole.split(mark)[end] for whole in (text, page.read_text("utf-8")) for end, mark in enumerate(report.MARKS)
        ]
        assert outside[:2] == outside[2:]
    assert json.dumps(found)
