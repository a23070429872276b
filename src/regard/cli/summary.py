"""Prints the result of a text in about ten lines: roles, extremes, words and warnings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from regard.cli.report import TOO_SHORT, facts, locate, notable, occurrence
from regard.hf.text_reader import TextResult
from regard.stats import CAVEAT
from regard.stats.layer_kinds import kind_lines
from regard.stats.numbering import head_name
from regard.stats.profile import ModelProfile
from regard.stats.roles import CONTENT, KINDS, LABEL, RoleTable
from regard.stats.text_reading import NEARBY, TextReading, entropies_outside, nearby_shares
from regard.stats.warnings import warning_lines

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
    """One line: the head with most weight on each token of `NEARBY`, not counting the first token."""
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
