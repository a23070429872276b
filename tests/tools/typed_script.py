"""A user's script with types; tests/front/test_types.py runs it, and checks it with pyright and mypy."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import regard as rg


class Strongest(rg.maps.Reduction[Tensor]):
    """A statistic of the user's own."""

    def init(self, shape: tuple[int, int, int, int], device: torch.device) -> list[Tensor]:
        return [torch.zeros(shape[:2], device=device)]

    def add(self, state: list[Tensor], tile: rg.maps.Tile) -> None:
        state[0].copy_(state[0].maximum(tile.weights.amax((-2, -1))))


class Reader(nn.Module):
    """A module of the user's own around one of ours."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention = rg.nn.MultiHeadAttention(width, num_heads)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x).output
        return output


def statistics(weights: rg.AttentionMap) -> tuple[Tensor, Tensor, rg.maps.RowLinks]:
    entropy, received, links = weights.summarize(rg.maps.Entropy(), rg.maps.KeyTotals(), rg.maps.TopLinks(2))
    assert torch.equal(weights.entropy(), entropy) and weights.top(2).keys.shape == links.keys.shape
    return entropy, received, links


def attending(num_heads: int = 2) -> rg.types.AttentionOutput:
    mask = rg.causal() & rg.window(3) | rg.masks.global_tokens([0])
    attention = rg.Attention(
        position=rg.RoPE(8), mask=mask, bias=[rg.biases.Softcap(30.0)], normalizer=rg.normalizers.Softmax()
    )
    q, k, v = torch.randn(3, 1, num_heads, 6, 8)
    print(rg.plan(q, k, v, attention=attention))
    result = rg.attend(q, k, v, attention=attention, cache=rg.GrowingCache())
    again = rg.mechanism("sliding_window").build(size=3)
    names: list[str] = [entry.name for entry in rg.mechanisms().values()]
    assert len(names) > 20 and again(q, k, v).output.shape == result.output.shape
    return result


def watching(tokens: list[str]) -> list[str]:
    model = Reader(width=8, num_heads=2).eval()
    with rg.watch(model) as watched:
        model(torch.randn(1, len(tokens), 8))
    profile = rg.profile(watched.maps, tokens)
    return [finding.sentence for finding in rg.findings(profile)]


def translating(folder: Path) -> str:
    corpus = rg.lab.data.load_corpus("copy", size=40)
    model = rg.lab.build("bahdanau", source_size=9, target_size=9, width=8)
    sheet: type[rg.viewer.Sheet] = rg.viewer.Sheet
    return f"{corpus.name} {type(model).__name__} {folder.name} {sheet.__name__}"


def main() -> None:
    result = attending()
    entropy, _, _ = statistics(result.weights)
    (strongest,) = result.weights.summarize(Strongest())
    print(entropy.shape, strongest.shape, result.weights[0, 1, 2:4].shape, result.weights.shape)
    print(watching(["a", "b", "c"]), translating(Path("run")))
    try:
        rg.window(0)
    except rg.RegardError as error:
        print(error)


if __name__ == "__main__":
    main()
