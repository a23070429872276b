"""`keep="statistics"`, and what generation does to caches."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import transformers
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import regard as rg
from kernels import needs_kernel
from miniatures import LLAMA, padding, sharpened, tokens
from regard.maps import passes
from watching import assert_verified, watched

REDUCTIONS = (rg.maps.Entropy(), rg.maps.TopLinks(2), rg.maps.KeyTotals(), rg.maps.Pool(3, 3), rg.maps.Similarity())


def llama(backend="sdpa"):
    config = transformers.LlamaConfig(**LLAMA)
    return sharpened(transformers.LlamaForCausalLM._from_config(config, attn_implementation=backend).eval())


@dataclass(frozen=True)
class Rows(rg.maps.Reduction):
    """How many rows, and their weight by head: of one size for every text."""

    def init(self, shape, device):
        return [torch.zeros(shape[1], device=device)]

    def add(self, state, tile):
        state[0] += tile.weights.sum((0, 2, 3))


def test_statistics_are_those_of_the_maps():
    model, inputs = llama(), {"input_ids": tokens(9), "attention_mask": padding("left")}
    _, kept = watched(model, inputs)
    _, seen = watched(model, inputs, keep="statistics", reductions=REDUCTIONS)
    assert list(seen.statistics) == kept.names
    for name, weights in kept.maps.items():
        for reduction, wanted in zip(REDUCTIONS, weights.summarize(*REDUCTIONS), strict=True):
            torch.testing.assert_close(seen.statistics[name].of(reduction), wanted, rtol=0, atol=0)
            torch.testing.assert_close(seen.statistics[name].of(type(reduction)), wanted, rtol=0, atol=0)
    assert_checks(seen)


def assert_checks(seen):
    assert seen.verify() and all(check.ok for check in seen.verify().values())


def test_results_add_up_over_calls_where_they_can():
    model = llama()
    with (
        rg.watch(model, keep="statistics", reductions=[Rows(), rg.maps.Similarity(), rg.maps.Entropy()]) as seen,
        torch.no_grad(),
    ):
        for length, batch in ((5, 2), (7, 2)):
            model(tokens(length, batch))
    one = seen.statistics[seen.names[0]]
    torch.testing.assert_close(one.merged(Rows), torch.full((4,), 2.0 * (5 + 7)))
    assert one.merged(rg.maps.Similarity).shape == (2, 4, 4)
    assert [len(call) for call in one.calls] == [3, 3]
    assert one.of(rg.maps.Entropy, call=0).shape == (2, 4, 5) and one.of(rg.maps.Entropy).shape == (2, 4, 7)
    with pytest.raises(rg.RegardError, match=r"cannot be merged over calls\. of\(Entropy, call=\.\.\.\)"):
        one.merged(rg.maps.Entropy)
    with pytest.raises(rg.RegardError, match=r"TopLinks was not computed.*reductions=\[\.\.\.\]"):
        one.of(rg.maps.TopLinks)


def test_a_map_needs_queries_and_keys():
    _, seen = watched(llama(), {"input_ids": tokens(5)}, keep="statistics")
    assert len(seen) == 2 and "(2 x 4 heads x 5 x 5)" in repr(seen)
    with pytest.raises(rg.RegardError, match=r"only statistics were kept.*keep='qk'"):
        seen[0]
    _, kept = watched(llama(), {"input_ids": tokens(5)})
    with pytest.raises(rg.RegardError, match="keep='statistics'"):
        _ = kept.statistics
    for wrong, match in (
        ({"keep": "statistics", "reductions": ["entropy"]}, "reductions must be a list of Reductions"),
        ({"reductions": REDUCTIONS}, "only"),
    ):
        with pytest.raises(rg.RegardError, match=match):
            watched(llama(), {"input_ids": tokens(5)}, **wrong)
    with pytest.raises(rg.RegardError, match="at least one reduction"):
        watched(llama(), {"input_ids": tokens(5)}, keep="statistics", reductions=[])


class RememberingAttention(nn.Module):
    """Counts how many of the queries and keys of earlier layers are still held somewhere."""

    def __init__(self, alive):
        super().__init__()
        self.qkv, self.alive, self.held = nn.Linear(16, 48), alive, []

    def forward(self, x):
        self.held.append(sum(not ref.expired() for ref in self.alive))
        q, k, v = (t.clone() for t in self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4))
        self.alive += [StorageWeakRef(q.untyped_storage()), StorageWeakRef(k.untyped_storage())]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("keep", "held"), [("statistics", [0, 0, 0, 0]), ("qk", [0, 2, 4, 6])])
def test_queries_and_keys_of_earlier_layers_are_freed(keep, held, verify):
    alive = []
    model = nn.Sequential(*(RememberingAttention(alive) for _ in range(4)))
    watched(model, {"input": torch.randn(1, 6, 16)}, keep=keep, verify=verify)
    assert [layer.held for layer in model] == [[count] for count in held]


# Generation


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_beams_do_not_disturb_the_maps_of_earlier_steps(backend):
    model, ids = llama(backend), tokens(4)
    told = {
        "num_beams": 3,
        "max_new_tokens": 6,
        "min_new_tokens": 6,
        "do_sample": False,
        "return_dict_in_generate": True,
    }
    with rg.watch(model) as seen:
        out = model.generate(ids, **told)
    model.set_attn_implementation("eager")
    wanted = model.generate(ids, **told, output_attentions=True)
    assert torch.equal(out.sequences, wanted.sequences)
    assert any(not torch.equal(a, torch.arange(6)) for a in beam_origins(wanted))
    for layer in (0, 1):
        calls = seen.calls(layer)
        assert len(calls) == len(wanted.attentions) == 6
        for mine, step in zip(calls, wanted.attentions, strict=True):
            torch.testing.assert_close(mine.dense(), step[layer].expand_as(mine.dense()), atol=1e-5, rtol=0)
    assert_verified(seen)


def beam_origins(out):
    """Where each sequence came from at its steps; a reordering is any that is not its own place."""
    return [column for column in out.beam_indices.T if (column >= 0).all()]


@pytest.mark.parametrize("size", [2, 3])
def test_a_prompt_in_chunks(size):
    model, ids = llama(), tokens(7, batch=1)
    told = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    with rg.watch(model) as seen:
        out = model.generate(ids, **told, prefill_chunk_size=size)
    with rg.watch(model) as whole, torch.no_grad():
        model(out[:, :-1], use_cache=False)
    rows = torch.cat([F.pad(weights.dense(), (0, 9 - weights.shape[3])) for weights in seen.calls(1)], 2)
    torch.testing.assert_close(rows, whole[1].dense(), atol=1e-5, rtol=0)
    assert seen.calls(1)[0].shape[2] == size
    assert_verified(seen)


def test_chunks_of_ones_own_cutting():
    model, ids = llama(), tokens(8)
    cache = transformers.DynamicCache(config=model.config)
    with rg.watch(model) as seen, torch.no_grad():
        for part in ids.split((3, 1, 4), 1):
            model(part, past_key_values=cache)
    with rg.watch(model) as whole, torch.no_grad():
        model(ids, use_cache=False)
    rows = torch.cat([F.pad(weights.dense(), (0, 8 - weights.shape[3])) for weights in seen.calls(0)], 2)
    torch.testing.assert_close(rows, whole[0].dense(), atol=1e-5, rtol=0)


def test_statistics_of_a_generation():
    model, ids = llama(), tokens(4, batch=1)
    with rg.watch(model, keep="statistics") as seen:
        model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    shapes = [call[0].shape[2] for call in seen.statistics[seen.names[0]].calls]
    assert shapes == [4, 1, 1, 1]


@needs_kernel
def test_our_backend_computes_rows_with_the_output(monkeypatch):
    rg.register()
    model, inputs = llama("regard"), {"input_ids": tokens(300)}
    reductions = rg.maps.Entropy(), rg.maps.Distance(), rg.maps.TopLinks(1)
    _, kept = watched(model, inputs)
    expected = {name: weights.summarize(*reductions) for name, weights in kept.maps.items()}
    for pass_of_its_own in ("fill", "logsumexp"):
        monkeypatch.setattr(passes, pass_of_its_own, mock.Mock(side_effect=AssertionError))
    _, seen = watched(model, inputs, keep="statistics", reductions=reductions)
    for name, wanted in expected.items():
        found = [seen.statistics[name].of(reduction) for reduction in reductions]
        torch.testing.assert_close(found, list(wanted), rtol=1e-4, atol=1e-5)
