"""A trained translator behind an open page, and a sentence that the translators of the package align."""

from __future__ import annotations

from pathlib import Path

from regard.base.errors import RegardError
from regard.hf.text_reader import TextReader
from regard.lab.data.corpus import Pair
from regard.lab.decoding.translation import translate
from regard.lab.evaluation.pair_maps import read_pair
from regard.lab.models.systems import find_system
from regard.lab.runs.run import SETTINGS, Run, load_pretrained, load_run, pretrained_runs
from regard.viewer.live_model import TOKENS, Check, LiveModel, check_length, stoppable, text_model, written
from regard.viewer.sheet import Sheet

#: A sentence, and the languages of the packaged translators that translate it.
TRANSLATED, LANGUAGES = "And the king sent his servants into the city by night.", "en-fr"


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a trained translator."""
    return (folder / SETTINGS).exists()


def live_model(name: str) -> LiveModel:
    """The translator of the package with this name, the run of this folder, or the model that `load_model` finds."""
    if name in pretrained_runs():
        return translator_model(name, load_pretrained(name))
    if is_run(Path(name)):
        return translator_model(Path(name).name, load_run(name))
    return text_model(TextReader.load(name))


def translator_model(name: str, run: Run) -> LiveModel:
    """A trained translator: it translates a text and reads both with teacher forcing, as `read_pair` does.

    >>> from regard.lab import load_pretrained
    >>> model = translator_model("bahdanau-en-fr", load_pretrained("bahdanau-en-fr"))
    >>> model.read("Peace be with you.", lambda: None)[0].about["tokens"][-1]
    '</s>'
    """
    title = find_system(run.model.settings()["name"]).title

    def read(text: str, check: Check) -> list[Sheet]:
        """A sheet for each reading of the text and its translation. `check` is called all the while, and may raise."""
        check_length(len(run.source_tokenizer.encode(text)), TOKENS)
        with stoppable(run.model, check):
            (translation,) = run.translate([text])
            if not translation.text.strip():
                raise RegardError(f"{title} has an empty translation of this text. Type another one.")
            readings = read_pair({title: run}, Pair(text, translation.text), parts=True)
        unknown = run.source_tokenizer.unknown(text)
        return [written(Sheet.of(*reading), text, unknown) for reading in readings]

    return LiveModel(name, "translation", read)


def translated_sheets() -> tuple[list[Sheet], str]:
    """The sheets of `TRANSLATED`, aligned by the packaged translators, and a line about them, or why there are none."""
    try:
        runs = [load_pretrained(name) for name in pretrained_runs() if name.endswith(LANGUAGES)]
    except RegardError as error:  # sentencepiece or safetensors may not be installed
        return [], f"No translation on the page: {error}"
    if not runs:
        return [], "No translation on the page: this package has no trained translator."
    named = {find_system(run.model.settings()["name"]).title: run for run in runs if run.model.cross_attention}
    if not named:
        return [], "No translation on the page: the translators of this package have no attention."
    first = next(iter(named.values()))
    (translation,) = translate(first.model, first.source_tokenizer, first.target_tokenizer, [TRANSLATED])
    if not translation.text.strip():
        return [], f"No translation on the page: {next(iter(named))} has an empty translation of {TRANSLATED!r}"
    sheets = [Sheet.of(*reading) for reading in read_pair(named, Pair(TRANSLATED, translation.text))]
    return sheets, f"{TRANSLATED} → {translation.text} Aligned on the page by: {', '.join(named)}."
