"""Prints the result of a text: in about ten lines, or in full with every head; and the heads in which texts differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from regard.base.errors import RegardError
from regard.hf import importance, pruning_curve
from regard.hf.heads.pruning_curve import ORDERS, TENTHS
from regard.hf.text_reader import TextReader, TextResult
from regard.stats import CAVEAT, STATISTICS
from regard.stats.layer_kinds import kind_lines
from regard.stats.numbering import head_name
from regard.stats.profile import LayerProfile, ModelProfile
from regard.stats.roles import CONTENT, KINDS, LABEL, QUERIES, Role, RoleTable
from regard.stats.text_reading import NEARBY, TextReading, entropies_outside, nearby_shares, text_differences
from regard.stats.warnings import Finding, warning_lines

#: The statistics in the table of heads.
COLUMNS = [statistic for statistic in STATISTICS if statistic.digits is not None]
#: Characters of the numbers and spaces in one block of this table: a head, a weight and the statistics.
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
    """The number of tokens, layers and heads, and the result of the verification.

    `result.error` is the largest difference between weights x values and the output of a layer; None if no row was
    verified.
    """
    profile = result.reading.profile
    layers, heads = len(profile.layers), {layer.num_heads for layer in profile.layers}
    # numbers of heads that differ between layers are not named
    (most, *others) = heads
    count = "" if others else f" x {most} head{'s' * (most > 1)}"
    sizes = f"{len(profile.tokens)} tokens, {layers} layer{'s' * (layers > 1)}{count}"
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
    """The cells of one head in the table: its number, its statistics, its strongest link and the weight.

    `room` are the characters for both words of the link.
    """
    link, fit = layer.strongest(head, reading.profile.ordinary), (room - 3) // 2
    words = (reading.profile.query_tokens[link.query], reading.profile.tokens[link.key])
    named = " → ".join(_shortened(word, fit) for word in words) if link.key >= 0 else "none"
    numbers = (f"{float(layer.values[column.name][head]):.{column.digits}f}" for column in COLUMNS)
    return tuple(map(Text, (str(head), *numbers, named, f"{link.weight:.2f}")))


def _shortened(token: str, width: int) -> str:
    """A token with at most `width` characters."""
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
    """The (token, weight) of the largest weights of a query, as the mean over the heads of the layer at `place`."""
    return reading.top(query, place, NUM_TOKENS)


def print_roles(console: Console, roles: RoleTable | None, where: str = "this text") -> None:
    """Print each head's role, with its score on this text and on shuffled text, one line per kind.

    `where` says which text this is.
    """
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
    """The first heads of a kind of role with their scores, and how many more there are."""
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
    """A layer as plain data: its statistics by head, and the strongest link of each head."""
    heads = []
    for head in range(layer.num_heads):
        numbers = {name: float(values[head]) for name, values in layer.values.items()}
        heads.append({**numbers, "strongest": vars(layer.strongest(head, reading.profile.ordinary))})
    about = {"name": layer.name, "number": layer.number, "kind": layer.kind, "negative": layer.negative}
    return about | {"averaged": layer.averaged, "heads": heads}


def _word_data(reading: TextReading, word: str) -> dict[str, Any]:
    """What a word attends to as plain data: in each layer, and in single heads."""
    query, tokens = locate(reading, word), reading.profile.tokens
    layers = [
        [{"key": j, "token": tokens[j], "weight": w} for j, w in _top(reading, query, place)]
        for place in range(len(reading.maps))
    ]
    heads = [{"layer": n.layer, "head": n.head, **vars(n.link)} for n in reading.notable(query)]
    places = reading.occurrences(word)
    return {"word": word, "query": query, "occurrences": places, "layers": layers, "heads": heads}


#: Kinds of roles that are printed, and heads named in a line.
NUM_KINDS, NUM_HEADS = 3, 2
#: Kinds of roles whose score is not a share of the weight.
SCORE = {"broad": "evenness "}
#: The last line.
MORE = "More: --table (every head), --word WORD, --probe, --save DIR (a page), --json."


def print_summary(console: Console, result: TextResult, words: Sequence[str]) -> None:
    """Print the title, the sizes and the statements."""
    console.print(Text(result.reading.title, style="bold"))
    console.print(Text(facts(result), style="dim"))
    print_statements(console, result.reading, words)


def print_statements(console: Console, reading: TextReading, words: Sequence[str]) -> None:
    """Print roles, the most focused and the broadest head, what each word attends to, and warnings."""
    for line in (
        *kind_lines(reading.profile),
        *role_lines(reading),
        extremes(reading.profile),
        *word_lines(reading, words),
    ):
        console.print(line)
    num_heads = sum(layer.num_heads for layer in reading.profile.layers)
    for line in warning_lines(reading.findings, num_heads).values():
        console.print(Text.assemble(("! ", "yellow"), line))


def print_probe(console: Console, probe: RoleTable) -> None:
    """Print all kinds of roles on the probe; induction and duplicate-token heads come first."""
    lines = list(named_lines(probe)) or [Text("No head has a role.")]
    console.print(Text("On random tokens, each of them twice:", style="dim"))
    for line in lines:
        console.print(line)


def print_ending(console: Console) -> None:
    """Print what weights do not tell, and the options that print more."""
    console.print(Text(CAVEAT, style="dim"))
    console.print(Text(MORE, style="dim"))


def role_lines(reading: TextReading) -> Iterator[Text]:
    """One line for each of the first kinds of roles; for a short text, the heads with most weight on nearby tokens."""
    if reading.roles is None:
        yield from _nearby_lines(reading)
        yield Text(TOO_SHORT)
        return
    lines = list(named_lines(reading.roles))
    yield from lines[:NUM_KINDS]
    if not lines:
        yield Text("No head has a role on this text.")
    if reading.roles.note:
        yield Text(reading.roles.note, style="dim")


def named_lines(table: RoleTable) -> Iterator[Text]:
    """One line for each kind: `L0.H2 and L2.H11 attend to the previous token (0.81; 0.79 on shuffled text).`."""
    for kind in (*(k for k in KINDS if k in CONTENT), *(k for k in KINDS if k not in CONTENT)):
        named = [role for role in table.of(kind) if role.label]
        if named:
            best = named[0]
            names = [head_name(role.layer, role.head) for role in named]
            verb = "attend" if len(names) > 1 else "attends"
            of = SCORE.get(kind, "") if best.offset is None else f"{best.offset:+d} for {names[0]}: "
            score, null = (f"{best.score:.2f}", "cyan"), f"; {best.null:.2f} on shuffled text)."
            yield Text.assemble((_listed(names), "bold"), f" {verb} to {KINDS[kind]} ({of}", score, null)


def _nearby_lines(reading: TextReading) -> Iterator[Text]:
    """One line: the head with most weight on each token of `NEARBY`, not counting the first token.

    None if no head has at least `LABEL` of its weight there. The reading has a whole text as queries and keys.
    """
    best = [(target, max(nearby_shares(reading, name))) for name, target in NEARBY.items()]
    clauses = [((h.name, "bold"), f"{100 * h.value:.0f} %", target) for target, h in best if h.value >= LABEL]
    if clauses:
        head, share, target = clauses[0]
        more = (part for head, share, target in clauses[1:] for part in ("; ", head, f" {share} on {target}"))
        yield Text.assemble(head, f" puts {share} of its weight on {target}", *more, ".")


def extremes(profile: ModelProfile) -> Text:
    """The most focused and the broadest head; exp(entropy) is the effective number of tokens.

    The entropy is that of the weight outside the first token and special tokens. Heads with less than `LABEL` of their
    weight there are left out: they hardly attend to the text.
    """
    heads = list(entropies_outside(profile))
    if not heads:
        return Text("Every head puts most of its weight on the first token and on special tokens.")
    focused, broadest = min(heads), max(heads)
    return Text.assemble(
        *("Most focused: ", (focused.name, "bold"), f" (effectively {math.exp(focused.value):.1f} tokens); "),
        *("broadest: ", (broadest.name, "bold"), f" (effectively {math.exp(broadest.value):.1f} tokens)."),
    )


def word_lines(reading: TextReading, words: Sequence[str]) -> Iterator[Text]:
    """For each word the tokens beyond its neighbors to which single heads attend most, and what is left out."""
    for word in words:
        links = notable(reading, locate(reading, word), NUM_HEADS)
        text = f"attends most to {links}" if links else "attends to nothing but its neighbors"
        yield Text.assemble((f"“{word}”", "bold"), f" ({occurrence(reading, word)}) {text}.")
    if words:
        first = ", the first token" if reading.profile.is_self_attention else ""
        yield Text(f"Left out: the word itself, its neighbors{first} and special tokens.", style="dim")


def _listed(names: Sequence[str]) -> str:
    """`L1.H2, L1.H3 and 4 more`."""
    shown = list(names[:NUM_HEADS])
    more = len(names) - len(shown)
    last = f"{more} more" if more else shown.pop() if len(shown) > 1 else ""
    return f"{', '.join(shown)} and {last}" if last else shown[0]


#: Heads in the table, and in the summary.
NUM_DIFFERENT, FEW_HEADS = 20, 5


def print_differences(console: Console, readings: Sequence[TextReading], count: int = NUM_DIFFERENT) -> None:
    """Print the `count` heads that differ most: the statistic in which they differ, and its value on each text."""
    letters = [letter_of(number) for number in range(len(readings))]
    console.print(Text("The heads that differ most between the texts", style="bold"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("L", "H"):
        table.add_column(title, justify="right", style="bold")
    table.add_column("differs in")
    for title in (*letters, "spread"):
        table.add_column(title, justify="right", style="cyan" if title == "spread" else "")
    for head in text_differences(readings)[:count]:
        numbers = (f"{value:.2f}" for value in (*head.values, head.spread))
        table.add_row(str(head.layer), str(head.head), head.statistic, *numbers)
    console.print(table)


def letter_of(number: int) -> str:
    """The name of a text: A, B, ... Z, then T27, T28, ..."""
    return chr(ord("A") + number) if number < 26 else f"T{number + 1}"


def check_words(readings: Sequence[TextReading], words: Sequence[str]) -> None:
    """Refuse a word that is in none of the texts."""
    for word in words:
        if all(reading.find(word) is None for reading in readings):
            raise RegardError(f"analyze: none of the {len(readings)} texts has the word {word!r}.")


#: Heads named in a line.
NUM_NAMED = 3


def with_importance(reader: TextReader, text: str, result: TextResult, length: int | None = None) -> TextResult:
    """The result with the importance of every head, and the loss against the share of heads removed.

    The loss is that of predicting each next token of this text, of at most `length` tokens (None: all). Importance is
    |d loss / d gate| (Michel et al. 2019, arXiv:1905.10650).
    """
    loss = reader.next_token_loss(text, length)
    importances = importance(reader.model, lambda model, _: loss(model), [text])
    layers = result.reading.profile.layers
    for layer in layers:
        if layer.name not in importances.values:
            known = [str(other.number) for other in layers if other.name in importances.values]
            remedy = f" Name the layers of attention: --layers {','.join(known)}" if known else ""
            other = f"it is a {layer.kind} layer, and only heads of attention are removed.{remedy}"
            reason = importances.missing.get(layer.name, other)
            raise RegardError(f"analyze: the importance of {layer.name} is not known: {reason}.")
    layers = [replace(layer, values=layer.values | {"importance": importances.values[layer.name]}) for layer in layers]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Removing heads", total=len(ORDERS) * len(TENTHS))
        curve = pruning_curve(
            reader.model, lambda model: float(loss(model)), importances, progress=lambda _: progress.advance(task)
        )
    series = [
        {"name": ORDERS[order], "points": [list(point) for point in curve.qualities(order).items()]}
        for order in dict.fromkeys(point.order for point in curve.points)
    ]
    title = "Loss of the next token without heads"
    chart = {"title": title, "x": "share of heads removed", "y": "loss in nats", "series": series}
    profile = replace(result.reading.profile, layers=layers)
    return replace(result, reading=replace(result.reading, profile=profile), charts=[*result.charts, chart])


def most_important(reading: TextReading) -> Text:
    """Names the heads on which the loss depends most."""
    heads = [
        (value, head_name(layer.number, head))
        for layer in reading.profile.layers
        for head, value in enumerate(layer.values.get("importance", ()))
    ]
    named = ", ".join(f"{head} ({float(value):.2g})" for value, head in sorted(heads, reverse=True)[:NUM_NAMED])
    return Text(f"Predicting the next token depends most on heads {named}: |d loss / d gate|, in nats.")
