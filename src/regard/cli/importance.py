"""`regard analyze --importance` adds the importance of each head and a pruning curve to the result of a text."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from regard.base.errors import RegardError
from regard.hf import importance, pruning_curve
from regard.hf.heads.pruning_curve import ORDERS, TENTHS
from regard.hf.text_reader import TextReader, TextResult
from regard.stats.numbering import head_name
from regard.stats.text_reading import TextReading

#: Heads named in a line.
NUM_NAMED = 3


def with_importance(reader: TextReader, text: str, result: TextResult, length: int | None = None) -> TextResult:
    """The result with the importance of every head, and the loss against the share of heads removed.

    The loss is that of predicting each next token of this text. Importance is |d loss / d gate| (Michel et al. 2019,
    arXiv:1905.10650).
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
