"""Convolutions and token shifts: transformers' modules, Fourier transforms in NumPy, caches, masks and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Lfm2Config, RwkvConfig
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.rwkv.modeling_rwkv import RwkvSelfAttention

import regard as rg
from oracles import ORACLES
from regard.engine.convolution import MANY, _fast_length
from regard.maps.stored import load_map, save_map

close = torch.testing.assert_close


def channels(x):
    """(B, n, C) -> (B, C, n, 1): each channel is a head."""
    return x.transpose(1, 2)[..., None]


@torch.no_grad()
def test_a_short_convolution_is_that_of_lfm2():
    """Its module in float64, also token by token with a cache of the last K tokens."""
    config = Lfm2Config(hidden_size=6, conv_L_cache=3, num_hidden_layers=1, layer_types=["conv"], conv_bias=False)
    module, x = Lfm2ShortConv(config, 0).double(), torch.randn(2, 9, 6, dtype=torch.float64)
    expected = module(x)
    gate_in, gate_out, values = (channels(part) for part in module.in_proj(x).chunk(3, -1))
    attention = rg.mechanism("short_convolution").build(6, size=3).double()
    attention.bias[0].numbers.copy_(module.conv.weight[:, 0].flip(-1))
    seen = attention(gate_out, gate_in, values)
    close(module.out_proj(seen.output[..., 0].transpose(1, 2)), expected)
    close(seen.weights.dense() @ values, seen.output)
    cache, steps = rg.caches.RingCache(3), []
    for n in range(9):
        step = attention(*(t[:, :, n : n + 1] for t in (gate_out, gate_in, values)), cache=cache)
        cache = step.cache
        steps.append(step.output)
    close(torch.cat(steps, 2), seen.output)
    assert cache.store.key.shape[2] == 3 and seen.weights.is_signed


@torch.no_grad()
def test_a_token_shift_is_that_of_rwkv():
    config = RwkvConfig(hidden_size=6, attention_hidden_size=6, num_hidden_layers=1, vocab_size=4)
    module, x = RwkvSelfAttention(config).double(), torch.randn(2, 9, 6, dtype=torch.float64)
    torch.nn.init.uniform_(module.time_mix_key)
    torch.nn.init.eye_(module.key.weight)
    expected = module.extract_key_value(x)[1]
    attention = rg.mechanism("token_shift").build(6).double()
    attention.bias[0].share.copy_(module.time_mix_key.flatten())
    ones = torch.ones(2, 6, 9, 1, dtype=torch.float64)
    seen = attention(ones, ones, channels(x))
    close(seen.output, channels(expected))
    close(seen.weights.dense() @ channels(x), seen.output)


@pytest.mark.parametrize("length", [20, MANY, MANY + 29])
def test_a_long_convolution_is_a_product_of_spectra(length):
    """q * irfft(rfft(h) rfft(k v)), zero-padded to twice the length, in NumPy; gradients are those of all scores."""
    torch.manual_seed(0)
    n, attention = 70, rg.mechanism("long_convolution").build(3, length).double()
    q, k, v = (torch.randn(2, 3, n, 1, dtype=torch.float64).requires_grad_() for _ in range(3))
    taps = attention.bias[0].numbers
    spectra = [np.fft.rfft(x.detach().numpy(), 2 * n + length) for x in (taps, (k * v)[..., 0])]
    expected = q[..., 0].detach() * torch.from_numpy(np.fft.irfft(spectra[0] * spectra[1], 2 * n + length)[..., :n])
    seen = attention(q, k, v, engine="convolution")
    close(seen.output[..., 0], expected)
    close(seen.weights[1, 2, [5, 69]] @ v[1, 2], seen.output[1, 2, [5, 69]])
    dense = attention(q, k, v, engine="dense").output
    found, slopes = (torch.autograd.grad(o.sin().sum(), (q, k, v, taps)) for o in (seen.output, dense))
    close(found, slopes)
    single = attention.float()(*(t.detach().float() for t in (q, k, v))).output
    assert (single.double() - seen.output).abs().max() < 1e-5 * seen.output.abs().max()


ORACLES["short_convolution"] = [test_a_short_convolution_is_that_of_lfm2]
ORACLES["long_convolution"] = [test_a_long_convolution_is_a_product_of_spectra]
ORACLES["token_shift"] = [test_a_token_shift_is_that_of_rwkv]


def attention_of(num_taps, mask=None, heads=4):
    taps = torch.randn(heads, num_taps, dtype=torch.float64)
    return rg.Attention(bias=rg.transitions.Taps(taps), mask=mask, normalizer=rg.normalizers.Unnormalized())


@pytest.mark.parametrize("num_taps", [1, 3, 11, 40])
@pytest.mark.parametrize(
    ("I", "start", "J"), [(13, 0, 13), (1, 12, 13), (5, 3, 13), (4, 20, 13), (4, 60, 13), (6, -3, 9), (3, -9, 5)]
)
@torch.no_grad()
def test_queries_anywhere_and_shared_keys(num_taps, I, start, J):
    """Wide keys, keys that two heads share, masks of distances, and queries before, among and after the keys."""
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 4, I, 3).double(), torch.randn(2, 2, J, 3).double(), torch.randn(2, 2, J, 2).double()
    for mask in (None, rg.causal() & rg.masks.dilated(4, 2), rg.window(4)):
        attention, positions = attention_of(num_taps, mask), rg.types.Positions(start, rg.types.Spans.of((0, J)))
        outputs = [attention(q, k, v, positions=positions, engine=e).output for e in ("convolution", "dense")]
        close(*outputs)


@torch.no_grad()
def test_a_map_of_a_convolution_survives_a_file(tmp_path):
    x = torch.randn(1, 4, 6, 1)
    weights = attention_of(3, rg.causal())(x, x, x).weights
    save_map(tmp_path / "map.safetensors", weights)
    assert torch.equal(load_map(tmp_path / "map.safetensors").dense(), weights.dense())
    with pytest.raises(rg.RegardError, match="needs shares"):
        weights.entropy()
    close(weights.shares().dense().sum(-1), torch.ones(1, 4, 6))


def test_refusals():
    x, attention = torch.randn(1, 4, 6, 8), attention_of(3, rg.causal())
    for words, wrong in {
        r"Taps: needs floating-point numbers \(heads, K\).*\(3,\)": lambda: rg.transitions.Taps(torch.ones(3)),
        "float.*int64": lambda: rg.transitions.Taps(torch.ones(3, 2, dtype=torch.int64)),
        "Taps: made for 5 heads, the query has 4": lambda: attention_of(3, heads=5)(x, x, x),
        "mask must depend on the distance only": lambda: attention_of(3, rg.padding([4]))(
            x, x, x, engine="convolution"
        ),
        "at most 256 products.*give 512": lambda: attention(x, x, torch.ones(1, 4, 6, 64), engine="convolution"),
        r"GrowingCache keeps all keys, and RingCache\(size\)": lambda: attention(
            x, x, x, cache=rg.caches.RecurrentCache()
        ),
        "one ConvolutionFilter": lambda: rg.Attention()(x, x, x, engine="convolution"),
    }.items():
        with pytest.raises(rg.RegardError, match=words):
            wrong()
    wide = rg.plan(x, x, torch.ones(1, 4, 6, 64), attention=attention)
    assert wide.engine == "dense" and "at most 256" in wide.refused["convolution"]


def test_transforms_have_the_least_length_with_small_prime_factors():
    smooth = sorted(2**a * 3**b * 5**c for a in range(10) for b in range(7) for c in range(5))
    for length in range(1, 500):
        assert _fast_length(length) == next(n for n in smooth if n >= length)
