"""Models behind an open page: they read the texts that a reader types there, and answer questions about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from regard.base.errors import RegardError
from regard.hf.generation_reader import read_generation
from regard.hf.text_reader import TextReader
from regard.maps import AttentionMap, Reduction
from regard.viewer.live_request import CHARACTERS, EDITS, STEPS, LiveRequest
from regard.viewer.questions import attribution_sheet, edited_sheet, generation_sheets
from regard.viewer.sheet import Sheet, page_reductions

#: The most tokens of a typed text.
TOKENS = 256

#: Called again and again while a text is read; it raises `Stopped` if the reader does not want it any more.
Check = Callable[[], None]


class Stopped(RegardError):
    """The reader of the page stopped the text. A `RegardError`, so that the text reader does not replace it."""


@dataclass(frozen=True, eq=False)
class LiveModel:
    """A model that reads typed texts. `kind` is "text" or "translation"; `read(text, check)` gives their sheets.

    `tokens` is the most tokens of a text. `questions` are those of a `LiveRequest` that the model can answer, each with
    the function that gives the sheets.
    """

    name: str
    kind: str
    read: Callable[[str, Check], list[Sheet]]
    tokens: int = TOKENS
    questions: Mapping[str, Callable[[LiveRequest, Check], list[Sheet]]] = field(default_factory=dict)

    def answer(self, request: LiveRequest, check: Check) -> list[Sheet]:
        """The sheets of a request."""
        if request.question:
            return self.questions[request.question](request, check)
        return self.read(request.text, check)

    @property
    def about(self) -> dict[str, Any]:
        """What the page needs to know: without it, the page has no input."""
        limits = {"characters": CHARACTERS, "tokens": self.tokens, "edits": EDITS, "steps": STEPS}
        return {"name": self.name, "kind": self.kind, "fields": ["text", *self.questions], **limits}


def text_model(reader: TextReader) -> LiveModel:
    """The model of a `TextReader`. A text has at most 256 tokens, or what the model takes.

    >>> import regard as rg
    >>> model = text_model(rg.TextReader.load("minilm"))
    >>> [sheet] = model.read("The cat sat.", lambda: None)
    >>> sheet.about["tokens"], sheet.about["written"]
    (['[CLS]', 'the', 'cat', 'sat', '.', '[SEP]'], 'The cat sat.')
    """
    most = min(reader.limit or TOKENS, TOKENS)

    @contextmanager
    def reading(text: str, check: Check) -> Iterator[Callable[[AttentionMap], Sequence[Reduction]]]:
        """Around a text that the model reads; yields the reductions of the page, which `check` can stop too."""
        check_length(len(reader.tokenizer(text, verbose=False)["input_ids"]), most)
        with stoppable(reader.model, check):
            yield lambda weights: check() or page_reductions(weights)

    def read(text: str, check: Check) -> list[Sheet]:
        with reading(text, check) as also:
            return [written(Sheet.of(reader.read(text, also=also).reading), text)]

    def edited(request: LiveRequest, check: Check) -> list[Sheet]:
        with reading(request.text, check) as also:
            return [written(edited_sheet(reader, request.text, request.edits, also), request.text)]

    def generated(request: LiveRequest, check: Check) -> list[Sheet]:
        with reading(request.text, check) as also:
            result = read_generation(reader, request.text, request.generate, also=also)
            return [written(sheet, request.text) for sheet in generation_sheets(result)]

    def attributed(request: LiveRequest, check: Check) -> list[Sheet]:
        assert request.attribute is not None
        with reading(request.text, check) as also:
            return [written(attribution_sheet(reader, request.text, *request.attribute, also), request.text)]

    questions = {"edits": edited}
    if _continues(reader.model):
        questions["generate"] = generated
    if _predicts_tokens(reader.model):
        questions["attribute"] = attributed
    return LiveModel(reader.name, "text", read, most, questions)


def _predicts_tokens(model: Any) -> bool:
    """Whether a model has a head over tokens, whose prediction can be explained."""
    head = getattr(model, "get_output_embeddings", None)
    is_pair = getattr(model.config, "is_encoder_decoder", False)
    return callable(head) and head() is not None and not is_pair


def _continues(model: Any) -> bool:
    """Whether a model continues a text: a decoder with a head over tokens."""
    can_generate = getattr(model, "can_generate", None)
    return callable(can_generate) and bool(can_generate()) and not getattr(model.config, "is_encoder_decoder", False)


def written(sheet: Sheet, text: str, unknown: Sequence[str] = ()) -> Sheet:
    """The sheet with the text as it was typed, so that the page can change one of its words, and its unknown pieces."""
    return Sheet(sheet.about | {"written": text, "unknown": list(unknown)}, sheet.maps, sheet.ready)


def check_length(num_tokens: int, most: int) -> None:
    """Refuse a text that is too long for the page."""
    if num_tokens > most:
        raise RegardError(
            f"The text has {num_tokens} tokens; the page reads at most {most}. Type a shorter one, or read it with "
            "`regard analyze FILE --save DIR`."
        )


@contextmanager
def stoppable(model: nn.Module, check: Check) -> Iterator[None]:
    """While the block runs, every module of the model calls `check` before it computes."""
    hooks = [module.register_forward_pre_hook(lambda *_: check()) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
