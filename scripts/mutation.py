"""Change the source in one place, run the tests that reach this place, and see whether one fails.

    python scripts/mutation.py --count 150 --seed 0 --workers 2

A mutant that no test kills is a survivor: the tests say nothing about that place, or the change makes no difference.
The run can be stopped and started again; it keeps its results in `.mutation/`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".mutation"
FORKED = FOLDER / "forked.jsonl"
#: Source whose results everything else shows.
TARGETS = ("pieces/*.py", "engine/*.py", "maps/*.py", "attention.py", "cache.py", "seen.py", "nn/keys.py")
#: The FlexAttention lowering compiles kernels, and `speed_model` predicts seconds: no quick test can judge either.
EXCLUDED = ("flex.py", "lowering.py", "machine.py", "words.py", "__init__.py", "formatting.py", "speed_model.py")
#: Tests that can see those: quick ones, and none that needs a browser, or that fails in a fork (compiling, torch.func).
TESTS = "not slow and not example"
IGNORED = (
    *("bench", "cli", "cluster", "comparison", "data", "docs", "evaluation", "flex", "lab", "page_browser", "report"),
    *("scripts", "training", "transforms", "translat", "watch_torch"),
)
#: Seconds of tests that a mutant meets, the quickest first, and seconds after which it hangs.
SECONDS, PATIENCE = 60, 240

SWAPS: dict[type, str] = {
    **{ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="},
    **{ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"},
    **{ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.MatMult: "*"},
    **{ast.BitAnd: "|", ast.BitOr: "&", ast.And: "or", ast.Or: "and", ast.Pow: "*"},
}
TWINS = {"min": "max", "max": "min", "any": "all", "all": "any", "amin": "amax", "amax": "amin"}


@dataclass(frozen=True)
class Mutant:
    """Text that stands in for `source[start:stop]` of a file."""

    file: str
    line: int
    start: int
    stop: int
    before: str
    after: str

    def text(self, original: bytes) -> bytes:
        """The source with this change."""
        return original[: self.start] + self.after.encode() + original[self.stop :]

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.before!r} -> {self.after!r}"


def mutants(file: Path) -> Iterator[Mutant]:
    """Every change that one of the rules makes to a file, error messages and annotations left out."""
    text = file.read_text(encoding="utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    data, name = text.encode(), str(file.relative_to(ROOT / "src"))

    def mutant(node: ast.AST, after: str) -> Mutant:
        start, stop = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        return Mutant(name, node.lineno, start, stop, data[start:stop].decode(), after)

    for node in _code(ast.parse(text)):
        for after in _changes(node):
            yield mutant(node, after)


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that compute: no text, no annotation, nothing that is only raised or shown."""
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "__str__", "check", "explain", "refusal"):
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list", "bases"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _code(child)


def _changes(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield f"({ast.unparse(left)} {SWAPS[type(op)]} {ast.unparse(right)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SWAPS:
            yield f"(({ast.unparse(left)}) {SWAPS[type(op)]} ({ast.unparse(right)}))"
        case ast.BoolOp(op=op, values=values):
            yield f"({f' {SWAPS[type(op)]} '.join(f'({ast.unparse(value)})' for value in values)})"
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield f"({ast.unparse(orelse)} if {ast.unparse(test)} else {ast.unparse(body)})"
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value)):
            yield str(value + 1)
        case ast.Constant(value=float(value)):
            yield str(value + 1)
        case ast.Call(func=func, args=args, keywords=keywords):
            if isinstance(func, ast.Name) and func.id in TWINS:
                yield ast.unparse(ast.Call(ast.Name(TWINS[func.id]), args, keywords))
            if isinstance(func, ast.Attribute) and func.attr in TWINS:
                yield ast.unparse(ast.Call(ast.Attribute(func.value, TWINS[func.attr]), args, keywords))
            for left_out in keywords:
                rest = [keyword for keyword in keywords if keyword is not left_out]
                yield ast.unparse(ast.Call(func, args, rest))
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "pass"


def draw(count: int, seed: int) -> list[Mutant]:
    """Some of all mutants of the targets, the same for the same seed and source."""
    files = sorted({file for target in TARGETS for file in (ROOT / "src" / "regard").glob(target)})
    every = [mutant for file in files if file.name not in EXCLUDED for mutant in mutants(file)]
    return random.Random(seed).sample(every, min(count, len(every)))


def reached(fresh: bool) -> dict[str, dict[str, float]]:
    """For each `file:line`, the tests that run it and how long they take; measured once by coverage."""
    path = FOLDER / "reached.json"
    if fresh or not path.exists():
        print("Measuring which test runs which line (once) ...", flush=True)
        ignored = [f"--ignore-glob=*test_{word}*" for word in IGNORED]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "reached", "-m", TESTS, *ignored, "-p", "no:xdist"]
        environment = _environment(ROOT / "src") | {"REACHED": str(path)}
        environment["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)
        subprocess.run([*command, "-p", "no:cacheprovider"], cwd=ROOT, env=environment, check=True)
    return json.loads(path.read_text())


def _environment(source: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def judge(mutant: Mutant, tests: list[str], worker: Path) -> str:
    """The verdict on a mutant of what runs at import: its tests in a process of their own."""
    if not tests:
        return "not reached"
    target = worker / "src" / mutant.file
    original = target.read_bytes()
    target.write_bytes(mutant.text(original))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = _environment(worker / "src") | {"HYPOTHESIS_PROFILE": "mutation"}
    try:
        arguments = [*command, f"@{_written(worker / 'tests.txt', tests)}"]
        done = subprocess.run(arguments, cwd=ROOT, env=environment, timeout=PATIENCE, capture_output=True)
        return "survived" if done.returncode == 0 else "killed"
    except subprocess.TimeoutExpired:
        return "hangs"
    finally:
        target.write_bytes(original)


def _written(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines))
    return path


def main() -> None:
    """Draw mutants, judge them, and list the survivors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=150, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0, help="which ones are drawn")
    parser.add_argument("--workers", type=int, default=2, help="mutants judged at a time")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    given = parser.parse_args()
    if given.fresh:
        shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(exist_ok=True)
    by_line = reached(given.fresh)
    results = run(draw(given.count, given.seed), by_line, given.workers)
    survivors = [name for name, verdict in results.items() if verdict in ("survived", "not reached")]
    print(f"\n{len(results) - len(survivors)} of {len(results)} mutants are killed. Survivors:")
    print("\n".join(f"  {results[name]}: {name}" for name in sorted(survivors)))


def tests_of(mutant: Mutant, by_line: dict[str, dict[str, float]]) -> list[str]:
    """The quickest tests that run a line, `SECONDS` of them; where it runs at import, those of the whole file."""
    lines = [number for number in range(mutant.line, 0, -1) if f"{mutant.file}:{number}" in by_line]
    tests = by_line[f"{mutant.file}:{lines[0]}"] if lines else {}
    if not tests:
        inside = (own for key, own in by_line.items() if key.startswith(f"{mutant.file}:"))
        tests = {test: seconds for own in inside for test, seconds in own.items()}
    names = sorted(tests, key=tests.__getitem__)
    return [
        name for name, total in zip(names, accumulate(map(tests.__getitem__, names)), strict=True) if total < SECONDS
    ]


def run(drawn: list[Mutant], by_line: dict[str, dict[str, float]], workers: int) -> dict[str, str]:
    """Judge what has no verdict yet: functions in forks, what runs at import in processes of their own."""
    path = FOLDER / "results.json"
    results: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    tests = {mutant.name: tests_of(mutant, by_line) for mutant in drawn if mutant.name not in results}
    in_forks(drawn, tests, workers)
    results |= _read(FORKED)
    for mutant in drawn:
        if mutant.name not in results:
            results[mutant.name] = judge(mutant, tests[mutant.name], _copy(FOLDER / "worker"))
            print(f"{results[mutant.name]:11s} {mutant.name}", flush=True)
        path.write_text(json.dumps(results, indent=1))
    return {mutant.name: results[mutant.name] for mutant in drawn}


def in_forks(drawn: list[Mutant], tests: dict[str, list[str]], workers: int) -> None:
    """Run scripts/mutants.py, which writes the verdicts on mutants of functions to `FORKED`."""
    waiting = [
        asdict(mutant) | {"name": mutant.name, "tests": tests[mutant.name]} for mutant in drawn if mutant.name in tests
    ]
    (FOLDER / "waiting.json").write_text(json.dumps({"mutants": waiting, "workers": workers, "patience": PATIENCE}))
    wanted = sorted({test for mutant in waiting for test in mutant["tests"]})
    environment = _environment(ROOT / "src") | {"HYPOTHESIS_PROFILE": "mutation", "MUTATION": str(FOLDER)}
    environment["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "mutants", "-p", "no:cacheprovider", "-p", "no:xdist"]
    subprocess.run([*command, f"@{_written(FOLDER / 'tests.txt', wanted)}"], cwd=ROOT, env=environment, check=False)


def _copy(folder: Path) -> Path:
    if not folder.exists():
        shutil.copytree(ROOT / "src", folder / "src")
    return folder


def _read(path: Path) -> dict[str, str]:
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(map(json.loads, lines))


if __name__ == "__main__":
    main()
