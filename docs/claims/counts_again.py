"""Claims 1, 3, 4, 19, 20, 33 and 36 once more: other sizes, other libraries, other readings of the sentence."""

import sys
from fractions import Fraction
from functools import partial
from pathlib import Path
from random import Random

import torch
from torch import nn
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

import regard as rg
from regard.hf.models import load_model

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks/ is not in the package
from benchmarks.measure import added_memory

torch.manual_seed(1)
torch.set_num_threads(1)


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def claim_1():
    """Any number of heads; then layers whose heads together are not as wide as the model, or share their keys."""
    counts = {count(rg.nn.MultiHeadAttention(512, 2**power, bias=False)) for power in range(10)}
    torchs = {count(nn.MultiheadAttention(512, heads, bias=False)) for heads in (1, 8, 512)}
    t5 = count(T5Attention(T5Config(d_model=512, num_heads=6, d_kv=64), has_relative_attention_bias=False))
    shared = [count(rg.nn.MultiHeadAttention(512, 8, keys, bias=False)) for keys in (2, 1)]
    without = count(rg.nn.MultiHeadAttention(512, 8, bias=False, output_projection=False))
    print(f"1: 1 to 512 heads: {counts}, torch {torchs}; 6 heads of 64 as in T5 v1.1 small: {t5:,};", end=" ")
    print(f"8 heads with 2 and 1 key heads: {shared}; without the output matrix: {without:,}")
    assert counts == torchs == {4 * 512**2} and t5 == 3 * 512**2 == without and shared == [655_360, 589_824]


def claim_3():
    """torch's own Transformer, with a table of 37,000 words; the words that would give 65 million."""
    stacks = count(nn.Transformer(512, 8, 6, 6, 2048, batch_first=True))
    whole, bare = stacks + 37_000 * 512, sum(4 * 512**2 * m for m in (6, 12)) + 12 * 2 * 512 * 2048
    print(f"3: torch {whole:,}, its matrices alone {bare + 37_000 * 512:,};", end=" ")
    words = [(millions * 1_000_000 - stacks) // 512 for millions in (64.5, 65, 65.5)]
    print("words for 64.5, 65 and 65.5 million:", *(f"{number:,.0f}" for number in words))
    assert whole == 63_084_544 and words[0] > 37_000


def prepared(what, n):
    """A call without arguments, for `added_memory`: the formula or attend, forward or with its backward pass."""
    torch.set_num_threads(1)
    learns, formula = "train" in what, "formula" in what
    q, k, v = (torch.randn(1, 2 if what == "all weights" else 12, n, 64, requires_grad=learns) for _ in range(3))
    attention = rg.Attention(mask=rg.causal() if "causal" in what else None)

    def call():
        with torch.set_grad_enabled(learns):
            seen = None if formula else attention(q, k, v)
            output = seen.output if seen else (q @ k.mT / 8).softmax(-1) @ v
        if learns:
            output.sum().backward()
        if what == "all weights":
            assert torch.allclose(seen.weights.received().sum() / q.shape[1], torch.tensor(float(n)), rtol=1e-4)

    return call


def peak(what, n):
    return round(added_memory(partial(prepared, what, n)))


def claim_4():
    """Half the length, and training, where the formula keeps the weights for the backward pass."""
    formula = {n: peak("formula", n) for n in (2048, 4096)}
    learns = {what: peak(f"train {what}", 4096) for what in ("formula", "attend")}
    print(f"4: the formula, forward {formula}; with the backward pass at 4,096 {learns} (MiB; the scores have 768);")
    print(f"   attend with a causal mask {peak('attend causal', 4096)}")
    assert 3 < formula[4096] / formula[2048] < 5 and learns["formula"] > 2 * 768 and learns["attend"] < 200


def claim_19():
    """How often has the key with the largest cosine the largest weight: random vectors, and the heads of MiniLM."""
    print("19: the strongest key is the most similar one (cosine):", end=" ")
    for d in (4, 64, 512):
        q, k = torch.randn(2000, d), torch.randn(2000, 64, d)
        scores = torch.einsum("nd,nkd->nk", q, k)
        same = scores.argmax(-1) == (scores / k.norm(dim=-1)).argmax(-1)
        unit = nn.functional.normalize(k, dim=-1)
        near = (q[:, None] - unit).square().sum(-1).argmin(-1)
        assert (torch.einsum("nd,nkd->nk", q, unit).argmax(-1) == near).double().mean() > 0.999  # keys of equal length
        print(f"{same.double().mean():.0%} of rows at d = {d},", end=" ")
    model, tokenizer = load_model("minilm")
    text = " ".join(pair.source for pair in rg.lab.data.load_corpus("bible-en-fr").train[5000:5008])
    with torch.no_grad(), rg.watch(model) as seen:
        states = model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states
    shares = []
    for weights, state in zip(seen.maps.values(), states[:-1], strict=True):
        cosine = nn.functional.cosine_similarity(state[0, :, None], state[0, None], dim=-1)
        strongest = weights.dense()[0].argmax(-1)
        itself = torch.arange(len(cosine))
        others = cosine.fill_diagonal_(-2).argmax(-1)
        shares.append([float((strongest == key).double().mean()) for key in (itself, others)])
    itself, others = torch.tensor(shares).mean(0)
    print(
        f"in MiniLM {itself:.1%} of rows attend most to the token itself, {others:.1%} to the most similar other token"
    )
    assert itself + others < 0.2


def claim_20():
    """Other widths, in float64; and the scale of both scores under torch's initialization."""
    for d, key_dim, hidden in ((3, 7, 1), (64, 64, 33), (512, 256, 512)):
        concat, additive = (
            rg.scores.Concat(d, key_dim, hidden).double(),
            rg.scores.Additive(d, key_dim, hidden).double(),
        )
        with torch.no_grad():
            additive.query.weight.copy_(concat.projection.weight[:, :d])
            additive.key.weight.copy_(concat.projection.weight[:, d:])
            additive.direction.copy_(concat.direction)
        states = torch.randn(1, 1, 5, d).double(), *[torch.randn(1, 1, 9, key_dim).double()] * 2
        a, b = (rg.Attention(score)(*states).weights.dense() for score in (concat, additive))
        assert torch.allclose(a, b, atol=1e-14)
    x, y = torch.randn(2, 1000, 512)
    joint, first, second = nn.Linear(1024, 512), nn.Linear(512, 512), nn.Linear(512, 512)
    with torch.no_grad():
        ratio = (first(x) + second(y)).std() / joint(torch.cat((x, y), -1)).std()
    print(
        f"20: equal to 1e-14 in float64; two nn.Linear of torch start {ratio:.2f} times as large as one of both states"
    )
    assert 1.3 < ratio < 1.5


def claim_20_steps():
    """Each word changed in turn, three seeds: how many rows before the changed word's own are unchanged."""
    later = {}
    for name in ("bahdanau", "luong_dot", "luong_general", "luong_concat"):
        for seed in range(3):
            torch.manual_seed(seed)
            model = rg.lab.build(name, source_size=20, target_size=20, width=32)
            source, target = torch.randint(4, 20, (1, 7)), torch.randint(4, 20, (1, 8))
            for word in range(7):
                other = torch.where(torch.arange(8) == word, 23 - target, target)
                maps = [rg.lab.attention_of(model, source, words)[model.cross_attention] for words in (target, other)]
                changed = (maps[0].dense() - maps[1].dense())[0, 0].any(-1)
                later.setdefault(name, set()).add(int(changed.nonzero()[0]) - word)
    print("    the first changed row minus the changed word, 7 words, 3 seeds:", later)
    assert later == {"bahdanau": {1}, "luong_dot": {0}, "luong_general": {0}, "luong_concat": {0}}


def claim_33():
    """All weights of the map are read once, tile by tile, for the sums of its columns."""
    for n in (4096, 16_384):
        print(f"33: all weights of 2 maps of {n:,} x {n:,} ({2 * n * n / 2**18:,.0f} MiB) read:", end=" ")
        used = peak("all weights", n)
        print(f"{used} MiB")
        assert used < 400


def claim_36():
    """A linear recurrence h_t = a_t h_(t-1) + b_t in log2(n) rounds, exact; attention that generates is sequential."""
    random = Random(1)
    steps = [(Fraction(random.randint(-9, 9), 7), Fraction(random.randint(-9, 9), 5)) for _ in range(256)]
    one_by_one, state = [], Fraction(0)
    for a, b in steps:
        state = a * state + b
        one_by_one.append(state)
    rounds, distance, scanned = 0, 1, steps
    while distance < len(steps):
        scanned = [
            (a * scanned[t - distance][0], a * scanned[t - distance][1] + b) if t >= distance else (a, b)
            for t, (a, b) in enumerate(scanned)
        ]
        rounds, distance = rounds + 1, 2 * distance
    print(f"36: a linear recurrence over {len(steps)} steps in {rounds} rounds:", end=" ")
    print(f"the same fractions: {[b for _, b in scanned] == one_by_one}")
    assert [b for _, b in scanned] == one_by_one and rounds == 8


if __name__ == "__main__":
    for check in (claim_1, claim_3, claim_4, claim_19, claim_20, claim_20_steps, claim_33, claim_36):
        check()
