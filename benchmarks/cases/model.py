"""Whole models with the engines of Regard, through `regard.register()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import regard as rg
from benchmarks.case import Aim, BenchSettings, Case, Computes, Side, random_inputs
from benchmarks.peers.package import TRANSFORMERS
from regard.stats import profile
from regard.stats.profile import ModelProfile

LENGTH, WINDOW, WORDS = 16_384, 1024, 1000
#: Tokens of the text whose profile is computed.
LONG = 32_768
#: Texts of the encoder, and tokens of each.
TEXTS = (32, 512)
#: The shape of SmolLM2-135M, with 6 of its 30 layers.
SMALL: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": WORDS,
    "max_position_embeddings": 8193,
}
#: For each length, how many times as fast as sdpa a text, one token after a cache, and a training step shall be.
PREFILLS = {
    torch.float32: {64: 1.0, 512: 1.15, 2048: 1.3, 8192: 1.6},
    torch.bfloat16: {64: 1.0, 512: 1.36, 2048: 1.67, 8192: 2.12},
}
TOKENS = {
    torch.float32: {128: 1.0, 2048: 1.1, 8192: 1.25},
    torch.bfloat16: {128: 1.0, 2048: 1.7, 8192: 3.2},
}
STEPS = {512: 1.25, 2048: 1.4}


def cases(setting: BenchSettings) -> Iterator[Case]:
    """Prefill of a Mistral-like model, and texts through an encoder; both need transformers on both sides."""
    if setting.device == "cuda" or find_spec("transformers") is None:
        return
    yield Case(
        group="model",
        work=f"prefill of {LENGTH:,} tokens, Mistral of 2 layers, 8:2 heads of 64, width 512, window {WINDOW:,}",
        inputs=partial(token_ids, 1, LENGTH),
        mechanism="grouped_query",
        ours=partial(mistral, "regard"),
        peers=(Side("transformers, sdpa", partial(mistral, "sdpa"), setting.aims("faster", 6, 5), TRANSFORMERS),),
    )
    yield Case(
        group="model",
        work=f"{TEXTS[0]} texts of {TEXTS[1]} tokens, BERT of MiniLM's shape: 6 layers, 12 heads of 32",
        inputs=partial(token_ids, *TEXTS),
        mechanism="multi_head",
        ours=partial(mini_lm, "regard"),
        peers=(Side("transformers, sdpa", partial(mini_lm, "sdpa"), (Aim("faster", 1.0),), TRANSFORMERS),),
    )
    yield whole_profile(setting)
    yield from registered(setting)


def whole_profile(setting: BenchSettings) -> Case:
    """The statistics of a long text beside its forward alone."""
    bare = partial(llama, lambda model, ids: model(ids, use_cache=False).last_hidden_state)
    return Case(
        group="model",
        work=f"forward and whole profile of {LONG:,} tokens, Llama of 2 layers, 4 heads of 64, width 256",
        inputs=partial(token_ids, 1, LONG),
        mechanism="multi_head",
        ours=partial(llama, profiled),
        peers=(
            Side(
                "the same forward alone",
                bare,
                setting.aims("time", 1.5, 2.0),
                TRANSFORMERS,
                differs="it computes no statistics",
            ),
        ),
        weighs=False,
    )


def registered(setting: BenchSettings) -> Iterator[Case]:
    """A language model through `rg.register()`: texts, the next token after a cache, and training steps."""
    for dtype, goals in PREFILLS.items():
        for n, least in goals.items():
            yield _beside_sdpa(f"a text of {n:,} tokens", whole_text, (1, n, SMALL["hidden_size"]), dtype, least)
    for dtype, goals in TOKENS.items():
        for n, least in goals.items():
            shape = (1, n + 1, SMALL["hidden_size"])
            yield _beside_sdpa(f"one token after {n:,}", next_token, shape, dtype, least)
    for n, least in STEPS.items():
        yield _beside_sdpa(
            f"a training step of {n:,} tokens", trained, (1, n, SMALL["hidden_size"]), torch.float32, least
        )


def _beside_sdpa(work: str, run: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype, least: float) -> Case:
    name = str(dtype).removeprefix("torch.")
    peer = Side(
        "transformers, sdpa",
        partial(run, "sdpa"),
        (Aim("faster", least),),
        TRANSFORMERS,
        tolerance=1e-3 if dtype == torch.float32 else 5e-2,
    )
    bare = Side(
        "the model without its attention",
        partial(run, "values"),
        package=TRANSFORMERS,
        differs="each token gets its own value: no attention can be faster",
    )
    return Case(
        group="model",
        work=f"{work}, Llama of 6 layers with the shape of SmolLM2, {name}",
        inputs=partial(random_inputs, (shape,), "cpu", dtype),
        mechanism="grouped_query",
        ours=partial(run, "regard"),
        peers=(peer,) if run is trained else (peer, bare),
        learns=run is trained,
        weighs=False,
    )


def small_llama(backend: str, dtype: torch.dtype) -> Any:
    """Six layers with the shape of SmolLM2-135M and random weights, the same for every backend."""
    from transformers import LlamaConfig, LlamaModel

    return _drawn(LlamaModel, LlamaConfig(**SMALL), backend).to(dtype)


def whole_text(backend: str, embeddings: Tensor) -> Callable[[Tensor], Any]:
    """All tokens at once, without a cache."""
    model = small_llama(backend, embeddings.dtype)
    return lambda embeddings: model(inputs_embeds=embeddings, use_cache=False).last_hidden_state


def next_token(backend: str, embeddings: Tensor) -> Callable[[Tensor], Any]:
    """The last token, after a cache of those before it, which each run leaves as it was."""
    from transformers import DynamicCache

    model, cache = small_llama(backend, embeddings.dtype), DynamicCache()
    with torch.no_grad():
        model(inputs_embeds=embeddings[:, :-1], past_key_values=cache)

    def run(embeddings: Tensor) -> Tensor:
        output = model(inputs_embeds=embeddings[:, -1:], past_key_values=cache).last_hidden_state
        cache.crop(-1)
        return output

    return run


def trained(backend: str, embeddings: Tensor) -> Computes:
    """Forward and backward to all weights."""
    model = small_llama(backend, embeddings.dtype)
    weights = tuple(p for name, p in model.named_parameters() if not name.startswith("embed_tokens"))
    return Computes(lambda embeddings: model(inputs_embeds=embeddings, use_cache=False).last_hidden_state, weights)


def token_ids(batch: int, length: int) -> tuple[Tensor, ...]:
    """Random tokens, the same at every call."""
    return (torch.randint(0, WORDS, (batch, length), generator=torch.Generator().manual_seed(0)),)


def mistral(backend: str, ids: Tensor) -> Callable[[Tensor], Any]:
    """A model with random weights, the same for every backend."""
    from transformers import MistralConfig, MistralModel

    config = MistralConfig(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=WINDOW,
        vocab_size=WORDS,
        max_position_embeddings=2 * LENGTH,
    )
    model = _drawn(MistralModel, config, backend)
    return lambda ids: model(ids, use_cache=False).last_hidden_state


def mini_lm(backend: str, ids: Tensor) -> Callable[[Tensor], Any]:
    """An encoder with the sizes of MiniLM and random weights, the same for every backend."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=12, vocab_size=WORDS
    )
    model = _drawn(BertModel, config, backend)
    return lambda ids: model(ids).last_hidden_state


def llama(run: Callable[[Any, Tensor], Any], ids: Tensor) -> Callable[[Tensor], Any]:
    """A run of a decoder with random weights on torch's kernel."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=WORDS,
        max_position_embeddings=LONG,
    )
    return partial(run, _drawn(LlamaModel, config, "sdpa"))


def profiled(model: Any, ids: Tensor) -> ModelProfile:
    """A watched forward, and every statistic, the strongest links and the similarity of all heads."""
    with rg.watch(model) as seen:
        model(ids, use_cache=False)
    return profile(seen.maps, [str(token) for token in ids[0].tolist()])


def values(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
    """A backend of transformers that computes nothing: the values of the queries' own tokens, for each head."""
    own = value[:, :, -query.shape[2] :].transpose(1, 2)
    return own.repeat_interleave(query.shape[1] // key.shape[1], 2), None


def _drawn(kind: Any, config: Any, backend: str) -> Any:
    if backend == "regard":
        rg.register()
    if backend == "values":
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(backend, values)
        AttentionMaskInterface.register(backend, lambda *args, **options: None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind._from_config(config, attn_implementation=backend).eval()
