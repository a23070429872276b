"""The blocks of code of a page, and the commands in them."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^(?P<indent> *)```(?P<about>[^`\n]*)\n(?P<code>.*?)^(?P=indent)``` *$", re.M | re.S)
#: The languages of blocks. A fence without a language holds commands.
SHELL, SHOWN = {"", "sh", "bash"}, {"text", "toml", "json", "yaml"}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its title (the name of the file that it is) and its lines."""

    language: str
    title: str | None
    code: str
    line: int


def pages() -> list[Path]:
    """Every page that is written by hand, new ones too. The log is history: nobody types its code."""
    folders = [ROOT / "docs", *(ROOT / "docs" / name for name in ("for", "guides", "comparison"))]
    listed = [path for folder in folders for path in folder.glob("*.md") if path.name not in ("log.md", "report.md")]
    return sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *listed])


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a page in their order."""
    blocks = []
    for match in FENCE.finditer(text):
        language, _, rest = match["about"].strip().partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        line = text.count("\n", 0, match.start()) + 2
        blocks.append(Block(language, title and title[1], textwrap.dedent(match["code"]), line))
    return blocks


def commands_of(block: Block) -> list[str]:
    """The commands of a block of a shell, each on one line, without comments."""
    joined = re.sub(r"\\\n\s*", "", block.code)
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in joined.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line]
