"""A reading in words and tables: every head, what a word looks at, warnings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.errors import RegardError
from regard.hf.text_reader import Read
from regard.stats import CAVEAT, Finding, LayerProfile, Reading, Role, RoleTable
from regard.stats.roles import KINDS, QUERIES, ROLE_CAVEAT

#: Characters that one block of the table of heads takes.
BLOCK = 38
#: Of these, what its numbers and the spaces between take.
NUMBERS = 22
#: Tokens named for a layer when a word is looked up.
NUM_TOKENS = 4
#: Heads named for a role.
NUM_ROLES = 6
#: Said where roles cannot be told.
TOO_SHORT = f"Roles need a text of more than {QUERIES} tokens that differ; give one, or --probe."
#: What the numbers of the table are.
LEGEND = (
    "L layer, H head. entropy: in nats, 0 where every query looks at one token, log n where all n are looked at alike. "
    "reach: mean distance in tokens. Last, the strongest link and its weight."
)


def print_reading(console: Console, read: Read, words: Sequence[str]) -> None:
    """Everything, for people."""
    reading = read.reading
    console.print(Text(reading.title, style="bold"))
    console.print(Text(facts(read), style="dim"))
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


def facts(read: Read) -> str:
    """How much was read, and how right it is."""
    profile = read.reading.profile
    layers, heads = len(profile.layers), {layer.num_heads for layer in profile.layers}
    count = f" x {heads.pop()}" if len(heads) == 1 else ""
    said = f"{len(profile.tokens)} tokens, {layers} layer{'s' * (layers > 1)}{count and f'{count} heads'}"
    return f"{said}." if read.error is None else f"{said}; weights x values are the model's output to {read.error:.0e}."


def heads_table(reading: Reading, width: int) -> Table:
    """Entropy, reach and strongest link of every head, in as many blocks side by side as fit the width."""
    num_blocks = max(1, (width - 3) // BLOCK)
    room = max((width - 3) // num_blocks, BLOCK) - NUMBERS
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("L", style="dim")
    for _ in range(num_blocks):
        for title in ("H", "entropy", "reach"):
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


def _cells(reading: Reading, layer: LayerProfile, head: int, room: int) -> tuple[Text, ...]:
    link, fit = layer.strongest(head, reading.profile.ordinary), (room - 3) // 2
    words = (reading.profile.query_tokens[link.query], reading.profile.tokens[link.key])
    named = " → ".join(_short(word, fit) for word in words) if link.key >= 0 else "none"
    entropy, reach = float(layer.values["entropy"][head]), float(layer.values["reach"][head])
    return tuple(map(Text, (str(head), f"{entropy:.2f}", f"{reach:.1f}", named, f"{link.weight:.2f}")))


def _short(token: str, width: int) -> str:
    return token if len(token) <= width else token[: width - 1] + "…"


def print_word(console: Console, reading: Reading, word: str) -> None:
    """What a word looks at: by layer on average, and the heads that look hardest past its neighbours."""
    query = locate(reading, word)
    where = occurrence(reading, word)
    console.print(Text.assemble("What ", (word, "bold"), f" ({where}) looks at, averaged over a layer's heads"))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    for place, layer in enumerate(reading.profile.layers):
        parts = [
            Text.assemble(reading.profile.tokens[j], (f" {w:.2f}", "cyan")) for j, w in _top(reading, query, place)
        ]
        table.add_row(f"layer {layer.number}", *parts)
    console.print(table)
    strong = notable(reading, query)
    if strong:
        console.print(Text(f"The heads that look hardest past its neighbours: {strong}."))


def notable(reading: Reading, query: int, count: int = 3) -> str:
    """`3.1 at “animal” (0.68), ...`: the heads, layer.head, that look hardest past the neighbours of a token."""
    links = reading.notable(query, count)
    return ", ".join(
        f"{n.layer}.{n.head} at “{reading.profile.tokens[n.link.key]}” ({n.link.weight:.2f})" for n in links
    )


def occurrence(reading: Reading, word: str) -> str:
    """Which token a word is, and of how many: `token 10, the first of 3`."""
    query, count = locate(reading, word), len(reading.places(word))
    return f"token {query}, the first of {count}" if count > 1 else f"token {query}"


def _top(reading: Reading, query: int, place: int) -> list[tuple[int, float]]:
    return reading.top(query, place, NUM_TOKENS)


def print_roles(console: Console, found: RoleTable | None, where: str = "this text") -> None:
    """The roles that heads earned, one line a kind, under the sentence that says what a role is not."""
    if found is None:
        console.print(Text(TOO_SHORT))
        return
    if not found.labelled:
        console.print(Text(f"Roles: no head earned a name on {where}."))
    else:
        console.print(Text(f"Roles on {where}: layer.head=score/score when the words are shuffled"))
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for kind in KINDS:
            named = [role for role in found.of(kind) if role.label]
            if named:
                table.add_row(kind, _named(named))
        console.print(table)
    console.print(Text(ROLE_CAVEAT, style="dim"))


def _named(named: Sequence[Role]) -> Text:
    line = Text()
    for role in named[:NUM_ROLES]:
        offset = "" if role.offset is None else f"({role.offset:+d})"
        line.append(f"{role.layer}.{role.head}{offset}=", "bold")  # no space: it must not break over lines
        line.append(f"{role.score:.2f}", "cyan").append(f"/{role.null:.2f}  ")
    more = len(named) - NUM_ROLES
    return line.append(f"and {more} more") if more > 0 else line


def print_findings(console: Console, found: Sequence[Finding]) -> None:
    """Warnings, under the sentence that says what weights do not say."""
    if not found:
        console.print(Text("No warnings."))
    for finding in found:
        console.print(Text.assemble(("! ", "yellow"), finding.sentence))
    console.print(Text(CAVEAT, style="dim"))


def locate(reading: Reading, word: str) -> int:
    """The index of a word the user asked for."""
    query = reading.find(word)
    if query is None:
        raise RegardError(f"see: the text has no word {word!r}. Its tokens: {' '.join(reading.profile.tokens[:60])}")
    return query


def as_data(read: Read, words: Sequence[str]) -> dict[str, Any]:
    """The same as plain data, for --json."""
    reading, profile = read.reading, read.reading.profile
    return {
        "title": reading.title,
        "tokens": profile.tokens,
        "special": profile.special,
        "layers": [_layer_data(reading, layer) for layer in profile.layers],
        "words": [_word_data(reading, word) for word in words],
        "roles": roles_data(reading.roles),
        "warnings": [vars(finding) for finding in reading.findings],
        "caveat": CAVEAT,
        "missing": read.missing,
        "error": read.error,
    }


def roles_data(found: RoleTable | None) -> list[dict[str, Any]] | None:
    """The roles that earned their name; None where the text was too short to tell."""
    return None if found is None else [vars(role) for role in found.labelled]


def _layer_data(reading: Reading, layer: LayerProfile) -> dict[str, Any]:
    heads = []
    for head in range(layer.num_heads):
        numbers = {name: float(values[head]) for name, values in layer.values.items()}
        heads.append({**numbers, "strongest": vars(layer.strongest(head, reading.profile.ordinary))})
    return {"name": layer.name, "number": layer.number, "heads": heads}


def _word_data(reading: Reading, word: str) -> dict[str, Any]:
    query, tokens = locate(reading, word), reading.profile.tokens
    layers = [
        [{"key": j, "token": tokens[j], "weight": w} for j, w in _top(reading, query, place)]
        for place in range(len(reading.maps))
    ]
    heads = [{"layer": n.layer, "head": n.head, **vars(n.link)} for n in reading.notable(query)]
    places = reading.places(word)
    return {"word": word, "query": query, "occurrences": places, "layers": layers, "heads": heads}
