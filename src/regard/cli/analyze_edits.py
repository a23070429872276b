"""`regard analyze TEXT --knock-out "L5.H3: it -> animal"` prints what the model predicts without these weights."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.base.errors import RegardError
from regard.cli.analyze import read_texts, save_page
from regard.cli.options import AnalyzeOptions
from regard.cli.outputs import check_folder, shown_steps
from regard.edits import EditSequence, KnockOut
from regard.edits.values import AttentionEdit
from regard.edits.where import Where
from regard.hf.edit_effects import SENTENCE, EditResult, edit_effect
from regard.hf.text_reader import TextReader
from regard.stats.roles import RoleTable
from regard.viewer import Sheet, page_reductions
from regard.viewer.live_model import edited_sheet

#: The options of `regard analyze` that say nothing about an edit, by their fields.
OF_MAPS = {"words": "--word", "verify_all": "--verify-all", "all_figures": "--all-figures"} | {
    name: f"--{name}" for name in ("layers", "figures", "probe", "table", "importance", "story")
}


def run(options: AnalyzeOptions) -> None:
    """Read each text without and with the edit, and print the difference."""
    given = [option for name, option in OF_MAPS.items() if getattr(options, name)]
    if given:
        raise RegardError(
            f"analyze: {given[0]} shows maps. --knock-out goes with --model, --length, --save and --json."
        )
    check_folder("analyze", "--save", options.save)
    edits = EditSequence(tuple(KnockOut(Where.parse(text)) for text in options.knock_out))
    texts, errors = read_texts(options.texts), Console(stderr=True)
    with shown_steps(errors, f"Reading with {options.model}"):
        reader = TextReader.load(options.model)
        effects = [_effect(reader, text, edits, options) for text in texts]
    save_page(options, lambda: [s for text in texts for s in _sheets(reader, text, edits, options)], errors)
    if options.as_json:
        data = [as_data(effect) for effect in effects]
        print(json.dumps(data[0] if len(data) == 1 else data, ensure_ascii=False, indent=1))
        return
    for effect, text in zip(effects, texts, strict=True):
        console = Console()
        console.print(Text(" ".join(text.split()), style="bold"))
        console.print(Text(f"Without the weights of {' and of '.join(options.knock_out)}:"))
        print_effect(console, effect)


def _effect(reader: TextReader, text: str, edits: AttentionEdit, options: AnalyzeOptions) -> EditResult:
    """What the edit changes in one text."""
    return edit_effect(reader, text, edits, options.length, _roles(reader, edits))


def _roles(reader: TextReader, edits: AttentionEdit) -> RoleTable | None:
    """The roles of the model's heads on random tokens, if an edit names roles; None if none does."""
    needs_roles = any(part.where.roles is not None for part in edits.parts)  # type: ignore[attr-defined]
    return reader.probe() if needs_roles else None


def _sheets(reader: TextReader, text: str, edits: AttentionEdit, options: AnalyzeOptions) -> list[Sheet]:
    """The text as the model reads it, and without these weights."""
    whole = Sheet.of(reader.read(text, None, options.length, also=page_reductions).reading)
    roles = _roles(reader, edits)
    return [whole, edited_sheet(reader, text, options.knock_out, length=options.length, roles=roles)]


def print_effect(console: Console, effect: EditResult) -> None:
    """Print what changes: sentences, and for a prediction the probabilities before and after."""
    if effect.kind == SENTENCE:
        for sentence in effect.sentences:
            console.print(Text(sentence))
        return
    console.print(Text(" ".join(effect.sentences)))
    table = Table(box=None, pad_edge=False)
    for name in (effect.kind, "before", "after"):
        table.add_column(name, justify="left" if name == effect.kind else "right")
    for token, old, new in effect.top():
        table.add_row(Text(repr(token)), f"{old:.3f}", f"{new:.3f}")
    console.print(table)


def as_data(effect: EditResult) -> dict[str, Any]:
    """The difference as JSON, with the edit and the layers that it could not change (`left_out`).

    Of a prediction it has the most probable tokens, with their probabilities, and the divergence in nats. Of a sentence
    embedding it has the cosine, and changes as shares of the length of a state.
    """
    data: dict[str, Any] = {"edit": json.loads(effect.edit.to_json())}
    data |= {"prediction": effect.kind, "tokens": effect.tokens, "left_out": effect.left_out}
    if effect.kind == SENTENCE:
        moved = [{"token": token, "change": change} for token, change in effect.moved()]
        return data | {"cosine": effect.cosine, "change": effect.change, "moved": moved}
    top = [{"token": token, "before": old, "after": new} for token, old, new in effect.top()]
    return data | {"top": top, "divergence": effect.divergence}
