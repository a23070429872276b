"""`regard analyze --generate N` lets a model continue a text, and prints what each generated token was predicted
from.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from operator import attrgetter
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.base.errors import RegardError
from regard.cli.analyze import read_texts, save_page
from regard.cli.options import AnalyzeOptions
from regard.cli.outputs import check_folder, shown_steps
from regard.cli.report import facts
from regard.hf.generation_reader import GenerationResult, read_generation
from regard.hf.text_reader import TextReader
from regard.stats import CAVEAT
from regard.stats.numbering import head_name
from regard.viewer import page_reductions
from regard.viewer.live_model import generation_sheets

#: Links that are printed.
NUM_LINKS = 6
#: The options of `regard analyze` that do not go with --generate, by their fields.
OTHERS = {"words": "--word", "all_figures": "--all-figures"} | {
    name: f"--{name}" for name in ("figures", "probe", "importance", "story")
}
#: What the rows are.
ROWS = (
    "A generated token is shown with the row that predicted it, that of the token before. The last token has no row of "
    "its own: the model never read it."
)


def run(options: AnalyzeOptions) -> None:
    """Generate, print what the tokens were predicted from, and write the page of --save."""
    _check(options)
    assert options.generate is not None
    (text,), errors = read_texts(options.texts), Console(stderr=True)
    also: dict[str, Any] = {} if options.save is None else {"also": page_reductions}
    with shown_steps(errors, f"Generating with {options.model}"):
        reader = replace(TextReader.load(options.model), verify_all=options.verify_all)
        result = read_generation(reader, text, options.generate, options.numbers, options.length, **also)
    if options.as_json:
        print(json.dumps(as_data(result), ensure_ascii=False, indent=1))
    else:
        print_generation(Console(), result, options.table)
    for name, reason in result.result.missing.items():
        errors.print(f"Not captured: {name}: {reason}", style="yellow", markup=False)
    save_page(options, lambda: generation_sheets(result), errors)


def _check(options: AnalyzeOptions) -> None:
    """Refuse options that do not go with --generate, and several texts."""
    check_folder("analyze", "--save", options.save)
    given = [option for name, option in OTHERS.items() if getattr(options, name)]
    if given:
        raise RegardError(
            f"analyze: {given[0]} does not go with --generate. First generate, then read the whole text without "
            "--generate."
        )
    if len(options.texts) != 1:
        raise RegardError(f"analyze: --generate continues one text, got {len(options.texts)}.")


def print_generation(console: Console, result: GenerationResult, table: bool) -> None:
    """Print prompt and output, where the layers read, and the strongest links; with `table` a line for each layer."""
    arrow = "" if result.cross is None else " → "
    console.print(Text.assemble(result.prompt, arrow, (result.output.rstrip(), "bold")))
    count = f"{result.prompt_length} tokens of prompt, {result.num_generated} generated. "
    console.print(Text(f"{count}The model read {facts(result.result)}", style="dim"))
    if table:
        console.print(_table(result))
    else:
        console.print(_in_a_line(result))
    links = sorted(result.links(), key=lambda link: -link.weight)
    for link in links if table else links[:NUM_LINKS]:
        where = "" if result.cross is None else " of the source"
        name = head_name(link.layer, link.head)
        console.print(Text(f"“{link.token}” was predicted with {name} on “{link.key}”{where} ({link.weight:.2f})."))
    console.print(Text(f"{ROWS} {CAVEAT}", style="dim"))
    console.print(Text("More: --table (every layer, every token), --save DIR (a page), --json.", style="dim"))


def _in_a_line(result: GenerationResult) -> Text:
    """Where the heads put their weight to predict, as a mean over layers, and the layers with most on each part."""
    shares = result.shares()
    first, prompt, output = (
        sum(getattr(share, name) for share in shares) / len(shares) for name in ("first", "prompt", "output")
    )
    on_prompt, on_output = (max(shares, key=attrgetter(name)) for name in ("prompt", "output"))
    line = (
        f"To predict, the heads put {prompt:.0%} of their weight on the prompt, {output:.0%} on what they wrote, and "
        f"{first:.0%} on the first token."
    )
    if len(shares) > 1:
        line += (
            f" Most on the prompt: L{on_prompt.layer} ({on_prompt.prompt:.0%}); on their own words: "
            f"L{on_output.layer} ({on_output.output:.0%})."
        )
    return Text(line)


def _table(result: GenerationResult) -> Table:
    """Where the heads of each layer put their weight to predict."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("layer", "first token", "prompt", "own words"):
        table.add_column(title, justify="right")
    for share in result.shares():
        table.add_row(f"L{share.layer}", *(f"{part:.2f}" for part in (share.first, share.prompt, share.output)))
    return table


def as_data(result: GenerationResult) -> dict[str, Any]:
    """The numbers as JSON."""
    return {
        "prompt": result.prompt,
        "output": result.output,
        "tokens": result.labels,
        "prompt_length": result.prompt_length,
        "layers": [asdict(share) for share in result.shares()],
        "links": [asdict(link) for link in result.links()],
    }
