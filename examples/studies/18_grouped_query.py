"""
# Grouped and multi-query attention: a smaller cache

A model that generates text stores the keys and values of all tokens so far, and reads all of them for every new
token. In multi-query attention (Shazeer 2019, arXiv:1911.02150) all query heads share one key and value head; in
grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) groups of query heads do. Here we count the bytes of
the cache, time one decoding step, and train the same small translator with 8, 2 and 1 key heads.
"""

import time

import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

import regard as rg

torch.manual_seed(0)
torch.set_num_threads(1)
HEADS, WIDTH, LENGTH = 8, 64, 8192
attention = rg.Attention(mask=rg.causal())

# %%
# Sharing needs no option: it follows from the number of key heads. It equals multi-head attention with repeated key
# heads.
q, k, v = torch.randn(1, HEADS, 64, WIDTH), *torch.randn(2, 1, 2, 64, WIDTH)
repeated = attention(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)).output
assert torch.allclose(attention(q, k, v).output, repeated, atol=1e-6)

# %%
# The cache of one layer at 8,192 tokens, and the time of the next token. The cache gets smaller by exactly the number
# of heads that share. The time falls less, because there are still scores and sums of 8 query heads.
mebibytes, took = {}, {}
for groups in (8, 4, 2, 1):
    k, v = torch.randn(2, 1, groups, LENGTH, WIDTH)
    cache, clock = attention(q[:, :, :1], k, v, cache=rg.GrowingCache()).cache, []
    mebibytes[groups] = (cache.store.key.nbytes + cache.store.value.nbytes) / 2**20
    for _ in range(20):
        start = time.process_time()
        with torch.no_grad():  # then the cache grows in place
            cache = attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], cache=cache).cache
        clock.append(time.process_time() - start)
    took[groups] = 1e3 * min(clock)
    print(f"{groups} key heads: cache {mebibytes[groups]:4.1f} MiB, one more token {took[groups]:.2f} ms")
    assert mebibytes[groups] == 2 * groups * LENGTH * WIDTH * 4 / 2**20
assert took[1] < 0.8 * took[8]

# %%
# Quality: translators of short sentences after the same number of steps. Heads are only 8 wide here, so sharing costs
# quality; 2 key heads are not always better than 1. In large models it costs little (Ainslie et al., table 1).
pairs = [pair for pair in rg.lab.data.synthetic_pairs("grammar", 17_000) if len(pair.target.split()) <= 10]
texts = zip(*((pair.source, pair.target) for pair in pairs), strict=True)
words = [rg.lab.data.train_tokenizer(text, kind="words") for text in texts]
ids = rg.lab.data.encode_pairs(pairs, *words)


def loss_of(model, batch):
    logits = model.logits(model(batch.source, batch.target_input))
    return F.cross_entropy(logits.mT, batch.target_output, ignore_index=rg.lab.data.PAD)


losses, sizes = {}, {"source_size": len(words[0]), "target_size": len(words[1]), "width": 64, "layers": 1}
for groups in (8, 2, 1):
    torch.manual_seed(0)
    model = rg.lab.build("transformer", **sizes, num_heads=8, num_key_value_heads=groups)
    optimizer, batches = torch.optim.Adam(model.parameters(), lr=4e-3), rg.lab.data.Batches(ids[:-200], sentences=64)
    for batch in batches.epoch():
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    with torch.no_grad():
        losses[groups] = loss_of(model.eval(), rg.lab.data.Batch.of(ids[-200:])).item()
    print(f"{groups} key heads: test loss {losses[groups]:.3f} nats after {len(batches.epoch())} steps")
assert losses[8] + 0.1 < min(losses[2], losses[1])
figure, axes = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
titles = ("Cache at 8,192 tokens", "MiB"), ("One more token", "milliseconds"), ("Test loss", "nats per token")
for axis, numbers, (title, unit) in zip(axes, (mebibytes, took, losses), titles, strict=True):
    axis.bar([str(groups) for groups in numbers], list(numbers.values()), color="#0072B2")
    axis.set(title=title, xlabel="key heads (of 8 query heads)", ylabel=unit)
rg.drawing.show_or_save("18_grouped_query.png")
