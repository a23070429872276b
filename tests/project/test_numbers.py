"""A measured number of a page has a command near it that measures it again."""

from __future__ import annotations

import re

import pytest

from page_blocks import ROOT

FENCED = re.compile(r"^ *```.*?^ *```", re.M | re.S)
#: A time, a size in memory, a share, a score of translation, a mean with its deviation.
UNITS = "%|ms|s|µs|seconds?|minutes?|hours?|times|[kMG]B|[KMG]iB"
MEASURED = re.compile(rf"(?<![\w.`/-])\d[\d,.]*(?: to \d[\d,.]*)? (?:{UNITS})(?![\w-])|\bBLEU (?:of )?\d|\b\d[\d.]* ± ")
#: What measures: a script, a benchmark, a comparison, a time; or the page that has the number with its command.
MEASURES = re.compile(
    r"(?:`|\*\*: |^)(?:time )?(?:python (?:-m benchmarks|docs/claims|examples|scripts|grade)|make "
    r"|regard (?:compare|evaluate|check|analyze|plan)\b)"
    r"|\]\([^)]*(?:benchmarks\.md|claims\.md|claims/|examples/)[^)]*\)",
    re.M,
)
#: Numbers that nobody measured, and what they are. What others say of their own programs has its source beside it.
NOT_MEASURED = {
    "docs/guides/images.md": {"64 MiB": "a limit of the code", "10 ms": "of Whisper's features"},
    "docs/guides/roles.md": {"0.02 seconds": "of Whisper's frames"},
    "docs/guides/lectures.md": {
        "98 %": "by the formula of ALiBi, 1 - exp(-32 / 8)",
        **dict.fromkeys(("512 MiB", "768 MiB"), "by arithmetic: heads x 4,096 x 4,096 x 4 bytes"),
    },
    "docs/guides/machines.md": {"1.5 times": "counted: an all-gather more"},
    "docs/guides/troubleshooting.md": {"19,073 MiB": "the error below the heading prints it"},
    "docs/page-data.md": dict.fromkeys(("128 MiB", "256 MiB"), "limits of the code"),
    "docs/ring.md": {
        **dict.fromkeys(("30 minutes", "10 minutes"), "time-outs of gloo and NCCL"),
        **dict.fromkeys(("85 %", "90 %"), "of the README of ring-flash-attn"),
    },
    "docs/support.md": dict.fromkeys(("2,199 GB", "10.7 GB", "0.7 GB"), "by the formula of the section"),
}
#: Written by a command that stands on them.
WHOLE = {"docs/comparison/report.md": "regard compare --preset full"}
#: The pages of users. The log and docs/development/ say how things were measured in their own way.
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("[cfg]*/*.md")])
PAGES.remove(ROOT / "docs" / "log.md")


def without_command(text):
    """The measured numbers of sections in which nothing measures."""
    code = FENCED.sub(lambda block: "\n".join(f"\0{line}" for line in block[0].splitlines()), text)
    for section in re.split(r"(?m)^(?=#+ )", code):
        prose = "\n".join(line for line in section.splitlines() if not line.startswith("\0"))
        if not MEASURES.search(section.replace("\0", "")):
            yield from (found[0] for found in MEASURED.finditer(re.sub(r"`[^`]*`", "``", prose)))


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_measured_number_names_its_command(page):
    text = page.read_text()
    if command := WHOLE.get(name_of(page)):
        assert command in text
        return
    known = NOT_MEASURED.get(name_of(page), {})
    found = set(without_command(text))
    assert found - {*known} == set(), "name the command that measures them, or leave them out"
    assert set(known) - found == set(), "these are not on the page any more"


def test_a_number_without_a_command_is_found():
    section = "# A\nIt takes {} and no more.\n"
    for number in ("8 s", "2 to 3 seconds", "41 %", "1.5 times", "13.7 MB"):
        assert list(without_command(section.format(number))) == [number]
        assert not list(without_command(section.format(number) + "\n(`python -m benchmarks viewing`)"))
        assert list(without_command("# B\n`make bench`\n" + section.format(number))) == [number], "of another section"
    assert not list(without_command(section.format("`8 s`") + "```\n9 s\n```\n"))
