"""One page for each mechanism, made from its file in src/regard/catalog: its texts, and two pictures."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from torch import Tensor

import regard as rg
from regard.catalog.entry import DRAWS, FAMILIES
from regard.cli.catalog import LETTERS
from regard.drawing.color import colormap
from regard.hf.models import load_model

mpl.use("agg")

SENTENCE = "The animal didn't cross the street because it was too tired."
#: A layer and a head of MiniLM that link words, rather than every word to the separator.
LAYER, HEAD, WIDTH = 3, 1, 32
#: The sections of the scored mechanisms: the heading, and the mechanisms under it. Other families have one each.
SECTIONS = {
    "Scores": "luong_dot luong_general luong_concat bahdanau cosine soft_lookup qk_norm",
    "Heads and roles": "self_attention masked cross multi_head grouped_query multi_query mla gated_output",
    "Positions": "sinusoidal learned_positions rope alibi t5 shaw transformer_xl yarn longrope multimodal_rope "
    "axial_rope kerple fire forgetting pope",
    "Masks": "sliding_window block_local dilated longformer bigbird tree shared_prefix neighborhood sliding_tiles",
    "Normalizers": "sparse top_k softcap sinks sigmoid scalable_softmax position_temperature",
    "Linear time": "linear performer",
    "Convolutions": "token_shift short_convolution long_convolution",
}
#: Arguments of mechanisms in pictures, where those of their small examples do not fit the width of the model.
PICTURED = {
    "longrope": {"factors": [1.0 + m for m in range(WIDTH // 2)]},
    "axial_rope": {"coordinates": torch.stack((torch.arange(24) // 6, torch.arange(24) % 6))},
    "multimodal_rope": {  # the time, row and column of 4 words, a picture of 4 x 4 patches, and 4 words
        "coordinates": torch.tensor(
            [
                [0, 1, 2, 3, *[4] * 16, 8, 9, 10, 11],
                [0, 1, 2, 3, *(4 + m // 4 for m in range(16)), 8, 9, 10, 11],
                [0, 1, 2, 3, *(4 + m % 4 for m in range(16)), 8, 9, 10, 11],
            ]
        ),
        "sections": (6, 5, 5),
    },
}
LEFT_OUT = "Another page says [what is left out, and why](../guides/left-out.md).\n"
PLACE = (
    "Left: all tokens are the same, so the weights show only the mask, the bias and the positions (gray: not allowed). "
)
NOWHERE = "This mechanism has none of these, so all weights are equal: it does not know the order of the tokens. "
REAL = (
    "Right: the queries and keys of layer {layer}, head {head} of MiniLM, a BERT of six layers, on a sentence."
    "{untrained} Each picture has its own color scale, {scale}."
)
#: The scales of pictures, for weights that are never negative, and for others.
SCALES = "from 0 to its largest weight", "red above 0, blue below 0"
#: Families whose calls need tensors besides, and what these are.
RANDOM = {
    "transported": ". Decays, shares and steps are random at right",
    "selected": ". Tensors that an indexer needs are random at right",
}
UNTRAINED = " The parameters of the mechanism are not trained, so the picture shows how it works, not what it learns."


def names() -> list[str]:
    return list(rg.mechanisms())


def pages() -> Iterator[tuple[str, str | bytes]]:
    """Path and content of every page and picture of the section."""
    tokens, query, key = _read()
    yield "catalog/index.md", _index()
    for name, entry in rg.mechanisms().items():
        attention, q, k = _fitted(entry, query, key)
        yield f"catalog/{name}.md", _page(entry, attention)
        yield f"catalog/{name}.png", _picture(entry, attention, q, k, tokens)


def _index() -> str:
    """All mechanisms by family, then by year."""
    made = f"{len(names())} mechanisms. Each page is made from one file of `src/regard/catalog`."
    lines = ["# Catalog\n", made, LEFT_OUT, f"{LETTERS}\n"]
    lines.append('<div class="cards" markdown>\n')
    for family, meaning in FAMILIES.items():
        of_family = sorted((e for e in rg.mechanisms().values() if e.family == family), key=lambda e: (e.year, e.name))
        if of_family:
            lines += [f"## {family.capitalize()}\n", f"{meaning}\n"]
            for title, entries in _sections(of_family):
                lines += [f"### {title}\n"] if title else []
                lines += ["| mechanism | what it does | cost | year, and some models |", "|---|---|---|---|"]
                lines += [*map(_row, entries), ""]
    return "\n".join([*lines, "</div>"])


def _sections(entries: list[rg.types.CatalogEntry]) -> Iterator[tuple[str, list[rg.types.CatalogEntry]]]:
    """The scored mechanisms in sections, those that no section names at the end; other families as they are."""
    if entries[0].family != "scored":
        yield "", entries
        return
    named = {title: names.split() for title, names in SECTIONS.items()}
    for title, names in named.items():
        yield title, [entry for entry in entries if entry.name in names]
    others = [entry for entry in entries if not any(entry.name in names for names in named.values())]
    if others:
        yield "Others", others


def _row(entry: rg.types.CatalogEntry) -> str:
    origin = f"{entry.year}{': ' if entry.used_by else ''}{', '.join(entry.used_by)}"
    cells = (f"[{entry.name}]({entry.name}.md)", entry.summary, entry.cost, origin)
    return f"| {' | '.join(map(_cell, cells))} |"


def _tags(entry: rg.types.CatalogEntry) -> list[str]:
    """The names of one word. The search cuts names at hyphens, and a tag outweighs all titles.

    So the tag "intra-attention" would come first for each query with the word attention.
    """
    return [entry.name, *(name for name in entry.also_called if not re.search(r"[\s-]", name))]


def _page(entry: rg.types.CatalogEntry, attention: rg.Attention) -> str:
    example, q, k, v = entry.example()
    trained = any(True for _ in attention.parameters())
    is_signed = example(q, k, v, **entry.tensors(example, q, k, v)).weights.is_signed
    has_tensors = bool(entry.tensors(example, q, k, v))
    scale = SCALES[is_signed] + (RANDOM.get(entry.family, "") if has_tensors else "")
    slots = (attention.mask, getattr(attention, "position", None), *getattr(attention, "bias", ()))
    shown = (
        PLACE
        + ("" if any(slot is not None for slot in slots) else NOWHERE)
        + REAL.format(layer=LAYER, head=HEAD, untrained=UNTRAINED if trained else "", scale=scale)
    )
    parts = [
        f"---\ntags: {json.dumps(_tags(entry))}\n---\n",
        f"# {entry.name}: {entry.also_called[0]}\n\n{entry.summary}\n",
        f"Also called\n:   {', '.join(entry.also_called)}\n",
        _formula(entry.formula),
        f"Paper\n:   {_linked(entry.paper)}\n",
        f"Family\n:   {entry.family}\n",
        f"Models\n:   {', '.join(entry.used_by)} (folders of transformers)\n" if entry.used_by else "",
        f"Cost\n:   {entry.cost}\n",
        f"![Weights of {entry.name}: from places alone, and on a sentence]({entry.name}.png)\n",
        f"{shown}\n",
        f"## Use\n\n```python\n{_use(entry, q, k, v)}\n```\n",
        f"Parameters: `{entry.signature}`. It is made of these pieces:\n",
        _formula(repr(entry.build(**entry.tiny))),
    ]
    if entry.disagree:
        parts.append(f"## Where libraries disagree\n\n{entry.disagree[0].upper()}{entry.disagree[1:]}\n")
    return "\n".join(parts)


def _use(entry: rg.types.CatalogEntry, q: Tensor, k: Tensor, v: Tensor) -> str:
    """A few lines that run, with the shapes that the catalog gives."""
    arguments = ", ".join(f"{name}={_written(value)}" for name, value in entry.tiny.items())
    shapes = [
        f"{name} = torch.randn{tuple(x.shape)}" + " " * (28 - len(str(tuple(x.shape)))) + f"# {axes}"
        for name, x, axes in zip("qkv", (q, k, v), ("B, H, I, D", "B, G, J, D", "B, G, J, E"), strict=True)
    ]
    lines = ["import torch", "import regard as rg", "", f'attention = rg.mechanism("{entry.name}").build({arguments})']
    needed = entry.tensors(entry.build(**entry.tiny), q, k, v)
    drawn = [f"{name} = {_drawn(name, tensor)}" for name, tensor in needed.items()]
    given = "".join(f", {name}={name}" for name in needed)
    lines += [*shapes, *drawn, "", f"seen = attention(q, k, v{given})"]
    return "\n".join([*lines, "print(seen.output.shape, seen.weights[0, 0, 5])"])


def _drawn(name: str, tensor: Tensor) -> str:
    """The code that draws a tensor of the call."""
    code = DRAWS[name][1] if name in DRAWS else "torch.rand{}"
    return code.format(tuple(tensor.shape)).replace("normalize(", "torch.nn.functional.normalize(")


def _written(value: object) -> str:
    """A value as a reader types it."""
    return f"torch.tensor({value.tolist()})" if isinstance(value, Tensor) else repr(value)


def _formula(text: str) -> str:
    """Text that keeps its line breaks and wraps on narrow pages."""
    return f'<div class="formula" markdown>\n\n```text\n{text}\n```\n\n</div>\n'


def _linked(text: str) -> str:
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


@torch.no_grad()
def _read() -> tuple[list[str], Tensor, Tensor]:
    """The tokens of the sentence, and the queries and keys of one layer of MiniLM: (1, 12, n, 32)."""
    model, tokenizer = load_model("minilm")
    given = tokenizer(SENTENCE, return_tensors="pt")
    hidden = model(**given, output_hidden_states=True).hidden_states[LAYER]
    projections = model.encoder.layer[LAYER].attention.self
    query, key = (p(hidden).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for p in (projections.query, projections.key))
    return tokenizer.convert_ids_to_tokens(given["input_ids"][0]), query, key


def _fitted(entry: rg.types.CatalogEntry, query: Tensor, key: Tensor) -> tuple[rg.Attention, Tensor, Tensor]:
    """The mechanism for the heads, width and length of the model, and the queries and keys of as many heads."""
    heads = entry.tiny.get("num_heads", 1)
    sizes = dict.fromkeys(("head_dim", "query_dim", "key_dim", "hidden"), WIDTH) | {"num_features": 256}
    given = {name: sizes.get(name, value) for name, value in entry.tiny.items()}
    if entry.name == "longformer":
        given |= {"size": 5, "global_positions": (0,)}
    if entry.name == "bigbird":
        given["block"] = 2
    given |= PICTURED.get(entry.name, {})
    torch.manual_seed(0)
    with torch.no_grad():
        attention = entry.build(**given).eval()
    chosen = slice(HEAD, HEAD + heads)
    return attention, query[:, chosen], key[:, chosen]


def _shown(entry: rg.types.CatalogEntry, attention: rg.Attention, q: Tensor, k: Tensor) -> list[rg.AttentionMap]:
    """The two maps of a picture: of 24 tokens that are the same, and of the words of the sentence."""
    alike = torch.ones(1, q.shape[1], 24, q.shape[3]) / 2
    needed = entry.tensors(attention, alike, alike, alike)
    needed = {name: x.mean(2, keepdim=True).expand_as(x) for name, x in needed.items()}
    words = entry.tensors(attention, q, k, k)
    return [attention(alike, alike, alike, **needed).weights, attention(q, k, k, **words).weights]


@torch.no_grad()
def _picture(entry: rg.types.CatalogEntry, attention: rg.Attention, q: Tensor, k: Tensor, tokens: list[str]) -> bytes:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.6), layout="constrained")
    of_places, of_words = _shown(entry, attention, q, k)
    _draw(left, of_places)
    left.set(title="places alone", xlabel="key", ylabel="query")
    _draw(right, of_words)
    right.set_title("a sentence")
    right.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=8)
    right.set_yticks(range(len(tokens)), tokens, fontsize=8)
    written = io.BytesIO()
    figure.savefig(written, dpi=130)
    plt.close(figure)
    return written.getvalue()


def _draw(axes: plt.Axes, weights: rg.AttentionMap) -> None:
    grid = weights.grid
    shown = weights.tile(0, 0, slice(0, weights.shape[2]), slice(0, weights.shape[3]))[0, 0].clone()
    if weights.attention.mask is not None:
        shown[~weights.attention.mask.allowed(grid).expand(1, weights.shape[1], *shown.shape)[0, 0]] = float("nan")
    if weights.is_signed:  # blue: below 0, red: above
        colors = mpl.colormaps["RdBu_r"].with_extremes(bad="#d9d9d9")
        largest = float(shown.nan_to_num().abs().max())
        norm: mpl.colors.Normalize = mpl.colors.Normalize(-largest, largest)
    else:
        colors = colormap().with_extremes(bad="#d9d9d9")
        norm = mpl.colors.PowerNorm(0.5, vmin=0)
    picture = axes.imshow(shown, cmap=colors, norm=norm)
    plt.colorbar(picture, ax=axes, shrink=0.75, label="weight")
