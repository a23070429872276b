"""Retrieval heads, the pairs of heads behind induction, and the cost of a smaller cache, in SmolLM2-135M.

python docs/claims/roles_of_heads.py [--picture docs/images/roles.png]: a quarter of an hour on one core.
"""

import argparse

import torch

import regard as rg
from regard.base.texts.embedded import passage
from regard.lab.data import load_corpus

#: Least weight beyond sinks and window of heads that keep all keys, and least retrieval score.
FAR, RETRIEVAL = (0.05, 0.1, 0.2, 0.3, 0.5), (0.1, 0.02, 0.0)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--picture")
    picture = options.parse_args().picture
    torch.set_num_threads(1)
    reader = rg.TextReader.load("smollm2")
    needles = reader.needles(length=512)
    for role in needles.labeled:
        print(role.sentence)
    compose(reader)
    verses = " ".join(pair.source for pair in load_corpus("bible-en-fr").train[:300])
    curves: dict[str, list[tuple[float, float]]] = {}
    for least in FAR:
        split = reader.cache_split(passage(), sinks=4, window=128, least=least)
        print(split.sentence)
        whole, none = shrink(reader, split, verses, curves, "heads that read far")
    for least in RETRIEVAL:
        heads = [role for role in needles.roles if role.score > least]
        print(f"{len(heads)} heads have a retrieval score above {least}:")
        shrink(reader, split.keeping(heads), verses, curves, "retrieval heads")
    if picture:
        draw(needles, curves, whole, none, picture)


def compose(reader: rg.TextReader) -> None:
    """K-composition of previous-token heads with induction heads."""
    probe = reader.probe()
    previous, induction = ([role for role in probe.of(kind) if role.label] for kind in ("previous", "induction"))
    scores = rg.hf.composition(reader.model, "K", rotations=3)
    ranks = {(pair.writer, pair.reader): rank for rank, pair in enumerate(scores.pairs, 1)}
    for pair in scores.between(previous, induction)[:5]:
        print(f"{pair.sentence} Rank {ranks[pair.writer, pair.reader]} of {len(ranks):,}.")


def shrink(
    reader: rg.TextReader,
    split: rg.types.KeyHeadSplit,
    text: str,
    curves: dict[str, list[tuple[float, float]]],
    name: str,
) -> tuple[float, float]:
    """Print and keep what the split costs on a text; the perplexities of the whole cache, and if all heads stream."""
    cost = reader.cache_cost(split, text, length=1024)
    print(cost.sentence)
    curves.setdefault(name, []).append((100 * cost.share, cost.split))
    curves.setdefault("as many at random", []).append((100 * cost.share, cost.random))
    return cost.whole, cost.none


def draw(
    needles: rg.types.RoleTable, curves: dict[str, list[tuple[float, float]]], whole: float, none: float, path: str
) -> None:
    """The retrieval score of each head, and perplexity against the share of the cache."""
    import matplotlib.pyplot as plt

    layers, heads = (1 + max(getattr(role, part) for role in needles.roles) for part in ("layer", "head"))
    scores = torch.zeros(heads, layers)
    for role in needles.roles:
        scores[role.head, role.layer] = role.score
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", width_ratios=(1.3, 1))
    image = axes[0].imshow(scores, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    axes[0].set(xlabel="layer", ylabel="head", title="Retrieval score: the share of needle tokens that a head finds")
    figure.colorbar(image, ax=axes[0])
    for (name, points), style in zip(curves.items(), ("o-", "x", "s-"), strict=True):
        axes[1].plot(*zip(*sorted(points), strict=True), style, label=f"{name} keep all keys")
    axes[1].axhline(none, color="#888", linestyle=":", label="every head has 4 + 128 keys")
    axes[1].axhline(whole, color="black", linewidth=0.8, label="whole cache")
    axes[1].set(
        xlabel="cache, % of the whole cache", ylabel="perplexity", title="1,024 tokens of the Bible", xlim=(0, 100)
    )
    axes[1].legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
