"""What watching costs in a training loop: the median time of a step with and without `rg.watch`, measured in turns.

    python scripts/watch_cost.py

A small BERT (6 layers, 8 heads, width 256, 8 texts of 128 tokens) is trained on random tokens. A watched step also
computes the mean entropy of each head. A log that does so every 20th step costs a twentieth, by calculation.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import regard as rg


def small_model() -> nn.Module:
    """A BERT with random weights."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 500, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8}
    return BertForMaskedLM(BertConfig(**sizes, intermediate_size=1024))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    """One step of training."""
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def watched_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> dict[str, float]:
    """A step, and the mean entropy of each head in nats: what the recipe logs."""
    with rg.watch(model, keep="statistics", reductions=[rg.maps.Entropy()], verify=False) as seen:
        step(model, optimizer, ids)
    entropies = {name: seen.statistics[name].of(rg.maps.Entropy()).float().mean((0, 2)) for name in seen.statistics}
    return {f"{name}/H{head}": float(nats) for name, heads in entropies.items() for head, nats in enumerate(heads)}


def main(rounds: int = 12, steps: int = 3) -> None:
    """Measure in turns and print the medians."""
    model, ids = small_model(), torch.randint(500, (8, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    times: dict[str, list[float]] = {"plain": [], "watched": []}
    for _ in range(rounds):
        for name, run in (("plain", step), ("watched", watched_step)):
            for _ in range(steps):
                start = time.perf_counter()
                run(model, optimizer, ids)
                times[name].append(time.perf_counter() - start)
    plain, watched = median(times["plain"]), median(times["watched"])
    print(f"a step: {plain * 1000:.0f} ms; with the entropy of each head: {watched * 1000:.0f} ms", end=" ")
    print(f"({watched / plain:.2f} times)")
    print(f"logged every 20th step: {1 + (watched / plain - 1) / 20:.3f} times (calculated)")


if __name__ == "__main__":
    main()
