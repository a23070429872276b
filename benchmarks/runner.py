"""Runs cases: checks the laws, then compares results with peers, then measures time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import regard as rg
from benchmarks.case import CALLS, Aim, BenchSettings, Case, Run, Side, built, goal, prepared
from benchmarks.measure import Goal, added_memory, in_turn
from benchmarks.peers.package import quiet
from benchmarks.roofline import Machine, free_memory, measured, waited
from regard.diagnosis.laws import broken_law
from regard.engine.speed_model import forget as forget_pace

#: The least and the most rounds of A B A B; slow runs may have one round.
ROUNDS = (3, 25)
#: Seconds of a slow run. It has no warm-up before its memory is measured.
SLOW = 2.0
#: The largest relative difference between weights x values and the output, by dtype.
WEIGHTS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


@dataclass
class Line:
    """The results of one peer. Seconds are medians of alternating runs, memory is in MiB."""

    name: str
    version: str
    ours: float | None = None
    theirs: float | None = None
    memory: float | None = None
    goals: list[Goal] = field(default_factory=list)
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the peer Regard is."""
        return None if self.ours is None or self.theirs is None else self.theirs / self.ours


@dataclass
class Row:
    """The results of a case. `broken` says why nothing was timed: a broken law, or results that differ."""

    group: str
    work: str
    engine: str = ""
    seconds: float | None = None
    memory: float | None = None
    products: float | None = None
    reading: float | None = None
    predicted: float | None = None
    goals: list[Goal] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    broken: str = ""
    series: str = ""
    length: int = 0
    multiply_adds: float | None = None

    @property
    def misjudged(self) -> float | None:
        """The factor between prediction and measurement, at least 1."""
        if not self.seconds or not self.predicted:
            return None
        return max(self.seconds / self.predicted, self.predicted / self.seconds)

    @property
    def all_goals(self) -> list[Goal]:
        return [*self.goals, *(g for line in self.lines for g in line.goals)]


def pace(setting: BenchSettings) -> Machine:
    """Measure the machine again, because the speed of a shared machine changes."""
    forget_pace()
    return measured(setting.device, setting.dtype, scale=0.5)


@dataclass
class Runner:
    """Measures cases on a machine, with `pair_seconds` per peer, until the time `stop` of `time.monotonic()`.

    `pace` measures the machine again for each case; rates are given as shares of it.
    """

    machine: Machine
    setting: BenchSettings = field(default_factory=BenchSettings)
    pair_seconds: float = 4.0
    stop: float | None = None
    laws: dict[str, str] = field(default_factory=dict)
    pace: Callable[[BenchSettings], Machine] = pace

    def run(self, cases: Iterable[Case], before: Callable[[Case], None] = lambda case: None) -> Iterator[Row]:
        """One row per finished case. `before` is called with each case before it is measured."""
        for case in cases:
            before(case)
            if self.stop is not None and time.monotonic() > self.stop:
                yield Row(
                    case.group, case.work, broken="not measured: no time was left. Choose fewer cases with --only."
                )
            else:
                yield self.measure(case)

    def measure(self, case: Case) -> Row:
        """The row of one case, without times if a law is broken or no peer agrees."""
        row = Row(case.group, case.work, series=case.series, length=case.length)
        if error := self._law(case):
            row.broken = f"not timed, a law is broken: {error}"
            return row
        inputs = case.inputs()
        try:
            ours = waited(prepared(case.builds_ours, case.learns, inputs), self.setting.device)
            result = ours()
        except rg.RegardError as error:
            row.broken = f"not timed, regard refuses: {error}"
            return row
        if missed := _weights_miss(result, inputs):
            row.broken = f"not timed, {missed}"
            return row
        expected = tensors_of(result)
        del result
        row.lines = [self._beside(case, side, ours, expected, inputs) for side in case.peers]
        del expected
        self._ours(case, row, ours, inputs)
        return row

    def _law(self, case: Case) -> str:
        if case.mechanism not in self.laws:
            self.laws[case.mechanism] = broken_law(case.small)
        return self.laws[case.mechanism]

    def _beside(self, case: Case, side: Side, ours: Run, expected: list[Tensor], inputs: tuple[Tensor, ...]) -> Line:
        line = Line(side.name, str(side.package), note=side.package.missing)
        if not line.note and side.needs > (free := free_memory(self.setting.device)):
            line.note = f"skipped: it needs {side.needs / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        if line.note:
            return line
        try:
            with quiet():
                theirs, took = self._checked(case, side, expected, inputs)
                rounds = self._rounds(took)
                line.ours, line.theirs = in_turn(ours, theirs, rounds=rounds, clock=self.machine.clock, warm_up=False)
        except Differs as difference:
            line.note = f"not timed, {difference}"
        except Exception as error:  # any error of a peer is reported, and the run continues
            line.note = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if line.theirs is not None:
            line.note = side.differs
        return line

    def _checked(self, case: Case, side: Side, expected: list[Tensor], inputs: tuple[Tensor, ...]) -> tuple[Run, float]:
        """The run of a peer whose result agrees, and the seconds of one run."""
        theirs = waited(prepared(side.build, case.learns, inputs), self.setting.device)
        if side.witness is not None:
            compare(expected, prepared(side.witness, case.learns, inputs)(), side.tolerance)
        if side.compiles:
            theirs()
        start = self.machine.clock()
        result = theirs()
        took = self.machine.clock() - start
        if side.witness is None and not side.differs:
            compare(expected, result, side.tolerance)
        return theirs, took

    def _rounds(self, seconds: float) -> int:
        least, most = ROUNDS if seconds < SLOW else (1, ROUNDS[1])
        return max(least, min(most, int(self.pair_seconds / max(seconds, 1e-6))))

    def _ours(self, case: Case, row: Row, ours: Run, inputs: tuple[Tensor, ...]) -> None:
        """Fill in time, memory, rates and goals, unless every compared peer differs."""
        differing = [line.note.startswith("not timed") for line in row.lines if line.version]
        timed = [line for line in row.lines if line.ours is not None]
        if any(differing) and not timed:
            row.broken = "not timed: no peer agrees"
            return
        row.seconds = timed[0].ours if timed else in_turn(ours, rounds=5, clock=self.machine.clock)[0]
        assert row.seconds is not None
        if case.weighs:
            row.memory = self._memory(case.builds_ours, case, row.seconds)
            for line, side in zip(row.lines, case.peers, strict=True):
                if line.theirs is not None:
                    line.memory = self._memory(side.build, case, line.theirs)
        self._rates(case, row, inputs)
        row.goals = [g for aim in case.aims if (g := _goal_of_ours(aim, row)) is not None]
        for line, side in zip(row.lines, case.peers, strict=True):
            found = [_goal_beside(aim, row, line) for aim in side.aims]
            line.goals = [g for g in found if g is not None]

    def _memory(self, build: Any, case: Case, seconds: float) -> float | None:
        ready = partial(built, build, case.learns, case.inputs, torch.get_num_threads())
        try:
            return added_memory(ready, self.setting.device, warm_up=seconds < SLOW)
        except MemoryError:
            return None

    def _rates(self, case: Case, row: Row, inputs: tuple[Tensor, ...]) -> None:
        assert row.seconds is not None
        now = self.pace(self.setting) if case.flops is not None or case.moved else self.machine
        if case.moved:
            row.reading = 100 * case.moved / row.seconds / now.reading
        if case.attention is not None and case.ours is None:
            with torch.set_grad_enabled(case.learns):
                plan = rg.plan(*inputs, attention=case.attention)
            row.engine = plan.engine
            row.predicted = None if case.learns else plan.seconds
        if case.flops is not None:
            flops_per_second = case.flops() / row.seconds
            row.products = 100 * flops_per_second / now.products
            if row.engine == "kernel" and now.multiply_adds:
                row.multiply_adds = 100 * flops_per_second / now.multiply_adds


class Differs(Exception):
    """Two sides have different results."""


def compare(mine: list[Tensor], result: Any, tolerance: float) -> None:
    """Raise `Differs` if results differ by more than `tolerance` times the greatest absolute element."""
    theirs = tensors_of(result)
    if len(mine) != len(theirs):
        raise Differs(f"the sides return {len(mine)} and {len(theirs)} tensors")
    for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if a.shape != b.shape:
            raise Differs(f"result {number} has the shapes {tuple(a.shape)} and {tuple(b.shape)}")
        off = _greatest_difference(a, b)
        greatest = float(b.abs().max()) or 1.0
        if not off <= tolerance * greatest:
            raise Differs(
                f"results differ by {off / greatest:.1e} relative to the greatest element, more than {tolerance:.0e}"
            )


def _greatest_difference(a: Tensor, b: Tensor) -> float:
    if a.dim() == 0 or a.numel() < 1 << 24:
        return float((a.double() - b.double()).abs().max())
    return max(_greatest_difference(x, y) for x, y in zip(a, b, strict=True))


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors of a result that are compared, detached."""
    if isinstance(result, rg.types.AttentionOutput):
        return [result.output]
    if isinstance(result, Tensor):
        return [result.detach()]
    if isinstance(result, dict):
        result = result.values()
    return [t for part in result for t in tensors_of(part)] if isinstance(result, Iterable) else []


@torch.no_grad()
def _weights_miss(result: Any, inputs: tuple[Tensor, ...]) -> str:
    """An error text if weights x values differ from the output, on three rows of the first head; otherwise ""."""
    if not isinstance(result, rg.types.AttentionOutput) or len(inputs) != 3:
        return ""
    value, output = inputs[2][0, 0], result.output[0, 0]
    rows = sorted({0, output.shape[0] // 2, output.shape[0] - 1})
    weights = result.weights.tile(rows=rows, cols=slice(0, value.shape[0]))[0, 0]
    off = float((weights @ value.to(weights.dtype) - output[rows].to(weights.dtype)).abs().max())
    allowed = WEIGHTS.get(output.dtype, 1e-4) * float(value.abs().max())
    return "" if off <= allowed else f"weights x values differ from the output by {off:.1e}"


def _goal_of_ours(aim: Aim, row: Row) -> Goal | None:
    assert row.seconds is not None
    measured = {
        "products": row.products,
        "reading": row.reading,
        "limit": row.multiply_adds,
        "milliseconds": 1000 * row.seconds,
        "mebibytes": row.memory,
    }[aim.kind]
    return None if measured is None else goal(aim, row.work, measured)


def _goal_beside(aim: Aim, row: Row, line: Line) -> Goal | None:
    work = f"{row.work}, against {line.name}"
    if aim.kind == "memory":
        known = row.memory is not None and line.memory
        return goal(aim, work, row.memory / line.memory) if known else None  # type: ignore[operator]
    if line.ours is None or line.theirs is None or line.ratio is None:
        return None
    if aim.kind == "overhead":
        return goal(aim, work, 1e6 * (line.ours - line.theirs) / CALLS)
    return goal(aim, work, line.ratio if aim.kind == "faster" else 1 / line.ratio)
