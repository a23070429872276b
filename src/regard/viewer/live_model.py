"""Models behind an open page: they read the texts that a reader types there.

A request is JSON: {"text": "..."}. Later requests may hold more, such as edits of weights; a field that the model does
not know is refused, so no page shows the weights of another request than its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from regard.data.corpus import Pair
from regard.errors import RegardError
from regard.hf.text_reader import TextReader
from regard.seq2seq.evaluation.pair_maps import read_pair
from regard.seq2seq.models.systems import system
from regard.seq2seq.runs.run import SETTINGS, Run, load_pretrained, load_run, pretrained_runs
from regard.viewer.sheet import Sheet, page_folds

#: The most characters and tokens of a typed text.
CHARACTERS, TOKENS = 2000, 256
#: The most bytes of a request: JSON escapes a character in at most 12 bytes.
BODY = 12 * CHARACTERS + 100
#: The fields of a request.
FIELDS = ("text",)

#: Called again and again while a text is read; it raises `Stopped` if the reader does not want it any more.
Check = Callable[[], None]


class Stopped(RegardError):
    """The reader of the page stopped the text. A `RegardError`, so that the text reader does not replace it."""


@dataclass(frozen=True, eq=False)
class LiveModel:
    """A model that reads typed texts. `kind` is "text" or "translation"; `read(text, check)` gives their sheets.

    `tokens` is the most tokens of a text.
    """

    name: str
    kind: str
    read: Callable[[str, Check], list[Sheet]]
    tokens: int = TOKENS

    @property
    def about(self) -> dict[str, Any]:
        """What the page needs to know: without it, the page has no input."""
        limits = {"characters": CHARACTERS, "tokens": self.tokens}
        return {"name": self.name, "kind": self.kind, "fields": list(FIELDS), **limits}


def live_model(name: str) -> LiveModel:
    """The translator of the package with this name, the run of this folder, or the model that `load_model` finds."""
    if name in pretrained_runs():
        return translator_model(name, load_pretrained(name))
    if (Path(name) / SETTINGS).exists():
        return translator_model(Path(name).name, load_run(name))
    return text_model(TextReader.load(name))


def text_model(reader: TextReader) -> LiveModel:
    """The model of a `TextReader`. A text has at most 256 tokens, or what the model takes.

    >>> import regard as rg
    >>> model = text_model(rg.TextReader.load("minilm"))
    >>> [sheet] = model.read("The cat sat.", lambda: None)
    >>> sheet.about["tokens"], sheet.about["written"]
    (['[CLS]', 'the', 'cat', 'sat', '.', '[SEP]'], 'The cat sat.')
    """
    most = min(reader.limit or TOKENS, TOKENS)

    def read(text: str, check: Check) -> list[Sheet]:
        _check_length(len(reader.tokenizer(text, verbose=False)["input_ids"]), most)
        with _stoppable(reader.model, check):
            reading = reader.read(text, also=lambda weights: check() or page_folds(weights)).reading
        return [_written(Sheet.of(reading), text)]

    return LiveModel(reader.name, "text", read, most)


def translator_model(name: str, run: Run) -> LiveModel:
    """A trained translator: it translates a text and reads both with teacher forcing, as `read_pair` does.

    >>> from regard.seq2seq import load_pretrained
    >>> model = translator_model("bahdanau-en-fr", load_pretrained("bahdanau-en-fr"))
    >>> model.read("Peace be with you.", lambda: None)[0].about["tokens"][-1]
    '</s>'
    """
    title = system(run.model.settings()["name"]).title

    def read(text: str, check: Check) -> list[Sheet]:
        _check_length(len(run.source_tokenizer.encode(text)), TOKENS)
        with _stoppable(run.model, check):
            (translation,) = run.translate([text])
            if not translation.text.strip():
                raise RegardError(f"{title} has an empty translation of this text. Type another one.")
            readings = read_pair({title: run}, Pair(text, translation.text), parts=True)
        unknown = run.source_tokenizer.unknown(text)
        return [_written(Sheet.of(*reading), text, unknown) for reading in readings]

    return LiveModel(name, "translation", read)


def requested_text(body: bytes) -> str:
    """The text of a request, as one line. Raises an error in words for anything else.

    >>> requested_text(b'{"text": " a  b "}')
    'a b'
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise RegardError('The request is not JSON. It must be {"text": "..."}.') from None
    if not isinstance(request, dict) or set(request) != set(FIELDS) or not isinstance(request["text"], str):
        raise RegardError('The request must have the form {"text": "..."}, without other fields.')
    text = " ".join(request["text"].replace("\0", " ").encode("utf-8", "replace").decode().split())
    if not text:
        raise RegardError("The text is empty. Type at least one word.")
    if len(text) > CHARACTERS:
        raise RegardError(f"The text has {len(text):,} characters; the page reads at most {CHARACTERS:,}.")
    return text


def _written(sheet: Sheet, text: str, unknown: Sequence[str] = ()) -> Sheet:
    """The sheet with the text as it was typed, so that the page can change one of its words, and its unknown pieces."""
    return Sheet(sheet.about | {"written": text, "unknown": list(unknown)}, sheet.maps, sheet.ready)


def _check_length(num_tokens: int, most: int) -> None:
    if num_tokens > most:
        raise RegardError(
            f"The text has {num_tokens} tokens; the page reads at most {most}. Type a shorter one, or read it with "
            "`regard see FILE --save DIR`."
        )


@contextmanager
def _stoppable(model: nn.Module, check: Check) -> Iterator[None]:
    """While the block runs, every module of the model calls `check` before it computes."""
    hooks = [module.register_forward_pre_hook(lambda *_: check()) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
