"""Random models of known shapes, and what their attention computes: the calls of SDPA, and their formula in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from benchmarks.gpu.machine import Machine

#: SmolLM2-135M, and layers of Llama 3 8B with few words.
SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49_152,
        "tie_word_embeddings": True,
    },
    "2 layers of 8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
        "vocab_size": 1000,
    },
}
SMALL, STACK = SHAPES
TINY = {"hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 50}
TINY |= {"num_attention_heads": 3, "num_key_value_heads": 1}
#: The standard deviation of queries and keys, so that weights are neither uniform nor those of one key.
SPREAD = 1.2


@lru_cache(maxsize=2)
def llama(machine: Machine, shape: str, dtype: str, own_keys: bool = False) -> Any:
    """A model with random weights; with `own_keys` every query head has its own key head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    machine.give_back()
    sizes = machine.size(SHAPES[shape], TINY)
    if own_keys:
        sizes = sizes | {"num_key_value_heads": sizes["num_attention_heads"]}
    config = LlamaConfig(**sizes, max_position_embeddings=65_536, attn_implementation="sdpa")
    torch.manual_seed(0)
    with torch.device(machine.host):
        model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.data.mul_(SPREAD / (config.initializer_range * config.hidden_size**0.5))
    return machine.place(model.to(getattr(torch, dtype)).eval())


def text(machine: Machine, model: Any, length: int) -> Tensor:
    ids = torch.randint(0, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    return ids.to(machine.device)


@dataclass(frozen=True)
class Call:
    """Queries (B, H, I, D), keys and values (B, G, J, D) of a causal call of SDPA."""

    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def scale(self) -> float:
        return self.query.shape[-1] ** -0.5

    def scores(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Scores of some queries, -inf where a key is later, (B, H, rows, J)."""
        groups = self.query.shape[1] // self.key.shape[1]
        keys = self.key.to(dtype).repeat_interleave(groups, 1)
        scores = self.query[:, :, rows].to(dtype) @ keys.mT * self.scale
        places = torch.arange(keys.shape[2], device=scores.device)
        return scores.masked_fill(places > places[rows, None], -torch.inf)

    def output(self, weights: Tensor) -> Tensor:
        groups = self.query.shape[1] // self.value.shape[1]
        return weights @ self.value.to(weights.dtype).repeat_interleave(groups, 1)

    def rounding(self) -> float:
        """The largest relative error of a weight whose scores are sums in float32: twice that of a score."""
        width = self.query.shape[-1]
        largest = self.query.float().norm(dim=-1).max() * self.key.float().norm(dim=-1).max() * self.scale
        return 2 * (width + 8) * 2.0**-24 * max(1.0, float(largest))


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.calls.append(Call(*(x.detach() for x in args[:3])))
        return func(*args, **(kwargs or {}))


def recorded(run: Callable[[], Any]) -> tuple[Any, list[Call]]:
    """The result of a run, and its calls of SDPA."""
    with _Recorder() as recorder:
        result = run()
    return result, recorder.calls


@contextmanager
def head_outputs(model: Any, layer: int) -> Iterator[list[Tensor]]:
    """What the heads of a layer give to the output projection, (B, I, H, D), one for each run."""
    found: list[Tensor] = []
    projection, heads = model.model.layers[layer].self_attn.o_proj, model.config.num_attention_heads

    def keep(module: Any, args: tuple[Tensor, ...]) -> None:
        found.append(args[0].detach().unflatten(-1, (heads, -1)))

    handle = projection.register_forward_pre_hook(keep)
    try:
        yield found
    finally:
        handle.remove()
