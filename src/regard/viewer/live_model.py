"""Models behind an open page: they read the texts that a reader types there, and answer questions about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from regard.attribution import attribute
from regard.attribution.faithfulness import FaithfulnessCurves
from regard.attribution.result import Attribution
from regard.base.errors import RegardError
from regard.edits import EditSequence, KnockOut
from regard.edits.where import Where
from regard.hf.edit_effects import EditResult, edit_effect
from regard.hf.editing import edit
from regard.hf.generation_reader import GenerationResult, read_generation
from regard.hf.text_reader import TextReader, in_one_line
from regard.maps import AttentionMap, Reduction
from regard.stats.text_reading import TextReading
from regard.viewer.live_request import CHARACTERS, EDIT, EDITS, METHODS, STEPS, LiveRequest
from regard.viewer.sheet import Sheet, page_reductions

#: The most tokens of a typed text.
TOKENS = 256

#: Called again and again while a text is read; it raises `Stopped` if the reader does not want it any more.
Check = Callable[[], None]
#: The further reductions of a map, and a function that answers a question.
Also = Callable[[AttentionMap], Sequence[Reduction]]
Question = Callable[[LiveRequest, Check], list[Sheet]]


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
    questions: Mapping[str, Question] = field(default_factory=dict)

    def answer(self, request: LiveRequest, check: Check) -> list[Sheet]:
        """The sheets of a request."""
        if request.question:
            return self.questions[request.question](request, check)
        return self.read(request.text, check)

    @property
    def about(self) -> dict[str, Any]:
        """What the page needs to know: without it, the page has no input."""
        limits = {"characters": CHARACTERS, "tokens": self.tokens, "edits": EDITS, "steps": STEPS}
        about = {"name": self.name, "kind": self.kind, "fields": ["text", *self.questions]}
        return about | limits | ({"methods": list(METHODS)} if "attribute" in self.questions else {})


def text_model(reader: TextReader) -> LiveModel:
    """The model of a `TextReader`. A text has at most 256 tokens, or what the model takes.

    >>> import regard as rg
    >>> model = text_model(rg.TextReader.load("minilm"))
    >>> [sheet] = model.read("The cat sat.", lambda: None)
    >>> sheet.about["tokens"], sheet.about["written"]
    (['[CLS]', 'the', 'cat', 'sat', '.', '[SEP]'], 'The cat sat.')
    """
    most = min(reader.limit or TOKENS, TOKENS)

    def answering(sheets: Callable[[LiveRequest, Also], Sequence[Sheet]]) -> Question:
        """A question that `check` can stop while the model runs, and in the reductions of the page."""

        def answer(request: LiveRequest, check: Check) -> list[Sheet]:
            check_length(reader.count_tokens(request.text), most)
            with stoppable(reader.model, check):
                # `check` returns None; it is called once for each map
                made = sheets(request, lambda weights: check() or page_reductions(weights))
                return [written(sheet, request.text) for sheet in made]

        return answer

    def attributed(request: LiveRequest, also: Also) -> list[Sheet]:
        """The links of the prediction that the request asks about."""
        method, target = request.attribute or ("", None)
        inputs = reader.tokenize(request.text, None)
        found = attribute(reader.model, inputs, target, method, tokenizer=reader.tokenizer)
        return [attribution_sheet(reader, request.text, found, also)]

    def generated(request: LiveRequest, also: Also) -> list[Sheet]:
        """The text as the model continues it."""
        return generation_sheets(read_generation(reader, request.text, request.generate, also=also))

    read = answering(lambda request, also: [Sheet.of(reader.read(request.text, also=also).reading)])
    questions = {"edits": answering(lambda request, also: [edited_sheet(reader, request.text, request.edits, also)])}
    if _continues(reader.model):
        questions["generate"] = answering(generated)
    if _predicts_tokens(reader.model):
        questions["attribute"] = answering(attributed)
    return LiveModel(reader.name, "text", lambda text, check: read(LiveRequest(text), check), most, questions)


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
    """Refuse a text that is too long for the page, which reads at most `most` tokens."""
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


#: Tokens whose states changed most, and probable tokens, of the panel "What changes".
SHOWN = 6


def edited_sheet(
    reader: TextReader,
    text: str,
    edits: Sequence[str],
    also: Also = page_reductions,
    length: int | None = None,
    roles: Any = None,
) -> Sheet:
    """The sheet of a text that a model reads without some weights; `about["effect"]` says what changes.

    An edit is a short form of `rg.Where.parse`. The maps are the weights inside the edit, as they then are. `length`
    and `roles` are those of `edit_effect`.

    >>> import regard as rg
    >>> reader = rg.TextReader.load("minilm")
    >>> sheet = edited_sheet(reader, "The cat sat.", ["L2.H1: #2 -> #1"])
    >>> sheet.about["title"], float(sheet.maps[2][0, 1, 2, 1])
    ('The cat sat. (without L2.H1: cat → the)', 0.0)
    """
    knocked_out = EditSequence(tuple(KnockOut(Where.parse(short)) for short in edits))
    effect = edit_effect(reader, text, knocked_out, length, roles)
    named = [(short, edit_in_words(short, effect.tokens)) for short in edits]
    title = in_one_line(text)
    without = ", ".join(words for _, words in named) if len(named) < 3 else f"{len(named)} parts"
    with edit(reader.model, knocked_out, effect.tokens, roles=roles):
        reading = reader.read(text, None, length, f"{title} (without {without})", also).reading
    sheet = Sheet.of(reading)
    return Sheet(sheet.about | {"effect": effect_data(effect, title, named)}, sheet.maps, sheet.ready)


def generation_sheets(result: GenerationResult) -> list[Sheet]:
    """The sheets of a text that a model continued: one of all tokens that it read, and one of its cross-attention.

    `about["generation"]` has the number of tokens of the prompt and the names of all tokens. The token n was predicted
    by the row n - 1; the last one was not read.
    """
    steps = {"generation": {"prompt": result.prompt_length, "labels": result.labels}}
    sheets = [Sheet.of(reading) for reading in (result.result.reading, result.cross) if reading is not None]
    return [Sheet(sheet.about | steps, sheet.maps, sheet.ready) for sheet in sheets]


def attribution_sheet(
    reader: TextReader,
    text: str,
    found: Attribution,
    also: Also = page_reductions,
) -> Sheet:
    """The sheet of the links that made a prediction; its charts are the curves of `rg.faithfulness`.

    The maps keep their signs; statistics and small maps are those of the shares of |weight x gradient|.
    """
    title, length = in_one_line(text), len(found.labels)
    ids = reader.tokenize(text, length)["input_ids"][0].tolist()
    name, special = f"{title} (why {found.target}, by {found.method})", reader.special(ids)
    reading = TextReading.of(name, found.maps, reader.labels(ids), special, also=also, model=reader.model_name)
    sheet = Sheet.of(reading, charts=[] if found.test is None else faithfulness_charts(found.test))
    return Sheet(sheet.about | {"attribution": attribution_data(found, title)}, list(found.maps.values()), sheet.ready)


def attribution_data(found: Attribution, title: str) -> dict[str, Any]:
    """An attribution as JSON, without its maps. `of` is the title of the text with its weights."""
    test = [] if found.test is None else found.test.sentences
    return {"of": title, "method": found.method, "sentence": found.sentence, "test": [*test, *found.notes]} | (
        {"relevance": found.tokens()[0].tolist()} if found.relevance else {}
    )


def faithfulness_charts(test: FaithfulnessCurves) -> list[dict[str, Any]]:
    """The curves of deletion and insertion, each with the band of the random orders."""
    counts, charts = test.counts.tolist(), []
    curves = (("removed", test.deletion, test.random_deletion), ("inserted", test.insertion, test.random_insertion))
    for done, curve, drawn in curves:
        lines = {"by relevance": curve, "random order, mean": drawn.mean(0)}
        series = [{"name": name, "points": _points(counts, line)} for name, line in lines.items()]
        names = {"title": f"Tokens {done}, the most relevant first", "x": f"tokens {done}", "y": test.measure}
        charts.append(names | {"series": series, "band": _points(counts, drawn.amin(0), drawn.amax(0))})
    return charts


def _points(counts: Sequence[int], *values: Tensor) -> list[list[float]]:
    """[x, y, ...] for each count, from tensors (counts,): the form of a chart of the page."""
    return [list(point) for point in zip(counts, *(each.tolist() for each in values), strict=True)]


def effect_data(effect: EditResult, title: str, edits: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """What an edit changes, as JSON. `of` is the title of the text with all its weights."""
    predicts = effect.before.ndim == 1
    return {
        "of": title,
        "edits": [list(pair) for pair in edits],
        "kind": effect.kind,
        "sentence": " ".join(effect.sentences),
        "probabilities": [list(row) for row in effect.top(SHOWN)] if predicts else [],
        "moved": [] if predicts else [list(row) for row in effect.moved(SHOWN)],
    }


def edit_in_words(short: str, tokens: Sequence[str]) -> str:
    """A short form of an edit with words in place of numbers, from the tokens of the text.

    >>> edit_in_words("L5.H3: #1 -> #0", ["a", "b"]), edit_in_words("*: * -> #1", ["a", "b"]), edit_in_words("L5", [])
    ('L5.H3: b → a', 'b in every head', 'L5')
    """
    found = EDIT.fullmatch(short)
    if found is None or found[2] is None:
        return short
    # the groups of `EDIT` are the heads, the query and the key
    query, key = ("all" if part == "*" else tokens[int(part[1:])] for part in (found[2], found[3]))
    if (found[1], found[2]) == ("*", "*"):
        return f"{key} in every head"
    return f"{'every head' if found[1] == '*' else found[1]}: {query} → {key}"
