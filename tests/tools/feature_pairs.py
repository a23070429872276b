"""Two features at once, drawn: each draw compares a call with formulas written out here, or with a law.

A draw is a name and a seed, which decide everything: `make fuzz ARGS="--pair edit_and_cache --seed 7 --draws 1"`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import cache

import torch
from torch import nn

import regard as rg
from dense_edits import Dense, drawn
from regard.catalog import mechanisms

CLOSE = {"rtol": 1e-8, "atol": 1e-9}
#: Name -> what compares one draw.
PAIRS: dict[str, Callable[[random.Random], None]] = {}
Draw = random.Random


def pair(function: Callable[[Draw], None]) -> Callable[[Draw], None]:
    PAIRS[function.__name__] = function
    return function


def run(name: str, seed: int) -> None:
    """One draw; its error names the draw."""
    rng = random.Random(f"{name} {seed}")
    torch.manual_seed(seed)
    try:
        PAIRS[name](rng)
    except Exception as error:
        error.add_note(f'drawn by: make fuzz ARGS="--pair {name} --seed {seed} --draws 1"')
        raise


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def cuts(rng: Draw, n: int) -> list[tuple[int, int]]:
    """The calls of a text: token by token, or chunks."""
    edges = list(range(n + 1)) if rng.random() < 0.5 else sorted({0, n, *(rng.randint(0, n) for _ in range(3))})
    return list(itertools.pairwise(edges))


# Masks, each beside the pairs that it allows, written out


def drawn_mask(rng: Draw, n: int) -> tuple[rg.masks.Mask, torch.Tensor]:
    """A causal mask with more, and the pairs it allows (n, n)."""
    i, j = torch.arange(n)[:, None], torch.arange(n)
    mask, allowed = rg.causal(), j <= i
    for kind in rng.sample(["window", "documents", "left padding", "some padding"], rng.randint(0, 2)):
        if kind == "window":
            size = rng.randint(1, n)
            mask, allowed = mask & rg.window(size), allowed & (abs(i - j) < size)
        elif kind == "documents":
            first = rng.randint(1, n)
            lengths = [first, n - first] if first < n else [n]
            number = torch.arange(n) >= first
            mask, allowed = mask & rg.documents(lengths), allowed & (number[:, None] == number)
        else:
            real = torch.arange(n) >= rng.randint(0, n - 1) if kind == "left padding" else torch.rand(n) < 0.7
            mask, allowed = mask & rg.padding(real[None]), allowed & real
    return mask, allowed


def softmax_weights(q: torch.Tensor, k: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Weights of scaled dot products (B, H, I, J); key heads are shared; rows without keys are 0."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0)


# Edits and caches


class Net(nn.Module):
    """One causal attention of 4 query heads and 2 key heads, which reads projected keys of any length."""

    def __init__(self, attention: rg.Attention) -> None:
        super().__init__()
        self.attend = rg.nn.MultiHeadAttention(16, 4, 2, attention, output_projection=False).double()

    def forward(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return self.attend(x[:, start:stop], self.attend.keys(x[:, :stop])).output


def dense_of(net: Net, x: torch.Tensor, allowed: torch.Tensor, edits: list[dict]) -> torch.Tensor:
    """The output (B, n, C) of a net with edits, pair by pair."""
    backend = Dense(number=lambda module: 0)
    backend.edits = edits
    mask = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
    projections = net.attend.query, net.attend.key, net.attend.value
    heads = [p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in projections]
    return backend(net, *heads, mask)[0].flatten(2)


def drawn_edits(rng: Draw, n: int, most: int = 2) -> tuple[rg.edits.EditSequence, list[dict]]:
    """Edits of a net of one layer, as values and as the oracle reads them."""
    pairs = [drawn(rng, n) for _ in range(rng.randint(1, most))]
    for edit, own in pairs:
        own["layers"] = [0]
        object.__setattr__(edit.where, "layers", None)
    return rg.edits.EditSequence(tuple(edit for edit, _ in pairs)), [own for _, own in pairs]


@pair
@torch.no_grad()
def edit_and_cache(rng: Draw) -> None:
    """Queries in any chunks, which read the keys so far, under an edit, are one call with the edit written out."""
    n = rng.randint(5, 14)
    i, j = torch.arange(n)[:, None], torch.arange(n)
    size = rng.randint(1, n)
    near = rng.random() < 0.5
    mask, allowed = (rg.causal() & rg.window(size), (j <= i) & (i - j < size)) if near else (rg.causal(), j <= i)
    net, x = Net(rg.Attention(mask=mask)), randn(2, n, 16)
    edit, own = drawn_edits(rng, n)
    expected = dense_of(net, x, allowed, own)
    with rg.edit(net, edit), rg.watch(net) as seen:
        for start, stop in cuts(rng, n):
            torch.testing.assert_close(net(x, start, stop), expected[:, start:stop], **CLOSE)
    assert all(check.ok is not False for check in seen.verify().values()), edit


@cache
def models() -> dict[str, tuple[nn.Module, nn.Module]]:
    """Small models of transformers on sdpa, and the same with whole matrices."""
    import transformers

    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64}
    configs = {
        "llama": transformers.LlamaConfig(**sizes, **heads),
        "window": transformers.MistralConfig(**sizes, **heads, sliding_window=4),
        "gpt2": transformers.GPT2Config(n_layer=2, n_head=4, n_embd=16, vocab_size=20, bos_token_id=0, eos_token_id=0),
    }
    transformers.AttentionInterface.register("dense pairs", DENSE)
    transformers.AttentionMaskInterface.register("dense pairs", transformers.masking_utils.eager_mask)
    made = {}
    for name, config in configs.items():
        both = [
            transformers.AutoModelForCausalLM.from_config(config, attn_implementation=backend).double().eval()
            for backend in ("sdpa", "dense pairs")
        ]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            for parameter in both[0].parameters():
                nn.init.normal_(parameter, std=0.4)
        both[1].load_state_dict(both[0].state_dict())
        made[name] = tuple(both)
    return made


DENSE = Dense()


def needs_transformers() -> bool:
    try:
        import transformers  # noqa: F401
    except ImportError:
        return False
    return True


def edited_model(rng: Draw, n: int) -> tuple[nn.Module, rg.edits.EditSequence, torch.Tensor, torch.Tensor]:
    """A model, edits, tokens, and the logits of whole matrices with the edits written out."""
    model, dense = models()[rng.choice(list(models()))]
    ids = torch.randint(0, 20, (2, n))
    pairs = [drawn(rng, n) for _ in range(rng.randint(1, 2))]
    DENSE.edits = [own for _, own in pairs]
    try:
        expected = dense(ids).logits
    finally:
        DENSE.edits = []
    return model, rg.edits.EditSequence(tuple(edit for edit, _ in pairs)), ids, expected


@pair
@torch.no_grad()
def edit_and_generation(rng: Draw) -> None:
    """Any chunks through the cache of a model, under an edit, are one pass with the edit written out."""
    n = rng.randint(5, 12)
    model, edit, ids, expected = edited_model(rng, n)
    state = None
    with rg.edit(model, edit):
        for start, stop in cuts(rng, n):
            if start < stop:
                out = model(ids[:, start:stop], past_key_values=state, use_cache=True)
                state = out.past_key_values
                torch.testing.assert_close(out.logits, expected[:, start:stop], rtol=1e-7, atol=1e-8)


@pair
@torch.no_grad()
def watch_inside_edit(rng: Draw) -> None:
    """A watch inside edits and gates holds what the model ran: patching with it runs the same again."""
    n = rng.randint(5, 12)
    model, edit, ids, expected = edited_model(rng, n)
    with rg.edit(model, edit), rg.watch(model, keep="qkv") as seen:
        logits = model(ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-7, atol=1e-8)
    assert all(check.ok is not False for check in seen.verify().values()), edit
    with rg.edit(model, rg.edits.ActivationPatch(rg.Where(), "output", seen)):
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-7, atol=1e-8)
    other = torch.randint(0, 20, (2, n))
    layer, head = rng.randrange(2), rng.randrange(4)
    with rg.watch(model, keep="qkv") as source:
        model(other)
    patch = rg.edits.ActivationPatch(rg.Where(layers=layer, heads=head), "output", source)
    with rg.edit(model, edit & patch), rg.watch(model, keep="qkv") as inside:
        patched = model(ids).logits
    torch.testing.assert_close(inside.head_output(layer, head), source.head_output(layer, head), **CLOSE)
    with rg.edit(model, rg.edits.ActivationPatch(rg.Where(), "output", inside)):
        torch.testing.assert_close(model(ids).logits, patched, rtol=1e-7, atol=1e-8)
    gates = {layer: [rng.choice([0, 1, rng.uniform(-2, 2)]) for _ in range(4)]}
    with rg.hf.gated(model, gates), rg.edit(model, edit), rg.watch(model, keep="qkv") as scaled:
        expected = model(ids).logits
    factor = torch.tensor(gates.get(0, [1.0] * 4), dtype=torch.float64)[:, None, None]
    torch.testing.assert_close(scaled.head_output(0), seen.head_output(0) * factor, **CLOSE)
    with rg.edit(model, rg.edits.ActivationPatch(rg.Where(), "output", scaled)):
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-7, atol=1e-8)


# Mechanisms of the catalog


def example(rng: Draw, names: list[str], **sizes: int):
    """A mechanism with its tensors of the call."""
    name = rng.choice(names)
    entry = mechanisms()[name]
    attention, q, k, v = entry.example(seed=rng.randrange(1 << 30), **sizes)
    return attention, q, k, v, entry.tensors(attention, q, k, v)


def mechanism_of_tokens(rng: Draw):
    """Any mechanism over one sequence of its own length."""
    return example(rng, sorted(mechanisms()))


def selections() -> list[rg.selections.Selection]:
    return [
        rg.selections.BlockMeans(size=4, k=3),
        rg.selections.BlockMeans(size=3, k=1),
        rg.selections.CompressedBlocks(size=4, k=3, initial=0, local=1),
        rg.selections.CompressedBlocks(size=3, k=4),
        rg.selections.HashBuckets(num_buckets=4, rounds=2),
        rg.selections.TokenIndexer(k=5),
        rg.selections.BlockIndexer(size=4, k=2),
    ]


def index_tensors(selection: rg.selections.Selection, n: int) -> dict[str, torch.Tensor]:
    if isinstance(selection, rg.selections.TokenIndexer):
        return {"index_query": randn(1, 2, n, 3), "index_key": randn(1, 1, n, 3), "index_weights": randn(1, n, 2)}
    if isinstance(selection, rg.selections.BlockIndexer):
        return {"index_query": randn(1, 2, n, 3), "index_key": randn(1, 1, n, 3)}
    return {}


@pair
@torch.no_grad()
def selection_and_mask(rng: Draw) -> None:
    """The chosen pairs are allowed, their weights are the softmax over them, and hidden keys choose nothing."""
    n, selection = rng.randint(1, 40), rng.choice(selections())
    mask, allowed = drawn_mask(rng, n)
    q, k, v = randn(1, 4, n, 8), randn(1, 2, n, 8), randn(1, 2, n, 8)
    own = index_tensors(selection, n)
    attention = rg.Attention(mask=mask, selection=selection)
    seen = attention(q, k, v, **own)
    weights = seen.weights.dense()
    chosen = weights > 0
    assert not (chosen & ~allowed).any(), "a hidden pair has a weight"
    torch.testing.assert_close(weights, softmax_weights(q, k, chosen), **CLOSE)
    torch.testing.assert_close(seen.output, weights @ v.repeat_interleave(2, 1), **CLOSE)
    has_own = allowed.diagonal()  # its buckets may hold no other key of a padded query
    assert chosen.any(-1)[..., has_own].all() and not chosen[..., ~allowed.any(-1), :].any(), "a row chose no key"
    row = rng.randrange(n)
    hidden = ~allowed[row]
    changed = [x.clone() for x in (k, v, *(own[name] for name in own if name == "index_key"))]
    for x in changed:
        x[:, :, hidden] = randn(*x[:, :, hidden].shape) * 3
    if "index_key" in own:
        own = own | {"index_key": changed[2]}
    again = attention(q, changed[0], changed[1], **own)
    torch.testing.assert_close(again.output[:, :, row], seen.output[:, :, row], **CLOSE)


@pair
@torch.no_grad()
def mechanism_and_hidden_keys(rng: Draw) -> None:
    """Keys and values that the mask hides from a row do not move it."""
    attention, q, k, v, own = mechanism_of_tokens(rng)
    n = k.shape[2]
    if isinstance(attention, rg.Attention) and attention.transition is None:
        hidden = torch.rand(n) < 0.3
        real = rg.padding((~hidden).expand(k.shape[0], n))
        attention = attention.with_mask(real if attention.mask is None else attention.mask & real)
    elif isinstance(attention, rg.composites.Grouped) and attention.attention.mask is not None:
        hidden = torch.arange(n) < rng.randrange(n)
        real = rg.padding((~hidden).expand(k.shape[0], n))
        attention = rg.composites.Grouped(
            attention.attention.with_mask(attention.attention.mask & real), attention.groups
        )
    else:
        return
    try:
        seen = attention(q, k, v, **own)
    except rg.RegardError:
        return
    changed = k.clone(), v.clone()
    for x in changed:
        x[:, :, hidden] = randn(*x[:, :, hidden].shape) * 3
    again = attention(q, *changed, **own)
    torch.testing.assert_close(again.output, seen.output, **CLOSE)
    assert not seen.weights.dense()[..., hidden].any(), "a hidden key has a weight"


@pair
@torch.no_grad()
def mechanism_and_cache(rng: Draw) -> None:
    """Any chunks through a cache are one call through it, or the cache is refused."""
    n = 24
    name = rng.choice(sorted(mechanisms()))
    if "queries" in mechanisms()[name].sizes or "keys" in mechanisms()[name].sizes:
        return  # of given lengths
    attention, q, k, v, own = example(rng, [name])
    if q.shape[2] != k.shape[2] or own:
        return
    make = rng.choice([rg.GrowingCache, lambda: rg.caches.RingCache(size)])
    size = rng.randint(1, n)
    try:
        whole = attention(q, k, v, cache=make()).output
        state, parts = make(), []
        for start, stop in cuts(rng, n):
            seen = attention(q[:, :, start:stop], k[:, :, start:stop], v[:, :, start:stop], cache=state)
            state = seen.cache
            parts.append(seen.output)
    except rg.RegardError:
        return
    if is_causal(attention, q, k, v):
        torch.testing.assert_close(torch.cat(parts, 2), whole, **CLOSE)


def is_causal(attention: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether no query attends to a later key, by its weights."""
    return not attention(q, k, v).weights.dense().triu(1).any()


@pair
def gradients_and_everything(rng: Draw) -> None:
    """Gradients of weights and statistics are the slopes of formulas of the dense weights, by central differences."""
    attention, q, k, v, own = example(rng, [name for name in sorted(mechanisms()) if name not in NOT_SMOOTH], batch=1)
    if not own and q.shape[2] == k.shape[2] and not has_a_length(attention):
        length = rng.choice([1, 2, 3, 5, q.shape[2]])
        q, k, v = (x[:, :, :length].clone() for x in (q, k, v))
    read, formula = MEASURES[rng.choice(sorted(MEASURES))]
    steps = [randn(*x.shape) for x in (q, k)]
    with torch.no_grad():
        ends = []
        for sign in (1, -1):
            moved = (x + sign * STEP * step for x, step in zip((q, k), steps, strict=True))
            ends.append(formula(attention(*moved, v, **own).weights.dense()))
        toward = randn(*ends[0].shape)
        difference = ((ends[0] - ends[1]) / (2 * STEP) * toward).sum()
    q, k = q.requires_grad_(), k.requires_grad_()
    weights = attention(q, k, v, **own).weights
    try:
        number = (read(weights) * toward).sum()
    except rg.RegardError:  # statistics of signed weights, or a map without gradients
        return
    grads = torch.autograd.grad(number, [q, k], allow_unused=True)
    slope = sum((grad * step).sum() for grad, step in zip(grads, steps, strict=True) if grad is not None)
    torch.testing.assert_close(difference.new_tensor(float(slope)), difference, rtol=1e-3, atol=1e-4)


#: The length of a step of the central differences.
STEP = 1e-6
#: A step may choose other keys, so the slope has no value there.
NOT_SMOOTH = {"top_k", "reformer", "deepseek_sparse", "minimax_sparse", "moba", "nsa", "sparse"}
#: How a statistic is read from a map, and its formula on dense weights.
MEASURES = {
    "dense": (lambda w: w.dense(), lambda w: w),
    "row": (lambda w: w[:, 0, -1], lambda w: w[:, 0, -1]),
    "entropy": (lambda w: w.entropy(), lambda w: -torch.special.xlogy(w, w).sum(-1)),
    "shares": (lambda w: w.shares().dense(), lambda w: w.abs() / w.abs().sum(-1, keepdim=True).clamp_min(1e-300)),
}


def has_a_length(attention: object) -> bool:
    """Whether its pieces have a length of their own."""
    kinds = "coordinates", "Projected", "tree", "neighborhood", "sliding_tiles", "documents", "random_blocks", "factors"
    return any(name in repr(attention) for name in kinds)
