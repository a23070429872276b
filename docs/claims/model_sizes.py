"""Models of 12, 24 and 96 layers: weights, caches, and scores if all were stored; from which n scores cost most."""

import torch
from transformers import GPT2Config, GPT2Model

#: Layers, width, heads, and positions of models in the shape of GPT-2 (12 and 24 layers) and GPT-3.
MODELS = {12: (768, 12, 1024), 24: (1024, 16, 1024), 96: (12_288, 96, 2048)}
VOCABULARY, HALF = 50_257, 2  # tokens; bytes of a number in float16


def weights(layers, d, positions):
    """In a layer 4 d^2 + 4 d for attention, 8 d^2 + 5 d for the feed-forward network and 4 d for the norms."""
    return layers * (12 * d**2 + 13 * d) + (VOCABULARY + positions) * d + 2 * d


def size(num_bytes):
    """Bytes as text, in powers of 1,000."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes / 1e3:.3g} kB"


for layers, (d, heads, positions) in MODELS.items():
    sizes = {"n_embd": d, "n_layer": layers, "n_head": heads, "n_positions": positions}
    with torch.device("meta"):  # counts without memory
        model = GPT2Model(GPT2Config(vocab_size=VOCABULARY, **sizes))
    counted = weights(layers, d, positions)
    assert counted == sum(p.numel() for p in model.parameters())
    print(f"{layers} layers, width {d:,}, {heads} heads: {counted:,} weights, {size(counted * HALF)} in float16")
    token = 2 * layers * d * HALF  # a key and a value in each layer
    print(f"  cache of a token {size(token)}, of a window of 256 tokens {size(256 * token)}")
    for n in (2048, 32_768):
        scores, cache = heads * n * n * HALF, n * token
        print(f"  n = {n:6,}: scores of one layer {size(scores)}, of all {size(layers * scores)};", end=" ")
        print(f"cache {size(cache)}, a fourth of the key heads {size(cache / 4)}, one key head {size(cache / heads)}")
    # For each token the matrices of a layer cost 2 x 12 d^2 operations. Scores and weighted sums cost 4 n d, and
    # half of it under a causal mask.
    print(f"  pairs cost as much as matrices at n = 6 d = {6 * d:,}, under a causal mask at {12 * d:,}")
