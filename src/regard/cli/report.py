"""Prints the result of a text in full: every head, what a word attends to, roles and warnings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.base.errors import RegardError
from regard.hf.text_reader import TextResult
from regard.stats import CAVEAT, STATISTICS
from regard.stats.layer_kinds import kind_lines
from regard.stats.numbering import head_name
from regard.stats.profile import LayerProfile
from regard.stats.roles import KINDS, QUERIES, Role, RoleTable
from regard.stats.text_reading import TextReading
from regard.stats.warnings import Finding

#: The statistics in the table of heads.
COLUMNS = [statistic for statistic in STATISTICS if statistic.digits is not None]
#: Characters that numbers and spaces take in one block of this table: of a head, of a weight, and of statistics.
NUMBERS = 8 + sum(len(statistic.name) + 1 for statistic in COLUMNS)
#: Width of one block, with the two words of a link.
BLOCK = NUMBERS + 16
#: Tokens named for each layer of a word.
NUM_TOKENS = 4
#: Heads named for a role.
NUM_ROLES = 6
#: Printed instead of roles.
TOO_SHORT = f"To find roles, give a text with more than {QUERIES} different tokens, or use --probe."
#: Explains the table of heads.
LEGEND = (
    "L layer, H head. entropy: in nats, 0 if every query attends to one token, log n if it attends to all n tokens "
    "equally. reach: mean distance in tokens. Then the strongest link and its weight."
)


def print_reading(console: Console, result: TextResult, words: Sequence[str]) -> None:
    """Print every head, the words, the roles and the warnings."""
    reading = result.reading
    console.print(Text(reading.title, style="bold"))
    console.print(Text(facts(result), style="dim"))
    for line in kind_lines(reading.profile):
        console.print(Text(line))
    console.print()
    console.print(heads_table(reading, console.width))
    console.print(Text(LEGEND, style="dim"))
    for word in words:
        console.print()
        print_word(console, reading, word)
    console.print()
    print_roles(console, reading.roles)
    console.print()
    print_findings(console, reading.findings)


def facts(result: TextResult) -> str:
    """The number of tokens, layers and heads, and the result of the verification."""
    profile = result.reading.profile
    layers, heads = len(profile.layers), {layer.num_heads for layer in profile.layers}
    count = f" x {heads.pop()}" if len(heads) == 1 else ""
    sizes = f"{len(profile.tokens)} tokens, {layers} layer{'s' * (layers > 1)}{count and f'{count} heads'}"
    if result.error is None:
        return f"{sizes}."
    return f"{sizes}; checked: weights x values equal each layer's output to {result.error:.0e}."


def heads_table(reading: TextReading, width: int) -> Table:
    """Statistics and the strongest link of every head, in as many columns as fit into the width."""
    num_blocks = max(1, (width - 3) // BLOCK)
    room = max((width - 3) // num_blocks, BLOCK) - NUMBERS
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("L", style="dim")
    for _ in range(num_blocks):
        for title in ("H", *(statistic.name for statistic in COLUMNS)):
            table.add_column(title, justify="right", style="bold" if title == "H" else "")
        table.add_column("strongest link", width=room, no_wrap=True)
        table.add_column("", style="cyan")
    for layer in reading.profile.layers:
        num_rows = -(-layer.num_heads // num_blocks)
        for row in range(num_rows):
            heads = range(row, layer.num_heads, num_rows)
            cells = (cell for head in heads for cell in _cells(reading, layer, head, room))
            table.add_row(str(layer.number) if row == 0 else "", *cells)
    return table


def _cells(reading: TextReading, layer: LayerProfile, head: int, room: int) -> tuple[Text, ...]:
    link, fit = layer.strongest(head, reading.profile.ordinary), (room - 3) // 2
    words = (reading.profile.query_tokens[link.query], reading.profile.tokens[link.key])
    named = " → ".join(_shortened(word, fit) for word in words) if link.key >= 0 else "none"
    numbers = (f"{float(layer.values[column.name][head]):.{column.digits}f}" for column in COLUMNS)
    return tuple(map(Text, (str(head), *numbers, named, f"{link.weight:.2f}")))


def _shortened(token: str, width: int) -> str:
    return token if len(token) <= width else token[: width - 1] + "…"


def print_word(console: Console, reading: TextReading, word: str) -> None:
    """Print what a word attends to: the mean over each layer's heads, and the strongest single heads."""
    query = locate(reading, word)
    where = occurrence(reading, word)
    title = f" ({where}) attends to, as the mean over the heads of each layer"
    console.print(Text.assemble("What ", (f"“{word}”", "bold"), title))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    for place, layer in enumerate(reading.profile.layers):
        parts = [
            Text.assemble(reading.profile.tokens[j], (f" {w:.2f}", "cyan")) for j, w in _top(reading, query, place)
        ]
        table.add_row(f"layer {layer.number}", *parts)
    console.print(table)
    links = notable(reading, query)
    if links:
        console.print(Text(f"Strongest heads on tokens other than its neighbors: {links}."))


def notable(reading: TextReading, query: int, count: int = 3) -> str:
    """`“animal” (L3.H1, 0.68), ...`: the strongest links from a token to others than its neighbors."""
    return ", ".join(
        f"“{reading.profile.tokens[n.link.key]}” ({head_name(n.layer, n.head)}, {n.link.weight:.2f})"
        for n in reading.notable(query, count)
    )


def occurrence(reading: TextReading, word: str) -> str:
    """Where a word stands: `token 10`, or `token 10, the first of 3` if the text has it three times."""
    query, count = locate(reading, word), len(reading.occurrences(word))
    return f"token {query}, the first of {count}" if count > 1 else f"token {query}"


def _top(reading: TextReading, query: int, place: int) -> list[tuple[int, float]]:
    return reading.top(query, place, NUM_TOKENS)


def print_roles(console: Console, roles: RoleTable | None, where: str = "this text") -> None:
    """Print each head's role, with its score on this text and on shuffled text, one line per kind."""
    if roles is None:
        console.print(Text(TOO_SHORT))
        return
    if not roles.labeled:
        console.print(Text(f"Roles: no head has one on {where}."))
    else:
        console.print(Text(f"Roles on {where}: head=score/score on shuffled text"))
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for kind in KINDS:
            named = [role for role in roles.of(kind) if role.label]
            if named:
                table.add_row(kind, _named(named))
        console.print(table)
    console.print(Text(roles.caveat, style="dim"))


def _named(named: Sequence[Role]) -> Text:
    line = Text()
    for role in named[:NUM_ROLES]:
        offset = "" if role.offset is None else f"({role.offset:+d})"
        line.append(f"{head_name(role.layer, role.head)}{offset}=", "bold")  # no space: it must not break over lines
        line.append(f"{role.score:.2f}", "cyan").append(f"/{role.null:.2f}  ")
    more = len(named) - NUM_ROLES
    return line.append(f"and {more} more") if more > 0 else line


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print all warnings, and what weights do not tell."""
    if not findings:
        console.print(Text("No warnings."))
    for finding in findings:
        console.print(Text.assemble(("! ", "yellow"), finding.sentence))
    console.print(Text(CAVEAT, style="dim"))


def locate(reading: TextReading, word: str) -> int:
    """The index of the first token of a word; a word that the text does not have is refused."""
    query = reading.find(word)
    if query is None:
        raise RegardError(
            f"analyze: the text has no word {word!r}. Its tokens: {' '.join(reading.profile.tokens[:60])}"
        )
    return query


def as_data(result: TextResult, words: Sequence[str]) -> dict[str, Any]:
    """The same numbers as plain data, for --json."""
    reading, profile = result.reading, result.reading.profile
    return {
        "title": reading.title,
        "tokens": profile.tokens,
        "special": profile.special,
        "layers": [_layer_data(reading, layer) for layer in profile.layers],
        "words": [_word_data(reading, word) for word in words],
        "roles": roles_data(reading.roles),
        "roles_sampled": None if reading.roles is None else reading.roles.sampled,
        "warnings": [vars(finding) for finding in reading.findings],
        "caveat": CAVEAT,
        "missing": result.missing,
        "error": result.error,
    }


def roles_data(roles: RoleTable | None) -> list[dict[str, Any]] | None:
    """The roles as plain data; None if the text was too short to find any."""
    return None if roles is None else [vars(role) for role in roles.labeled]


def _layer_data(reading: TextReading, layer: LayerProfile) -> dict[str, Any]:
    heads = []
    for head in range(layer.num_heads):
        numbers = {name: float(values[head]) for name, values in layer.values.items()}
        heads.append({**numbers, "strongest": vars(layer.strongest(head, reading.profile.ordinary))})
    about = {"name": layer.name, "number": layer.number, "kind": layer.kind, "negative": layer.negative}
    return about | {"averaged": layer.averaged, "heads": heads}


def _word_data(reading: TextReading, word: str) -> dict[str, Any]:
    query, tokens = locate(reading, word), reading.profile.tokens
    layers = [
        [{"key": j, "token": tokens[j], "weight": w} for j, w in _top(reading, query, place)]
        for place in range(len(reading.maps))
    ]
    heads = [{"layer": n.layer, "head": n.head, **vars(n.link)} for n in reading.notable(query)]
    places = reading.occurrences(word)
    return {"word": word, "query": query, "occurrences": places, "layers": layers, "heads": heads}
