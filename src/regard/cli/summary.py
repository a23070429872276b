"""A reading in about ten lines: what was read, the strongest true statements, and how to see more."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from regard.cli.report import TOO_SHORT, facts, locate, notable, occurrence
from regard.hf.text_reader import Read
from regard.stats import CAVEAT, Finding, Profile, Reading, RoleTable
from regard.stats.roles import CONTENT, KINDS, LABEL

#: Kinds of roles that are told, and heads named in a line.
NUM_KINDS, NUM_HEADS = 3, 2
#: Kind -> what its score is, where that is not a share of the weight.
SCORE = {"broad": "evenness"}
#: Statistic -> where a head looks that has much of it; told where a text is too short for roles.
PLACES = {"previous": "the token just before", "next": "the token just after", "itself": "the token itself"}
#: Kind of warning -> what its heads do, and what that does not mean. Others are told in their own sentence.
WARNINGS = {
    "uniform": ("look at all tokens nearly alike", "That does not mean they are useless."),
    "special": ("put 90% of the weight or more on special tokens", "That does not say those matter."),
    "sink": ("put 90% of the weight or more on the first token", "That does not say it matters."),
    "copies": ("look where another of their layer does", "Their values may differ."),
}
#: What the last line says.
MORE = "More: --table (every head), --word WORD, --probe, --save DIR (a page), --json."


def print_summary(console: Console, read: Read, words: Sequence[str]) -> None:
    """The title, what was read, and the statements."""
    console.print(Text(read.reading.title, style="bold"))
    console.print(Text(facts(read), style="dim"))
    print_statements(console, read.reading, words)


def print_statements(console: Console, reading: Reading, words: Sequence[str]) -> None:
    """What is true of this text: roles, the extremes, what a word looks at, warnings."""
    for line in (*role_lines(reading), extremes(reading.profile), *word_lines(reading, words)):
        console.print(line)
    for line in warning_lines(reading.findings):
        console.print(Text.assemble(("! ", "yellow"), line))


def print_probe(console: Console, probe: RoleTable) -> None:
    """The roles on the probe, all kinds: induction and duplicate heads show there first."""
    lines = list(named_lines(probe)) or [Text("No head earned the name of a role.")]
    console.print(Text("On random tokens, all of them twice:", style="dim"))
    for line in lines:
        console.print(line)


def print_ending(console: Console) -> None:
    """What weights do not say, and how to see more."""
    console.print(Text(CAVEAT, style="dim"))
    console.print(Text(MORE, style="dim"))


def role_lines(reading: Reading) -> Iterator[Text]:
    """The heads that earned a name, one line a kind; on a short text, where heads looked without a null."""
    if reading.roles is None:
        yield from _places(reading)
        yield Text(TOO_SHORT)
        return
    lines = list(named_lines(reading.roles))
    yield from lines[:NUM_KINDS]
    if not lines:
        yield Text("No head earned the name of a role on this text.")


def named_lines(found: RoleTable) -> Iterator[Text]:
    """`Head 0.2 looks at the token just before: weight 0.93, shuffled 0.91; so does 1.4`, a line a kind."""
    for kind in (*(k for k in KINDS if k in CONTENT), *(k for k in KINDS if k not in CONTENT)):
        named = [role for role in found.of(kind) if role.label]
        if named:
            best, others = named[0], [f"{role.layer}.{role.head}" for role in named[1:]]
            what = KINDS[kind] if best.offset is None else f"the token {best.offset:+d} places away"
            alike = f"so do{'es' * (len(others) == 1)}" if best.offset is None else "also at a fixed offset:"
            also = f"; {alike} {_listed(others)}" if others else ""
            score = f"{SCORE.get(kind, 'weight')} ", (f"{best.score:.2f}", "cyan"), f", shuffled {best.null:.2f}"
            yield Text.assemble(
                "Head ", (f"{best.layer}.{best.head}", "bold"), f" looks at {what}: ", *score, f"{also}."
            )


def _places(reading: Reading) -> Iterator[Text]:
    """The head that attends most to each kind of place, the first token left out, in one line."""
    found = [(what, *max(_beside_first(reading, name))) for name, what in PLACES.items()]
    told = [((where, "bold"), f" puts {value:.2f} on {what}") for what, value, where in found if value >= LABEL]
    if told:
        parts = [
            part for n, (head, said) in enumerate(told) for part in ("; " if n else "Of its weight, head ", head, said)
        ]
        yield Text.assemble(*parts, ".")


def _beside_first(reading: Reading, name: str) -> Iterator[tuple[float, str]]:
    """A statistic of `PLACES` for every head, over queries whose place is not the first token."""
    count = len(reading.profile.query_tokens)
    query = {"previous": 1, "itself": 0}.get(name, count)  # the query whose place is the first token
    at_first = reading.looks(query) if query < count else None
    queries = max(count - (2 if name == "previous" else 1), 1)
    for number, layer in enumerate(reading.profile.layers):
        for head, mean in enumerate(layer.values[name].tolist()):
            without = 0.0 if at_first is None else float(at_first[number][head, 0])
            yield (mean * count - without) / queries, f"{layer.number}.{head}"


def extremes(profile: Profile) -> Text:
    """The most focused and the broadest head; e to the entropy is how many tokens would do, looked at alike.

    The entropy is that of the weight outside the first token and special tokens. Heads with less than `LABEL` of their
    weight there are left out: they rest, and focus on nothing in the text.
    """
    heads = list(_entropies(profile))
    if not heads:
        return Text("Every head puts most of its weight on the first token and on special tokens.")
    (least, focused), (most, broadest) = min(heads), max(heads)
    return Text.assemble(
        *("Most focused: ", (focused, "bold"), f", as if on {math.exp(least):.1f} tokens (entropy {least:.2f} nats); "),
        *("broadest: ", (broadest, "bold"), f", as if on {math.exp(most):.1f} ({most:.2f})."),
    )


def _entropies(profile: Profile) -> Iterator[tuple[float, str]]:
    """The entropy of each head's weight outside the first token and special tokens: (nats, layer.head)."""
    for layer in profile.layers:
        beside = 1 - layer.values["special"]
        beside = beside if 0 in profile.special else beside - layer.values["first"]
        for head, (kept, entropy) in enumerate(zip(beside.tolist(), layer.values["elsewhere"].tolist(), strict=True)):
            if kept >= LABEL:
                yield entropy / kept, f"{layer.number}.{head}"


def word_lines(reading: Reading, words: Sequence[str]) -> Iterator[Text]:
    """Which heads look hardest from a word at one that is not beside it."""
    for word in words:
        strong = notable(reading, locate(reading, word), NUM_HEADS) or "nothing but its neighbours"
        yield Text.assemble((word, "bold"), f" ({occurrence(reading, word)}) looks hardest: {strong}.")


def warning_lines(found: Sequence[Finding]) -> Iterator[str]:
    """One line for each kind of warning, with what it does not mean."""
    for kind in dict.fromkeys(finding.kind for finding in found):
        same = [finding for finding in found if finding.kind == kind]
        if kind not in WARNINGS:
            more = f" The same in {len(same) - 1} more." if len(same) > 1 else ""
            yield same[0].sentence + more
            continue
        heads = [f"{finding.layer}.{head}" for finding in same for head in finding.heads]
        what, caution = WARNINGS[kind]
        s, verb = ("s", what) if len(heads) > 1 else ("", what.replace(" ", "s ", 1))
        yield f"{len(heads)} head{s} ({_listed(heads)}) {verb}. {caution}"


def _listed(names: Sequence[str]) -> str:
    """`1.2, 1.3 and 4 more`."""
    shown = list(names[:NUM_HEADS])
    more = len(names) - len(shown)
    last = f"{more} more" if more else shown.pop() if len(shown) > 1 else ""
    return f"{', '.join(shown)} and {last}" if last else shown[0]
