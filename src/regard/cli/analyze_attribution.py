"""`regard analyze --attribute METHOD` prints which tokens made a prediction, and the test of faithfulness beside
them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.attribution import attribute
from regard.attribution.result import Attribution
from regard.base.errors import RegardError
from regard.cli.analyze import read_texts, save_page
from regard.cli.options import AnalyzeOptions
from regard.cli.outputs import check_folder, shown_steps
from regard.hf.text_reader import TextReader
from regard.stats.numbering import head_name, layer_numbers, module_path
from regard.viewer import Sheet, page_reductions
from regard.viewer.live_model import attribution_sheet

#: The longest bar, in characters; tokens and links in a printed result.
BAR, MOST_TOKENS, LINKS = 30, 40, 5


def run(options: AnalyzeOptions) -> None:
    """Attribute the prediction of each text, and print the results."""
    _check(options)
    texts, errors = read_texts(options.texts), Console(stderr=True)
    with shown_steps(errors, f"Reading with {options.model}"):
        reader = TextReader.load(options.model)
        if not hasattr(reader.model, "get_output_embeddings") or reader.model.get_output_embeddings() is None:
            raise RegardError(
                f"analyze: {reader.model_name} predicts no token, so there is nothing to attribute. Give a language "
                "model: "
                "--model smollm2. In Python, rg.attribute takes a function of the output as its target."
            )
        results = [_attributed(reader, text, options) for text in texts]
    _save(options, reader, texts, results, errors)
    if options.as_json:
        data = [_as_data(result) for result in results]
        print(json.dumps(data[0] if len(data) == 1 else data, ensure_ascii=False, indent=1))
        return
    for result in results:
        _print(Console(), result)


def _check(options: AnalyzeOptions) -> None:
    """Refuse options that --attribute does not read, and a method that needs a second text."""
    if options.attribute is None:
        raise RegardError("analyze: --target needs --attribute METHOD, which explains this token.")
    if options.attribute == "edge-patching":
        raise RegardError("analyze: edge-patching compares two texts: rg.attribute(..., corrupted=...) in Python.")
    check_folder("analyze", "--save", options.save)
    given = {"--story": options.story, "--figures": options.figures, "--probe": options.probe, "--table": options.table}
    given |= {"--importance": options.importance, "--word": options.words}
    unread = [name for name, value in given.items() if value]
    if unread:
        raise RegardError(f"analyze: --attribute prints tokens and links, and does not read {', '.join(unread)}.")


def _attributed(reader: TextReader, text: str, options: AnalyzeOptions) -> Attribution:
    """The attribution of the prediction of one text."""
    assert options.attribute is not None
    inputs, target, method = reader.tokenize(text, options.length), options.target, options.attribute
    return attribute(reader.model, inputs, target, method, options.numbers, tokenizer=reader.tokenizer)


def _save(
    options: AnalyzeOptions, reader: TextReader, texts: Sequence[str], results: Sequence[Attribution], errors: Console
) -> None:
    """Write the page of --save: each text with its weights, and with the links that made the prediction."""

    def sheets() -> list[Sheet]:
        read = [reader.read(text, options.numbers, options.length, also=page_reductions).reading for text in texts]
        why = [attribution_sheet(reader, *pair) for pair in zip(texts, results, strict=True)]
        return [*why, *map(Sheet.of, read)]

    save_page(options, sheets, errors)


def _print(console: Console, result: Attribution) -> None:
    """Print the result in words, the test of faithfulness, a bar for each token, and the strongest links."""
    console.print(Text(result.sentence), soft_wrap=True)
    for sentence in (*([] if result.test is None else result.test.sentences), *result.notes):
        console.print(Text(sentence, style="dim"), soft_wrap=True)
    console.print()
    if result.relevance:
        console.print(_tokens(result))
        console.print()
    for line in _links(result):
        console.print(Text(line), soft_wrap=True)


def _tokens(result: Attribution) -> Table:
    """A bar for each token, in the order of the text; of a long text those with the largest |relevance|.

    Green raises the target, red lowers it.
    """
    relevance = result.tokens()[0]
    largest = float(relevance.abs().max()) or 1.0
    shown = relevance.abs().topk(min(MOST_TOKENS, len(relevance))).indices.sort().values.tolist()
    table = Table(box=None, pad_edge=False, show_header=False)
    for index in shown:
        value = float(relevance[index])
        bar = Text("█" * round(BAR * abs(value) / largest), style="green" if value > 0 else "red")
        table.add_row(str(index), result.labels[index], f"{value:+.2g}", bar)
    return table


def _links(result: Attribution) -> list[str]:
    """The strongest links, a line each. Links whose tokens have no label, as in cross-attention, are left out."""
    names = dict(zip(result.names, layer_numbers(map(module_path, result.names)), strict=True))
    return [
        f'{head_name(names[link.layer], link.head)}: "{result.labels[link.query]}" -> "{result.labels[link.key]}" '
        f"({link.query} -> {link.key}), {link.value:+.2g}"
        for link in result.links(LINKS)
        if link.query < len(result.labels) and link.key < len(result.labels)
    ]


def _as_data(result: Attribution) -> dict[str, Any]:
    """The attribution and its test as plain data, without its maps."""
    data: dict[str, Any] = {"method": result.method, "target": result.target, "value": float(result.value.sum())}
    data |= {"tokens": list(result.labels), "relevance": result.tokens()[0].tolist() if result.relevance else None}
    data["links"] = [link._asdict() for link in result.links(LINKS)]
    if result.test is not None:
        test = result.test
        data["faithfulness"] = {
            "measure": test.measure,
            "counts": test.counts.tolist(),
            "deletion": test.deletion.tolist(),
            "insertion": test.insertion.tolist(),
            "random_deletion": test.random_deletion.tolist(),
            "random_insertion": test.random_insertion.tolist(),
            "deletion_area": test.deletion_area,
            "insertion_area": test.insertion_area,
        }
    return data | {"notes": list(result.notes), "missing": result.missing}
