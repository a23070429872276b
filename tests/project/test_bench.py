"""Benchmarks: what they refuse to report, what they leave out by name, and what they tell of what they measured."""

from __future__ import annotations

import dataclasses
import json
import time
from functools import partial
from importlib.metadata import version

import pytest
import torch
from benchmarks import case as bench_case
from benchmarks import measure, page
from benchmarks.__main__ import app
from benchmarks.case import Aim, BenchSettings, Case, Side, allowed_pairs, prepared, random_inputs
from benchmarks.cases import GROUPS, cases, selected
from benchmarks.mechanisms import interleaved
from benchmarks.peers import sdpa
from benchmarks.peers.package import Package
from benchmarks.report import Report, picture, print_rows
from benchmarks.roofline import Machine, measured
from benchmarks.runner import Line, Row, Runner, compare, tensors_of
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import regard as rg
from extras import needs_transformers
from regard.catalog import mechanism
from regard.diagnosis.laws import broken_law
from regard.engine.blocked import Blocked
from regard.engine.dense import Dense
from regard.engine.kernel import library

MACHINE = Machine("a machine", "cpu", "float32", 1, products=1e11, reading=1e10)
SHAPES = ((1, 2, 12, 8),) * 3


def wrong(*inputs):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v) + 0.01


def failing(*inputs):
    raise OSError("no kernel for this processor")


def case(*peers, **changed):
    given = {
        "group": "softmax",
        "work": "plain, n = 12",
        "inputs": partial(random_inputs, SHAPES, "cpu", torch.float32),
        "mechanism": "multi_head",
        "attention": rg.Attention(),
        "peers": peers,
        "weighs": False,
    }
    return Case(**{**given, **changed})


def row_of(one, **runner):
    return Runner(MACHINE, pair_seconds=0.0, pace=lambda setting: MACHINE, **runner).measure(one)


def test_a_peer_that_agrees_is_timed_and_judged():
    right = Side("SDPA", sdpa.sdpa, (Aim("time", 1e9), Aim("faster", 1e9)))
    row = row_of(case(right, aims=(Aim("milliseconds", 1e9),), flops=lambda: 1000, moved=1000))
    (line,) = row.lines
    assert row.broken == "" and line.note == "" and row.engine == "fused"
    assert line.ours > 0 and line.theirs > 0 and line.version == f"torch {version('torch')}"
    assert [g.holds for g in line.goals] == [True, False] and row.goals[0].holds
    assert line.goals[1].wanted == "at least 1e+09 x faster"
    assert row.products == pytest.approx(100 * 1000 / row.seconds / 1e11)
    assert row.reading == pytest.approx(100 * 1000 / row.seconds / 1e10)
    assert row.predicted > 0 and row.misjudged >= 1


def test_results_that_differ_are_not_timed():
    row = row_of(case(Side("off by a hundredth", wrong, (Aim("time", 2.0),))))
    (line,) = row.lines
    assert "results differ by" in line.note and line.ours is None and line.theirs is None and line.goals == []
    assert row.seconds is None and row.broken == "not timed: no peer agrees"


def test_one_peer_that_agrees_is_enough_for_our_time():
    row = row_of(case(Side("wrong", wrong), Side("SDPA", sdpa.sdpa)))
    assert row.seconds is not None and row.broken == ""
    assert row.lines[0].theirs is None and row.lines[1].theirs is not None


def test_what_computes_another_function_says_so_and_its_witness_is_compared():
    another = Side("another", wrong, differs="it adds a hundredth", witness=sdpa.sdpa)
    assert row_of(case(another)).lines[0].note == "it adds a hundredth"
    row = row_of(case(dataclasses.replace(another, witness=wrong)))
    assert "results differ" in row.lines[0].note and row.lines[0].theirs is None


def test_gradients_are_compared_too():
    def half_the_gradient(*inputs):
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, (v + v.detach()) / 2)

    right, off = Side("SDPA", sdpa.sdpa), Side("half", half_the_gradient)
    assert [line.theirs is None for line in row_of(case(off, right)).lines] == [False, False]
    assert [line.theirs is None for line in row_of(case(off, right, learns=True)).lines] == [True, False]


def test_our_own_wrong_output_is_not_timed():
    def off(*inputs):
        def run(q, k, v):
            seen = rg.Attention()(q, k, v)
            return rg.types.AttentionOutput(seen.output + 0.01, seen.weights)

        return run

    row = row_of(case(ours=off))
    assert "weights x values differ from the output" in row.broken and row.seconds is None


def test_a_red_law_blocks_the_row(monkeypatch):
    original = Dense.run

    def off(self, problem):
        result = original(self, problem)
        return dataclasses.replace(result, output=result.output * 1.001)

    monkeypatch.setattr(Dense, "run", off)
    row = row_of(case(Side("SDPA", sdpa.sdpa)))
    assert row.broken.startswith("not timed, a law is broken: dense agrees with the reference:")
    assert row.seconds is None and row.lines == []


def test_a_wrong_gradient_is_a_red_law(monkeypatch):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 1.01 * grad

    original = Blocked.run

    def off(self, problem):
        result = original(self, problem)
        return dataclasses.replace(result, output=Scaled.apply(result.output))

    assert broken_law(mechanism("masked").example) == ""
    monkeypatch.setattr(Blocked, "run", off)
    assert broken_law(mechanism("masked").example).startswith("gradients of blocked agree with dense:")


def test_laws_are_asked_once_a_mechanism(monkeypatch):
    asked = []
    monkeypatch.setattr("benchmarks.runner.broken_law", lambda small: asked.append(small) or "")
    runner = Runner(MACHINE, pair_seconds=0.0)
    assert [row.broken for row in runner.run([case(), case(), case(mechanism="masked")])] == ["", "", ""]
    assert len(asked) == 2


def test_missing_peers_are_named_with_what_to_install():
    absent = Package("no-such-attention", "no_such_attention")
    row = row_of(case(Side("nobody", wrong, package=absent)))
    assert row.lines[0].note == "no-such-attention is not installed: pip install 'regard[bench]'"
    assert row.seconds is not None


def test_peers_that_fail_or_do_not_fit_are_named():
    row = row_of(case(Side("failing", failing), Side("huge", sdpa.sdpa, needs=1 << 60)))
    assert row.lines[0].note == "OSError: no kernel for this processor"
    assert row.lines[1].note.startswith("skipped: it needs 1073741824.0 GiB, and ")


def test_memory_is_that_of_a_process_of_its_own():
    row = row_of(case(Side("SDPA", sdpa.sdpa, (Aim("memory", 1e9),)), weighs=True))
    assert row.memory is not None and row.lines[0].memory is not None


def prepare_bytes(count):
    return partial(bytearray, count)


def test_added_memory_is_what_was_added():
    assert 60 < measure.added_memory(partial(prepare_bytes, 64 << 20)) < 80
    assert measure.added_memory(partial(prepare_bytes, 1024), warm_up=True) < 8


def end():
    raise SystemExit(3)


def prepare_end():
    return end


def test_a_process_that_ends_early_is_an_error_and_no_number():
    with pytest.raises(MemoryError, match="ended early"):
        measure.added_memory(prepare_end)


def test_peers_run_in_turn():
    order = []
    a, b = measure.in_turn(lambda: order.append("A"), lambda: order.append("B"), rounds=2)
    assert "".join(order) == "ABABAB" and a >= 0 and b >= 0


def test_rounds_fit_into_the_time_of_a_pair():
    runner = Runner(MACHINE, pair_seconds=2.0)
    assert [runner._rounds(seconds) for seconds in (100.0, 0.5, 1e-9)] == [1, 4, 25]


def test_when_the_time_is_over_the_rest_is_named():
    rows = list(Runner(MACHINE, pair_seconds=0.0, stop=time.monotonic() - 1).run([case()]))
    assert rows[0].broken.startswith("not measured: no time was left")


def test_what_is_compared():
    a, b = torch.ones(2), torch.zeros(3)
    assert [t.tolist() for t in tensors_of((a, {"b": b}))] == [[1, 1], [0, 0, 0]] and tensors_of(()) == []
    compare([a], a + 1e-5, 1e-4)
    for other, said in ((a + 0.1, "results differ by"), (b, r"\(2,\) and \(3,\)"), ((a, b), "1 and 2 tensors")):
        with pytest.raises(Exception, match=said):
            compare([a], other, 1e-4)
    with pytest.raises(Exception, match="results differ by nan"):
        compare([a], a * float("nan"), 1e-4)


@pytest.mark.parametrize(
    "mask", [rg.causal() & rg.window(3), rg.documents([4, 9, 7]), rg.masks.bigbird(20, 4, num_random=1)]
)
def test_useful_pairs_are_those_of_the_dense_mask(mask):
    q = torch.zeros(1, 1, 20, 4)
    assert allowed_pairs(mask, 20, 20, block=7) == int(sdpa.dense_mask(mask, q, q).sum())


@pytest.mark.parametrize(
    "mask",
    [
        rg.causal() & rg.window(5),
        rg.window(3) | rg.masks.global_tokens([0, 1]),
        rg.causal() & rg.documents([4, 9, 7]),
        rg.causal() | rg.masks.prefix(6),
        rg.masks.dilated(3, 2),
        rg.masks.bigbird(20, 4, num_random=1),
        rg.masks.tree([-1, 0, 0, -1, *range(3, 16)], context=3),
        rg.masks.shared_prefix(4, [7, 9]),
        rg.masks.neighborhood((4, 5), (2, 3)),
        rg.masks.sliding_tiles((4, 5), (2, 1), (1, 4)),
    ],
    ids=repr,
)
def test_the_rule_written_for_flex_attention_is_the_mask(mask):
    i, j = torch.arange(20)[:, None], torch.arange(20)
    q = torch.zeros(1, 1, 20, 4)
    assert torch.equal(sdpa.pair_rule(mask, "cpu")(None, None, i, j).expand(20, 20), sdpa.dense_mask(mask, q, q))


def test_one_call_a_document_is_the_packed_attention():
    q, k, v = (torch.randn(1, 2, 20, 4) for _ in range(3))
    mask = rg.causal() & rg.documents([4, 9, 7])
    torch.testing.assert_close(sdpa.one_call_each((4, 9, 7))(q, k, v), sdpa.dense(mask, q, k, v)(q, k, v))


@pytest.mark.parametrize("full", [False, True])
def test_every_case_has_a_law_that_is_known(full):
    found = cases(BenchSettings(full=full))
    assert [group for group in dict.fromkeys(c.group for c in found)] == list(GROUPS)
    assert len({c.work for c in found}) == len(found)
    for one in found:
        attention, *tensors = one.small()
        assert isinstance(attention, rg.Attention | rg.composites.Composite) and len(tensors) == 3
        assert (one.attention is None) != (one.ours is None)


def test_the_module_peer_is_the_same_step():
    from benchmarks.cases import module

    x, wanted = torch.randn(2, 5, module.WIDTH), torch.randn(2, 5, module.WIDTH)
    for _ in range(2):
        ours, theirs = module.ours(True), module.torchs()
        ours(x, wanted), theirs(x, wanted)
        torch.testing.assert_close(ours(x, wanted), theirs(x, wanted), rtol=1e-4, atol=1e-5)
    assert isinstance(module._module(False), nn.Module)


def test_statistics_of_the_peer_are_ours(monkeypatch):
    from benchmarks.cases import statistics

    monkeypatch.setattr(statistics, "CELLS", 8)
    inputs = random_inputs(((1, 2, 64, 8),) * 3, "cpu", torch.float32)
    for is_causal in (False, True):
        attention = rg.Attention(mask=rg.causal() if is_causal else None)
        mine = statistics.streaming(attention, *inputs)(*inputs)
        compare(tensors_of(mine), statistics.eagerly(is_causal, *inputs)(*inputs), 1e-4)


@needs_transformers("5.23", "its functions are the peers")
def test_recurrent_peers_are_ours(monkeypatch):
    from benchmarks.cases import recurrent

    monkeypatch.setattr(recurrent, "HEADS", 2)
    monkeypatch.setattr(recurrent, "WIDTH", 8)
    monkeypatch.setattr(recurrent, "SSM", (2, 4, 8))
    setting = BenchSettings()
    peers = {one.work: one.peers for one in recurrent.cases(setting)}
    assert sum(map(len, peers.values())) == 5
    for make, ours, theirs in (
        (partial(recurrent.delta_inputs, setting, 20, 2), recurrent.delta, recurrent.recurrent.chunked_delta),
        (partial(recurrent.delta_inputs, setting, 20, 2), recurrent.delta, recurrent.recurrent.delta_by_token),
        (partial(recurrent.delta_inputs, setting, 1, 2), recurrent.next_delta, recurrent.recurrent.next_delta),
        (partial(recurrent.state_space_inputs, setting, 20), recurrent.state_space, recurrent.recurrent.chunked_scan),
    ):
        inputs = make()
        compare(tensors_of(ours(*inputs)(*inputs)), theirs(*inputs)(*inputs), 1e-4)
    assert not broken_law(mechanism("gated_deltanet").example)


def test_peers_of_convolutions_are_ours(monkeypatch):
    from benchmarks.cases import convolutions

    for name in ("CHANNELS", "LENGTH", "LONG_CHANNELS", "LONG_LENGTH"):
        monkeypatch.setattr(convolutions, name, 5 if "CHANNELS" in name else 40)
    for one in convolutions.cases(BenchSettings()):
        inputs = one.inputs()
        for side in one.peers:
            compare(tensors_of(one.ours(*inputs)(*inputs)), side.build(*inputs)(*inputs), 1e-4)
    assert not broken_law(mechanism("short_convolution").example)


@needs_transformers("5.23", "its modules are the peers")
@torch.no_grad()
def test_peers_of_composites_are_ours(monkeypatch):
    from benchmarks.cases import composites

    monkeypatch.setattr(composites, "LENGTH", 64)
    monkeypatch.setattr(composites, "SEGMENT", 24)
    monkeypatch.setattr(composites, "WIDTH", 8)
    found = list(composites.cases(BenchSettings()))
    assert len({one.mechanism for one in found}) == 8
    for one in found:
        inputs = one.inputs()
        for side in one.peers:
            ours = prepared(one.builds_ours, False, inputs)()
            compare(tensors_of(ours), side.build(*inputs)(*inputs), 1e-3)
    assert not broken_law(mechanism("nsa").example) and not broken_law(mechanism("differential").example)


def test_rows_of_selected_keys_agree_with_their_formulas(monkeypatch):
    monkeypatch.setattr(selected, "LENGTH", 1024)
    for case in selected.cases(BenchSettings()):
        (peer,) = case.peers
        if peer.differs:
            continue
        inputs = case.inputs()
        ours, theirs = (prepared(build, False, inputs)() for build in (case.builds_ours, peer.build))
        compare(tensors_of(ours), theirs, 1e-4)
        assert not broken_law(case.small)


def test_a_gpu_has_rows_of_softmax_and_statistics_against_the_same_peers(monkeypatch):
    """SDPA, FlexAttention and the dense formula; what can run without a GPU agrees on small inputs."""
    found = cases(BenchSettings("cuda"), ("softmax", "statistics"))
    assert {one.group for one in found} == {"softmax", "statistics"}
    for one in found:
        names = [side.name for side in one.peers]
        assert names[0].startswith("SDPA") and names[1].startswith("FlexAttention")
        assert len(names) == 3 or one.length > 8192, "all pairs of more tokens do not fit"
    plain, causal = (next(one for one in found if one.work.startswith(name)) for name in ("plain", "causal"))
    inputs = random_inputs(SHAPES, "cpu", torch.float32)
    for one in (plain, causal):
        attention, sides = one.attention, [one.peers[0], one.peers[2]]
        for side in sides:
            run = prepared(side.build, False, inputs)
            compare(tensors_of(attention(*inputs).output), run(), 1e-4)
    monkeypatch.setattr(sdpa, "_flex", lambda: F.scaled_dot_product_attention)
    assert sdpa.flex(None, *inputs).keywords == {"block_mask": None}


def some_rows():
    goal = measure.Goal("plain", 1.01, 1.03, "x its time")
    line = Line("SDPA", "torch 2", 0.2, 0.3, 5.0, [goal])
    rows = [
        Row("softmax", f"plain, n = {n}", "fused", n / 1000, 2.0, 80.0, None, 0.1, [], [line], "", "plain", n)
        for n in (8, 9)
    ]
    return [*rows, Row("window", "causal", broken="not timed, a law is broken")]


def test_reports_survive_files(tmp_path):
    report = Report(MACHINE, "python -m benchmarks", "abc", some_rows(), {"torch": "2"})
    report.save(tmp_path / "bench.json")
    assert Report.load(tmp_path / "bench.json") == report
    assert report.summary == "2 of 2 goals hold. 1 cases were not timed."


def test_the_table_tells_times_goals_and_what_was_not_timed(capsys):
    from rich.console import Console

    print_rows(some_rows(), Console(width=110))
    told = capsys.readouterr().out
    assert "1.50 x faster" in told and "holds 1.01: at most 1.03 x its time" in told
    assert "80 % of the matmul rate" in told and "not timed, a law is broken" in told


def test_pictures_need_two_lengths(tmp_path):
    picture(some_rows(), tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(rg.RegardError, match="several lengths"):
        picture(some_rows()[1:], tmp_path / "bench.png")


def test_the_machine_is_measured():
    machine = measured(scale=0.02)
    assert machine.products > 0 and machine.reading > 0 and machine.threads == torch.get_num_threads()
    assert "GFLOP/s" in str(machine)


built = pytest.mark.skipif(library.load() is None, reason=library.reason())
#: Floats of a vector by level.
LANES = {"baseline": 4, "avx2": 8, "avx512": 16}


@built
@pytest.mark.parametrize("level", library.VECTORS)
def test_the_limit_is_that_of_the_vector_width_that_runs(level, monkeypatch):
    if library.LEVELS.index(level) > library.load().level:
        pytest.skip(f"this processor has no {level}")
    monkeypatch.setenv("REGARD_KERNEL", level)
    machine = measured(scale=0.02)
    assert machine.kernel == level and f"in multiply-adds of {level}, " in str(machine)
    # no processor does more than four multiply-adds of vectors in a cycle of a sixth of a nanosecond
    assert 1e8 < machine.multiply_adds < machine.threads * 4 * 6e9 * LANES[level] * 2


def test_without_kernels_there_is_no_limit(monkeypatch):
    monkeypatch.setenv("REGARD_KERNEL", "off")
    machine = measured(scale=0.02)
    assert (machine.kernel, machine.multiply_adds) == ("", 0.0) and "multiply-adds" not in str(machine)


@built
def test_a_row_of_the_kernel_has_its_share_of_the_limit(monkeypatch):
    monkeypatch.setenv("REGARD_KERNEL", "")
    machine = dataclasses.replace(MACHINE, kernel="avx2", multiply_adds=2e11)
    long = {"inputs": partial(random_inputs, ((1, 2, 400, 8),) * 3, "cpu", torch.float32), "flops": lambda: 1000}
    runner = Runner(machine, pair_seconds=0.0, pace=lambda setting: machine)
    monkeypatch.setattr("regard.engine.kernel.library.LOWEST_LEVEL", 0)
    kernel, fused = runner.measure(case(**long)), runner.measure(case(flops=lambda: 1000))
    assert kernel.engine == "kernel" and kernel.multiply_adds == pytest.approx(100 * 1000 / kernel.seconds / 2e11)
    assert fused.engine == "fused" and fused.multiply_adds is None


def test_goals_are_those_of_the_vector_width(monkeypatch):
    for level, goals in (("avx512", (Aim("faster", 2.0),)), ("avx2", (Aim("faster", 1.15),)), ("baseline", ())):
        found = library.Library(None, library.LEVELS.index(level))
        monkeypatch.setattr(bench_case, "load", lambda found=found: found)
        assert BenchSettings().aims("faster", 2.0, 1.15) == goals
        assert BenchSettings("cuda").aims("faster", 2.0, 1.15) == ()
    monkeypatch.setattr(bench_case, "load", lambda: None)
    assert BenchSettings().aims("faster", 2.0, 1.15) == ()


def test_groups_take_turns():
    works = ["a1", "a2", "a3", "b1", "c1", "c2"]
    order = interleaved([case(group=work[0], work=work) for work in works])
    assert [one.work for one in order] == ["a1", "b1", "c1", "a2", "c2", "a3"]


runner = CliRunner()


@pytest.fixture
def few(monkeypatch):
    """The command on two tiny cases."""
    monkeypatch.setattr("benchmarks.mechanisms.measured", lambda *given: MACHINE)
    monkeypatch.setattr("benchmarks.mechanisms.PAIR", 0.0)
    few = [case(Side("SDPA", sdpa.sdpa, (Aim("time", 1e9),))), case(work="the second")]
    monkeypatch.setattr("benchmarks.mechanisms.cases", lambda setting, only: few)
    return few


def test_the_command_tells_progress_and_writes_what_it_measured(few, tmp_path):
    result = runner.invoke(app, ["--only", "softmax", "--json", str(tmp_path / "b.json")], env={"COLUMNS": "110"})
    assert result.exit_code == 0, result.output
    assert "softmax: plain, n = 12" in result.stderr and "softmax: the second" in result.stderr
    assert "plain, n = 12" in result.stdout and "1 of 1 goals hold." in result.stdout
    saved = json.loads((tmp_path / "b.json").read_text())
    assert [row["work"] for row in saved["rows"]] == ["plain, n = 12", "the second"]
    assert saved["versions"]["torch"] == version("torch") and saved["command"] == "python -m benchmarks --only softmax"


def test_ctrl_c_keeps_what_was_measured(few, monkeypatch, tmp_path):
    original = Runner.measure

    def measure_one(self, one):
        if one.work == "the second":
            raise KeyboardInterrupt
        return original(self, one)

    monkeypatch.setattr(Runner, "measure", measure_one)
    result = runner.invoke(app, ["--only", "softmax", "--json", str(tmp_path / "b.json")])
    assert result.exit_code == 130 and "Interrupted" in result.stdout and "plain, n = 12" in result.stdout
    saved = Report.load(tmp_path / "b.json")
    assert saved.interrupted and [row.work for row in saved.rows] == ["plain, n = 12"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "windw"], "Did you mean 'window'?"),
        (["--only", "window,statistic"], "Did you mean 'statistics'?"),
        (["--device", "gpu"], "there is no device 'gpu'"),
        (["--device", "cuda", "--only", "bias"], "--device cpu"),
        (["--device", "cuda", "--only", "statistics"], "torch finds no CUDA device on this machine"),
        (["--device", "cuda", "--list"], "torch finds no CUDA device on this machine"),
        (["--json", "no/such/folder/b.json"], "there is no folder"),
        (["watching", "--json", "b.json"], "are for mechanisms, and only suites of goals were chosen"),
        (["--only", "ring", "--full"], "are for mechanisms, and only suites of goals were chosen"),
    ],
)
def test_mistakes_are_one_line(arguments, said):
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2 and said in result.stderr and "Traceback" not in result.output


def test_the_list_names_cases_and_peers_and_measures_nothing():
    result = runner.invoke(app, ["--list", "--only", "window,planning"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "causal & window 256, n = 16,384" in result.stdout and "create_block_mask" in result.stdout
    assert "local-attention" in result.stdout and "GFLOP" not in result.output
    result = runner.invoke(app, ["--list", "ring"])
    assert result.exit_code == 0 and "bytes that travel" in result.stdout and "local-attention" not in result.stdout


def test_a_missed_goal_of_a_suite_is_the_exit_status(monkeypatch):
    for limit, status, said in ((2.0, 0, "All goals hold."), (0.5, 1, "1 goals were missed.")):
        monkeypatch.setattr("benchmarks.watching.goals", lambda limit=limit: [measure.Goal("a work", 1.0, limit, "x")])
        result = runner.invoke(app, ["watching"])
        assert result.exit_code == status and said in result.stdout, result.output


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """What the command says of an output that it refuses before it measures."""

    def run(*arguments):
        result = runner.invoke(app, ["--only", "window", *map(str, arguments)])
        assert result.exit_code == 2 and result.stdout == "", (result.exception, result.output)
        return " ".join(result.stderr.split())

    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchmarks.mechanisms.measured", lambda *_: pytest.fail("it measures"))
    return run


@pytest.mark.parametrize("option", ["--json", "--picture"])
@pytest.mark.parametrize(("name", "said"), [("folder", "is a folder"), ("missing/a.png", "there is no folder")])
def test_a_file_that_cannot_be_is_refused_before_the_work(option, name, said, refused):
    assert said in refused(option, name)


def test_a_picture_of_another_kind_or_without_matplotlib_is_refused_before_the_work(refused, monkeypatch):
    assert "does not end in .png" in refused("--picture", "a.xyz")
    monkeypatch.setattr("regard.cli.outputs.find_spec", lambda name: None)
    assert "matplotlib is not installed. pip install" in refused("--picture", "a.png")


def report_of(name, commit, measured):
    """A report of one row with a goal of at least 2, one peer without a goal, and a row that was not timed."""
    goal = measure.Goal("plain, against SDPA", measured, 2.0, "x faster", at_most=False)
    lines = [Line("SDPA", "torch 2", 1.0, measured, goals=[goal]), Line("eager", "torch 2", 1.0, 5.0)]
    rows = [
        Row("softmax", "plain", "kernel", 1.0, lines=lines, multiply_adds=61.0),
        Row("bias", "T5", broken="refused"),
    ]
    machine = dataclasses.replace(MACHINE, name=name, kernel="avx2")
    return Report(machine, "python -m benchmarks --only softmax,bias", commit, rows, {"torch": "2"})


def test_the_page_has_a_column_for_each_machine_and_missed_goals_first():
    text = page.table([report_of("Zen 3", "abc", 1.5), report_of("Zen 4", "abc", 2.5)])
    head, _, *lines = [line for line in text.splitlines() if line.startswith("|")]
    assert head.startswith("| work | against | Zen 3, avx2 | Zen 4, avx2 | goal |")
    assert lines[0] == "| plain | SDPA | **1.5** | 2.5 | at least 2 x faster | 61 % of multiply-adds |"
    assert [line.split(" | ")[1] for line in lines[1:]] == ["eager", ""] and "refused" in lines[2]
    assert "0 of 1 goals hold on Zen 3, avx2; 1 of 1 goals hold on Zen 4, avx2" in text and "commit abc" in text


def test_a_row_for_which_no_time_was_left_is_taken_from_another_file():
    measured, late = report_of("Zen 3", "abc", 1.5), report_of("Zen 3", "abc", 1.5)
    late.rows = [Row("softmax", "plain", broken="not measured: no time was left")]
    assert "no time was left" not in page.table([late, measured]) and "no time was left" in page.table([late])


def test_the_page_is_of_one_commit_and_three_machines():
    with pytest.raises(rg.RegardError, match="commits abc, def"):
        page.table([report_of("Zen 3", "abc", 1.5), report_of("Zen 4", "def", 1.5)])
    with pytest.raises(rg.RegardError, match="4 machines"):
        page.table([report_of(name, "abc", 1.5) for name in "abcd"])


def test_what_stands_around_the_table_stays():
    before, after = page.MARKS
    assert page.written(f"head\n{before}\nold\n{after}\nfoot", "new") == f"head\n{before}\nnew\n{after}\nfoot"
    assert page.written(page.PAGE.read_text(), "new").count("new\n" + after) == 1
