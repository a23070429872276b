"""The goals of the translation lab: training and decoding beside JoeyNMT and transformers, with equal weights.

Each peer has the sizes and the weights of the model it stands beside, and is checked to compute the same before
anything is timed. One thread is timed by its processor time, two by the clock on the wall.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import joey, marian
from benchmarks.measure import Goal, in_turn
from regard.lab import LuongTranslator, Translator, beam_search, build
from regard.lab.data import EOS, PAD, Batch, Batches, encode_pairs, load_corpus, train_tokenizer
from regard.lab.decoding import Hypothesis
from regard.lab.models.loss import translation_loss

WORDS, WIDTH, SENTENCES = 2000, 128, 32
#: Tokens of every translation where lengths are forced.
TOKENS = 24
#: Our mechanism, and what JoeyNMT calls it.
SCORES = {"luong_general": "luong", "bahdanau": "bahdanau"}


def goals() -> Iterator[Goal]:
    """Every goal, measured as it is asked for; a peer that is not installed is named, and its goals are left out."""
    threads = torch.get_num_threads()
    try:
        if name := joey.available():
            print(f"Beside {name}: LSTM of width {WIDTH}, {WORDS:,} words, {SENTENCES} pairs a batch.")
            yield from training()
            yield from recurrent_decoding()
        else:
            print(f"JoeyNMT is not installed, so nothing is measured beside it: {joey.INSTALL}")
        if name := marian.available():
            print(f"Beside MarianMTModel of {name}: 2 + 2 layers of width {WIDTH}, 4 heads, {WORDS:,} words.")
            yield from transformer_decoding()
        else:
            print("transformers is not installed, so nothing is measured beside it: pip install 'regard[bench]'")
    finally:
        torch.set_num_threads(threads)


def compare(ours: Callable[[], object], theirs: Callable[[], object], threads: int = 1, rounds: int = 5) -> float:
    """How many times as fast ours is."""
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    mine, other = in_turn(ours, theirs, rounds=rounds, clock=clock)
    return other / mine


def same(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"translating: {what}; the two sides do not do the same work, so no time is printed.")


# The data


@cache
def encoded() -> dict[str, list[tuple[list[int], list[int]]]]:
    """The training and test splits of the Bibles as ids."""
    corpus = load_corpus("bible-en-fr")
    source = train_tokenizer([pair.source for pair in corpus.train], WORDS, "bpe")
    target = train_tokenizer([pair.target for pair in corpus.train], WORDS, "bpe")
    return {name: encode_pairs(getattr(corpus, name), source, target) for name in ("train", "test")}


def longest_first(pairs: list[tuple[list[int], list[int]]]) -> Batch:
    """JoeyNMT wants its batches sorted."""
    return Batch.of(sorted(pairs, key=lambda pair: -len(pair[0])))


def training_batches(count: int) -> list[Batch]:
    epoch, pairs = Batches(encoded()["train"], sentences=SENTENCES, seed=0).epoch(0), encoded()["train"]
    return [longest_first([pairs[index] for index in epoch[number].indices]) for number in range(count)]


# Training


def training() -> Iterator[Goal]:
    batches = training_batches(4)
    theirs = [joey.their_batch(batch) for batch in batches]
    for attention, name in SCORES.items():
        model = luong(attention)
        peer = joey.peer(model, name)
        check_training(model, peer, batches[0])
        both = partial(compare, over(trainer(model), batches), over(joey.trainer(peer), theirs))
        for threads in (1, 2):
            work = f"training step, {attention} with input feeding, {threads} thread{'s'[: threads - 1]}"
            yield Goal(work, both(threads=threads), 1.3, "x JoeyNMT", at_most=False)
    model = build("bahdanau", source_size=WORDS, target_size=WORDS, width=WIDTH)
    other = joey.peer(luong("bahdanau"), "bahdanau")
    ratio = compare(over(trainer(model), batches), over(joey.trainer(other), theirs))
    yield Goal("training step, Bahdanau's own decoder, which asks before the cell", ratio, 1.3, "x JoeyNMT", False)


def luong(attention: str) -> LuongTranslator:
    """The decoder that JoeyNMT has: the current state asks, and the attentional vector is fed back."""
    torch.manual_seed(0)
    model = build("luong_general", source_size=WORDS, target_size=WORDS, width=WIDTH, attention=attention)
    assert isinstance(model, LuongTranslator)
    joey.tie_to(model)
    return model


def check_training(model: LuongTranslator, peer: Any, batch: Batch) -> None:
    """Losses and the gradients at both ends of the network are equal."""
    peer.loss_function = ("crossentropy", 0.0)
    loss = translation_loss(model, batch.source, batch.target).smoothed
    their_loss = peer(return_type="loss", **vars(joey.their_batch(batch)))[0]
    same(math.isclose(loss.item(), their_loss.item(), rel_tol=1e-5), f"losses {loss.item()} and {their_loss.item()}")
    mine = (model.projection.weight, model.source_embedding.table.weight, model.target_embedding.table.weight)
    other = (peer.decoder.output_layer.weight, peer.src_embed.lut.weight, peer.trg_embed.lut.weight)
    gradients = zip(torch.autograd.grad(loss, mine), torch.autograd.grad(their_loss, other), strict=True)
    for one, two in gradients:
        same(torch.allclose(one, two, rtol=1e-3, atol=1e-4), f"gradients differ by {(one - two).abs().max():.1e}")


def trainer(model: Translator, clip: float = 1.0, rate: float = 1e-4) -> Callable[[Batch], object]:
    """One update as `regard train` makes it."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98), eps=1e-9, fused=True)

    def update(batch: Batch) -> float:
        model.train()
        loss = translation_loss(model, batch.source, batch.target)
        (loss.smoothed / batch.num_tokens).backward()
        value = float(loss.smoothed.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return value

    return update


def over(update: Callable[[Any], object], batches: list[Any]) -> Callable[[], list[object]]:
    return lambda: [update(batch) for batch in batches]


# Decoding


def recurrent_decoding() -> Iterator[Goal]:
    torch.set_num_threads(1)
    model = taught(luong("luong_general"))
    peer = joey.peer(model, "luong")
    several = longest_first(encoded()["test"][:SENTENCES])
    one = longest_first(encoded()["test"][:1])
    for batch, count in ((several, f"{SENTENCES} sentences"), (one, "1 sentence")):
        for forced in (False, True):
            theirs = partial(joey.searcher(peer, 5, *lengths(batch, forced)), joey.their_batch(batch))
            ours = partial(search, model, batch.source, 5, *lengths(batch, forced))
            check_hypotheses(ours(), *theirs())
            work = f"beam 5, {count}, {f'{TOKENS} tokens each' if forced else 'as long as they are'}"
            yield Goal(f"{work}, Luong", compare(ours, theirs), 3, "x JoeyNMT", at_most=False)


def lengths(batch: Batch, forced: bool) -> tuple[int, int]:
    """The least tokens before the end of a sentence, and the most steps: JoeyNMT's own, where none are forced."""
    return (TOKENS - 1, TOKENS) if forced else (1, int(1.5 * batch.source.shape[1]))


def search(model: Translator, source: Tensor, beam: int, least: int, most: int) -> list[Hypothesis]:
    found = beam_search(model, source, beam=beam, length_penalty=1.0, min_length=least, max_length=most)
    return [best for (best,) in found]


def check_hypotheses(ours: list[Hypothesis], ids: Any, scores: Any) -> None:
    """Nearly all sentences are the same; where the two stop searching at other places, the scores stay close."""
    theirs = [[int(token) for token in row if token not in (PAD, EOS)] for row in ids]
    equal = sum([*mine.tokens] == other for mine, other in zip(ours, theirs, strict=True))
    same(equal >= 0.9 * len(ours), f"{equal} of {len(ours)} translations are equal")
    apart = abs(sum(mine.score for mine in ours) - float(scores.sum())) / len(ours)
    same(apart < 0.05, f"mean scores {apart:.3f} apart")


def taught(model: LuongTranslator, steps: int = 400) -> LuongTranslator:
    """A little training, so that translations end where sentences do; then what theirs has not is taken out again."""
    stream = Batches(encoded()["train"], sentences=SENTENCES, seed=0).start_at()
    update = trainer(model, rate=0.003)
    for _ in range(steps):
        update(next(stream)[1])
        joey.tie_to(model)
    return model


def transformer_decoding() -> Iterator[Goal]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = marian.translator(WORDS, WIDTH, layers=2, num_heads=4)
    peer = marian.peer(model)
    for pairs, count in (
        (encoded()["test"][:SENTENCES], f"{SENTENCES} sentences"),
        (encoded()["test"][:1], "1 sentence"),
    ):
        source = longest_first(pairs).source
        for beam, name in ((1, "greedy"), (5, "beam 5")):
            ours = partial(search, model, source, beam, 0, TOKENS)
            theirs = partial(marian.generate, peer, source, beam, TOKENS)
            same([[*best.tokens] for best in ours()] == theirs().tolist(), "token ids differ")
            work = f"{name}, {count}, {TOKENS} tokens each, Transformer"
            yield Goal(work, compare(ours, theirs), 3, "x generate", at_most=False)
