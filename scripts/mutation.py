"""Change the source in one place, run the tests that reach this place, and see whether one fails.

    python scripts/mutation.py --count 150 --seed 0 --workers 2

A mutant that no test kills is a survivor: the tests say nothing about that place, or the change makes no difference.
The run can be stopped and started again; it keeps its results in `.mutation/`. After tests were added, `--again`
judges the survivors once more; `--fresh` forgets all verdicts, as a changed source asks for. What only checks
(assert, strict=True) is not changed, since it makes no difference to right code. Nor are estimates of time and memory,
nor the numbers that stand at the top of files of engines and maps (sizes of tiles, budgets): they choose between
computations with equal results, and benchmarks judge those; nor the statements, conditions and calls of `min` and `max`
of these folders that read such a number of any of their files, since they choose sizes too. Nor is `device=`, which
makes no difference on a CPU: tests/tools/accelerator_budget.py judges it. And `a if a < b else b` stays: with `<=` it
is the same. Bounds of type variables stay, and so does a number to which 1 adds nothing, such as 1e30.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from difflib import SequenceMatcher
from fnmatch import fnmatch
from functools import cache
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".mutation"
#: Source whose results everything else shows.
TARGETS = (
    "pieces/*.py",
    "engine/*.py",
    "maps/*.py",
    "attention.py",
    "caches.py",
    *("base/positions.py", "base/shapes.py", "base/spans.py"),
    "attention_output.py",
    "nn/projected_kv.py",
)
#: The FlexAttention lowering compiles kernels, and `speed_model` predicts seconds: no quick test can judge either.
EXCLUDED = ("flex.py", "lowering.py", "machine.py", "words.py", "__init__.py", "formatting.py", "speed_model.py")
#: Tests that can see those: quick ones, of the layers that show their results, and none that needs a browser.
TESTS = "not slow and not example"
IGNORED = (
    *("alignment", "bench", "changed", "cli", "cluster", "comparison", "data", "docs", "evaluation", "figures", "flex"),
    *("importance", "lab", "load_model", "page_", "pruning", "register.", "replay", "report", "scripts", "training"),
    *("translat", "widget"),
)
#: Functions that are not changed: texts, checks, and what only decides which engine computes an equal result, and in
#: blocks of which size.
UNCHANGED = (
    *("__repr__", "__str__", "check", "refusal", "cost"),
    *("_bytes_per_weight", "_pace", "bytes_per_pair", "floats_per_pair", "mask_bytes"),
)
#: Folders in whose files plain numbers with names of capitals are sizes of tiles, budgets and thresholds of speed.
WITH_SETTINGS = ("engine", "maps")
#: Arguments that make no difference to right code on a CPU, or only to what is printed.
WITHOUT_EFFECT = ("strict", "device", "repr", "stacklevel")
#: Seconds after which a mutant hangs.
PATIENCE = 240
SURVIVES = ("survived", "unreached")

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
    function: str
    line: int
    start: int
    stop: int
    before: str
    after: str
    is_in_body: bool  # of a function; else it runs at import
    repeat: int = 0

    def text(self, original: bytes) -> bytes:
        """The source with this change."""
        return original[: self.start] + self.after.encode() + original[self.stop :]

    @property
    def name(self) -> str:
        """The same as long as the function has this expression: lines may move, and other functions may change."""
        again = f" #{self.repeat + 1}" if self.repeat else ""
        return f"{self.file}:{self.function} {self.before!r} -> {self.after!r}{again}"


def mutants(file: Path) -> list[Mutant]:
    """Every change that one of the rules makes to a file, error messages and annotations left out."""
    text = file.read_text(encoding="utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    data, name, found = text.encode(), str(file.relative_to(ROOT / "src")), []
    repeats: Counter[str] = Counter()
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    in_bodies = {line for node in functions for line in range(node.body[0].lineno, node.end_lineno + 1)}
    settings: Collection[str] = ()
    if file.parent.name in WITH_SETTINGS:
        settings = _all_settings()
        tree.body = [statement for statement in tree.body if not _settings(statement)]
    for function, node in _code(tree, settings):
        for after in _changes(node):
            start, stop = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            before, is_in_body = data[start:stop].decode(), node.lineno in in_bodies
            mutant = Mutant(name, function, node.lineno, start, stop, before, after, is_in_body)
            found.append(replace(mutant, repeat=repeats[mutant.name]))
            repeats[mutant.name] += 1
    return found


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@cache
def _all_settings() -> frozenset[str]:
    """The names of such numbers in all files of these folders, because one file reads those of another."""
    files = [file for folder in WITH_SETTINGS for file in (ROOT / "src" / "regard" / folder).glob("*.py")]
    statements = [statement for file in files for statement in ast.parse(file.read_text(encoding="utf-8")).body]
    return frozenset(name for statement in statements for name in _settings(statement))


def _settings(statement: ast.stmt) -> list[str]:
    """The names of capitals that a statement gives to plain numbers, if it calls nothing."""
    match statement:
        case ast.Assign(targets=[ast.Name() | ast.Tuple() as target], value=value):
            parts = ast.Constant, ast.BinOp, ast.operator, ast.Tuple, ast.expr_context
            names = [part.id for part in ast.walk(target) if isinstance(part, ast.Name)]
            is_plain = all(isinstance(part, parts) and not _is_text(part) for part in ast.walk(value))
            return names if is_plain and all(map(str.isupper, names)) else []
    return []


def _code(node: ast.AST, settings: Collection[str] = (), within: str = "") -> Iterator[tuple[str, ast.AST]]:
    """The nodes that compute, with their functions: no text, no annotation, nothing that only checks or is raised.

    Nor what chooses a size by one of the `settings`.
    """
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.keyword) and node.arg in WITHOUT_EFFECT:
        return
    if _is_unchanged(node):
        return
    is_choice = isinstance(node, ast.Assign | ast.AugAssign | ast.Compare | ast.BoolOp) or _is_twin(node)
    if is_choice and _reads(node, settings):
        return
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        within = f"{within}.{node.name}".lstrip(".")
    yield within, node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list", "bases"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not (field == "test" and _is_lesser_or_greater(node)):
                    yield from _code(child, settings, within)


def _is_unchanged(node: ast.AST) -> bool:
    """Whether a node defines one of the UNCHANGED as a function or as a number, or says a type."""
    match node:
        case (
            ast.FunctionDef(name)
            | ast.Assign([ast.Name(name)], ast.Constant())
            | ast.AnnAssign(ast.Name(name), value=ast.Constant())
        ):
            return name in UNCHANGED
        case ast.Call(ast.Name("TypeVar")):
            return True
    return False


def _reads(node: ast.AST, settings: Collection[str]) -> bool:
    names = (getattr(part, "id", getattr(part, "attr", None)) for part in ast.walk(node))
    return any(name in settings for name in names)


def _is_twin(node: ast.AST) -> bool:
    """Whether a node is a call of `min`, `max` or another of the TWINS."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TWINS


def _is_lesser_or_greater(node: ast.AST) -> bool:
    """Whether a node is `a if a < b else b`, or the same with another comparison."""
    match node:
        case ast.IfExp(test=ast.Compare(left=left, comparators=[right]), body=body, orelse=orelse):
            return {ast.dump(left), ast.dump(right)} == {ast.dump(body), ast.dump(orelse)}
    return False


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
        case ast.Constant(value=float(value)) if value + 1 != value:
            yield str(value + 1)
        case ast.Call(func=func, args=args, keywords=keywords):
            if isinstance(func, ast.Name) and func.id in TWINS:
                yield ast.unparse(ast.Call(ast.Name(TWINS[func.id]), args, keywords))
            if isinstance(func, ast.Attribute) and func.attr in TWINS:
                yield ast.unparse(ast.Call(ast.Attribute(func.value, TWINS[func.attr]), args, keywords))
            for left_out in keywords:
                if left_out.arg in WITHOUT_EFFECT:
                    continue
                rest = [keyword for keyword in keywords if keyword is not left_out]
                yield ast.unparse(ast.Call(func, args, rest))
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "pass"


def draw(count: int, seed: int) -> list[Mutant]:
    """The mutants of the targets whose hashes come first: a change of the source exchanges few of them."""
    files = sorted({file for target in TARGETS for file in (ROOT / "src" / "regard").glob(target)})
    every = [mutant for file in files if file.name not in EXCLUDED for mutant in mutants(file)]
    return sorted(every, key=lambda mutant: sha256(f"{seed} {mutant.name}".encode()).digest())[:count]


def lines_reached() -> dict[str, dict[str, float]]:
    """For each `file:line`, the tests that run it and their seconds, by coverage.

    Measured again only for test files that changed; a line of the source that moved keeps its tests.
    """
    path = FOLDER / "reached.json"
    known = json.loads(path.read_text()) if path.exists() else {"source": {}, "files": {}, "lines": {}}
    source = {str(f.relative_to(ROOT / "src")): f.read_text() for f in sorted((ROOT / "src").rglob("*.py"))}
    lines = _moved(known["lines"], known["source"], source)
    now = {file.relative_to(ROOT).as_posix(): sha256(file.read_bytes()).hexdigest() for file in _test_files()}
    changed = [name for name, digest in now.items() if known["files"].get(name) != digest]
    for line, tests in lines.items():
        lines[line] = {test: cost for test, cost in tests.items() if test.split("::")[0] in now.keys() - changed}
    if changed:
        print(f"Measuring which test runs which line: {len(changed)} files of tests ...", flush=True)
        for line, tests in _measured(changed).items():
            lines[line] = lines.get(line, {}) | tests
    path.write_text(json.dumps({"source": source, "files": now, "lines": lines}))
    return lines


def _moved(lines: dict[str, Any], before: dict[str, str], after: dict[str, str]) -> dict[str, Any]:
    """What is known of lines of a source, for the lines of another that are the same."""
    moved = {}
    for file in before.keys() & after.keys():
        texts = before[file].splitlines(), after[file].splitlines()
        for first, second, count in SequenceMatcher(None, *texts, autojunk=False).get_matching_blocks():
            for n in range(1, count + 1):
                if f"{file}:{first + n}" in lines:
                    moved[f"{file}:{second + n}"] = lines[f"{file}:{first + n}"]
    return moved


def _test_files() -> list[Path]:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [file for file in files if not any(fnmatch(file.name, f"test_{word}*") for word in IGNORED)]


def _measured(files: list[str]) -> dict[str, dict[str, float]]:
    path = FOLDER / "measured.json"
    done = _pytest(["-m", TESTS, *files], plugin="reached", REACHED=str(path))
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit("The tests could not run.")
    return json.loads(path.read_text())


def _pytest(
    arguments: list[str], plugin: str = "", source: Path = ROOT / "src", **more: str
) -> CompletedProcess[bytes]:
    """pytest in one process, with the random numbers of hypothesis fixed, against the source in a folder."""
    environment = os.environ | {"PYTHONPATH": f"{source}{os.pathsep}{Path(__file__).parent}", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "HYPOTHESIS_PROFILE": "mutation", "REGARD_EXAMPLES": "40"} | more
    plugins = [option for name in (plugin, "no:cacheprovider", "no:xdist") if name for option in ("-p", name)]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *arguments]
    if plugin:
        return subprocess.run(command, cwd=ROOT, env=environment)
    return subprocess.run(command, cwd=ROOT, env=environment, timeout=10 * PATIENCE, capture_output=True)


def tests_of(mutant: Mutant, lines: dict[str, dict[str, float]], seconds: float) -> list[str]:
    """Tests that run a line, of at most `seconds` together: each function once before one with other parameters.

    Where the line runs at import, those that run anything of its file.
    """
    before = [number for number in range(mutant.line, 0, -1) if f"{mutant.file}:{number}" in lines]
    tests = lines[f"{mutant.file}:{before[0]}"] if before and mutant.is_in_body else {}
    if not tests:
        inside = (own for key, own in lines.items() if key.startswith(f"{mutant.file}:"))
        tests = {test: seconds for own in inside for test, seconds in own.items()}
    turn: Counter[str] = Counter()
    turns = {}
    for name in sorted(tests, key=tests.__getitem__):
        turns[name] = turn[name.split("[")[0]]
        turn[name.split("[")[0]] += 1
    names = sorted(tests, key=lambda name: (turns[name], tests[name]))
    totals = accumulate(tests[name] for name in names)
    return [name for name, total in zip(names, totals, strict=True) if total < seconds]


def judge_all(drawn: list[Mutant], lines: dict[str, dict[str, float]], given: argparse.Namespace) -> dict[str, Any]:
    """Judge what has no verdict yet: functions in forks of one process, what runs at import in others."""
    known = verdicts()
    waiting = {m: tests_of(m, lines, given.seconds) for m in drawn if m.name not in known}
    if waiting:
        in_forks(waiting, len(drawn), given.workers)
        known = verdicts()
        shutil.rmtree(FOLDER / "worker", ignore_errors=True)
        shutil.copytree(ROOT / "src", FOLDER / "worker" / "src")
    for mutant, tests in waiting.items():
        if mutant.name not in known:
            known |= dict([write_verdict(mutant.name, judge(mutant, tests))])
            print(f"[{len(known)}/{len(drawn)}] {known[mutant.name]['verdict']:8s} {mutant.name}", flush=True)
    return {mutant.name: known[mutant.name] for mutant in drawn}


def in_forks(waiting: dict[Mutant, list[str]], count: int, workers: int) -> None:
    """Run scripts/mutants.py, which adds the verdicts on mutants of functions."""
    mutants = [asdict(mutant) | {"name": mutant.name, "tests": tests} for mutant, tests in waiting.items()]
    wish = {"mutants": mutants, "count": count, "workers": workers, "patience": PATIENCE}
    (FOLDER / "waiting.json").write_text(json.dumps(wish))
    wanted = {test for tests in waiting.values() for test in tests}
    if wanted:
        _pytest(["-s", f"@{_listed(wanted)}"], plugin="mutants", MUTATION=str(FOLDER))


def judge(mutant: Mutant, tests: list[str]) -> str:
    """The verdict on a mutant of what runs at import: its tests in a process of their own."""
    if not tests:
        return "unreached"
    source = FOLDER / "worker" / "src"
    original = (source / mutant.file).read_bytes()
    (source / mutant.file).write_bytes(mutant.text(original))
    try:
        done = _pytest(["-x", f"@{_listed(tests)}"], source=source)
    except subprocess.TimeoutExpired:
        return "hangs"
    finally:
        (source / mutant.file).write_bytes(original)
    if done.returncode == 0:
        return "survived"
    failed = [test for test in tests if f"FAILED {test}" in done.stdout.decode()]
    if failed and _pytest(failed, source=source).returncode:
        print(f"left out: {failed[-1]} fails with the unchanged source", flush=True)
        return judge(mutant, [test for test in tests if test not in failed])
    return "killed" if failed else "crashes"


def _listed(tests: Iterable[str]) -> Path:
    path = FOLDER / "tests.txt"
    path.write_text("\n".join(sorted(tests)))
    return path


def verdicts() -> dict[str, Any]:
    """Mutant -> its verdict and what killed it, of this run and of those before it."""
    path = FOLDER / "verdicts.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(map(json.loads, lines))


def write_verdict(name: str, verdict: str) -> tuple[str, dict[str, str]]:
    """Add a verdict to the file at once, so that a stopped run can go on."""
    with (FOLDER / "verdicts.jsonl").open("a") as file:
        file.write(json.dumps([name, {"verdict": verdict}]) + "\n")
    return name, {"verdict": verdict}


def forget_survivors() -> None:
    """Survivors have no verdict any more."""
    kept = [json.dumps(pair) for pair in verdicts().items() if pair[1]["verdict"] not in SURVIVES]
    (FOLDER / "verdicts.jsonl").write_text("".join(f"{line}\n" for line in kept))


def main() -> None:
    """Draw mutants, judge them, and list the survivors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=150, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0, help="which ones are drawn")
    parser.add_argument("--workers", type=int, default=2, help="mutants judged at a time")
    parser.add_argument("--seconds", type=float, default=60, help="seconds of tests that a mutant meets")
    parser.add_argument("--again", action="store_true", help="judge earlier survivors again")
    parser.add_argument("--fresh", action="store_true", help="forget earlier verdicts")
    given = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    if given.fresh:
        (FOLDER / "verdicts.jsonl").unlink(missing_ok=True)
    if given.again:
        forget_survivors()
    drawn = draw(given.count, given.seed)
    print_table(drawn, judge_all(drawn, lines_reached(), given))


def print_table(drawn: list[Mutant], results: dict[str, Any]) -> None:
    """For each file how many mutants are killed, then the survivors."""
    survivors = [mutant for mutant in drawn if results[mutant.name]["verdict"] in SURVIVES]
    of_file, left = Counter(mutant.file for mutant in drawn), Counter(mutant.file for mutant in survivors)
    print("\nkilled  drawn  file")
    for file, count in sorted(of_file.items()):
        print(f"{count - left[file]:6d} {count:6d}  {file}")
    share = 100 * (len(drawn) - len(survivors)) / len(drawn)
    print(f"{len(drawn) - len(survivors):6d} {len(drawn):6d}  all: {share:.1f} % are killed. Survivors:")
    for mutant in sorted(survivors, key=lambda mutant: (mutant.file, mutant.line)):
        print(f"  {results[mutant.name]['verdict']}: line {mutant.line} of {mutant.name}")


if __name__ == "__main__":
    main()
