"""Prints the result of a text in about ten lines: roles, extremes, words and warnings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from regard.cli.report import TOO_SHORT, facts, locate, notable, occurrence
from regard.hf.text_reader import TextResult
from regard.stats import CAVEAT, Finding, Profile, RoleTable, TextReading
from regard.stats.numbering import head_name
from regard.stats.roles import CONTENT, KINDS, LABEL

#: Kinds of roles that are printed, and heads named in a line.
NUM_KINDS, NUM_HEADS = 3, 2
#: Kinds of roles whose score is not a share of the weight.
SCORE = {"broad": "evenness "}
#: Statistics printed if a text is too short for roles -> the token that each one is the weight on.
NEARBY = {"previous": "the previous token", "next": "the next token", "itself": "the token itself"}
#: Kind of warning -> its text for several heads, for one head, and what it does not mean.
WARNINGS = {
    "uniform": (
        "give all tokens nearly the same weight",
        "gives all tokens nearly the same weight",
        "this does not make them useless",
    ),
    "special": (
        "put 90 % of their weight or more on special tokens",
        "puts 90 % of its weight or more on special tokens",
        "these need not matter",
    ),
    "sink": (
        "put 90 % of their weight or more on the first token",
        "puts 90 % of its weight or more on the first token",
        "it need not matter",
    ),
    "copies": (
        "have nearly the same map as another",
        "has nearly the same map as another",
        "what they carry may still differ",
    ),
}
#: The last line.
MORE = "More: --table (every head), --word WORD, --probe, --save DIR (a page), --json."


def print_summary(console: Console, result: TextResult, words: Sequence[str]) -> None:
    """Print the title, the sizes and the statements."""
    console.print(Text(result.reading.title, style="bold"))
    console.print(Text(facts(result), style="dim"))
    print_statements(console, result.reading, words)


def print_statements(console: Console, reading: TextReading, words: Sequence[str]) -> None:
    """Print roles, the most focused and the broadest head, what each word attends to, and warnings."""
    for line in (*role_lines(reading), extremes(reading.profile), *word_lines(reading, words)):
        console.print(line)
    num_heads = sum(layer.num_heads for layer in reading.profile.layers)
    for line in warning_lines(reading.findings, num_heads):
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
    """One line: the head with most weight on each token of `NEARBY`, not counting the first token."""
    best = [(target, *max(_without_first(reading, name))) for name, target in NEARBY.items()]
    clauses = [((head, "bold"), f"{100 * share:.0f} %", target) for target, share, head in best if share >= LABEL]
    if clauses:
        head, share, target = clauses[0]
        more = (part for head, share, target in clauses[1:] for part in ("; ", head, f" {share} on {target}"))
        yield Text.assemble(head, f" puts {share} of its weight on {target}", *more, ".")


def _without_first(reading: TextReading, name: str) -> Iterator[tuple[float, str]]:
    """A statistic of `NEARBY` for every head, over the queries whose target is not the first token."""
    count = len(reading.profile.query_tokens)
    query = {"previous": 1, "itself": 0}.get(name, count)  # the query whose target is the first token
    at_first = reading.rows(query) if query < count else None
    num_queries = max(count - (2 if name == "previous" else 1), 1)
    for number, layer in enumerate(reading.profile.layers):
        for head, mean in enumerate(layer.values[name].tolist()):
            on_first = 0.0 if at_first is None else float(at_first[number][head, 0])
            yield (mean * count - on_first) / num_queries, head_name(layer.number, head)


def extremes(profile: Profile) -> Text:
    """The most focused and the broadest head; exp(entropy) is the effective number of tokens.

    The entropy is that of the weight outside the first token and special tokens. Heads with less than `LABEL` of their
    weight there are left out: they hardly attend to the text.
    """
    heads = list(_entropies(profile))
    if not heads:
        return Text("Every head puts most of its weight on the first token and on special tokens.")
    (least, focused), (most, broadest) = min(heads), max(heads)
    return Text.assemble(
        *("Most focused: ", (focused, "bold"), f" (effectively {math.exp(least):.1f} tokens); "),
        *("broadest: ", (broadest, "bold"), f" (effectively {math.exp(most):.1f} tokens)."),
    )


def _entropies(profile: Profile) -> Iterator[tuple[float, str]]:
    """The entropy in nats of each head's weight outside the first token and special tokens, and the head's name."""
    for layer in profile.layers:
        outside = 1 - layer.values["special"]
        outside = outside if 0 in profile.special else outside - layer.values["first"]
        for head, (kept, entropy) in enumerate(zip(outside.tolist(), layer.values["elsewhere"].tolist(), strict=True)):
            if kept >= LABEL:
                yield entropy / kept, head_name(layer.number, head)


def word_lines(reading: TextReading, words: Sequence[str]) -> Iterator[Text]:
    """For each word the tokens beyond its neighbours to which single heads attend most."""
    for word in words:
        links = notable(reading, locate(reading, word), NUM_HEADS)
        text = f"attends most to {links}" if links else "attends to nothing but its neighbours"
        yield Text.assemble((f"“{word}”", "bold"), f" ({occurrence(reading, word)}) {text}.")


def warning_lines(findings: Sequence[Finding], num_heads: int) -> Iterator[str]:
    """One line for each kind of warning."""
    for kind in dict.fromkeys(finding.kind for finding in findings):
        same = [finding for finding in findings if finding.kind == kind]
        if kind not in WARNINGS:
            more = f" The same in {len(same) - 1} more." if len(same) > 1 else ""
            yield same[0].sentence + more
            continue
        heads = [head_name(finding.layer, head) for finding in same for head in finding.heads]
        several, single, caution = WARNINGS[kind]
        text = several if len(heads) > 1 else single
        yield f"{len(heads)} of {num_heads} heads ({heads[0]}{', ...' if len(heads) > 1 else ''}) {text}; {caution}."


def _listed(names: Sequence[str]) -> str:
    """`L1.H2, L1.H3 and 4 more`."""
    shown = list(names[:NUM_HEADS])
    more = len(names) - len(shown)
    last = f"{more} more" if more else shown.pop() if len(shown) > 1 else ""
    return f"{', '.join(shown)} and {last}" if last else shown[0]
