"""A generation is one map: each layer's joined map is the map of one full pass over the returned tokens."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
from torch.nn import functional as F

import recurrent_models
import regard as rg
from extras import needs_transformers, older_than
from miniatures import BART, GPT2, LLAMA, T5, sharpened, tokens
from regard.hf.capture.generation_steps import METHODS
from regard.hf.names import CACHES
from regard.maps.stored import load_map, save_map
from watching import assert_verified, oracle

SIX = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
STATIC = {"cache_implementation": "static", "disable_compile": True}
BEAMS = {"num_beams": 3, "num_return_sequences": 2}
#: Ways to generate that a decoder and a translator have in common.
MODES = [{}, {"do_sample": True, "num_return_sequences": 2}, BEAMS, STATIC, {"use_cache": False}]
MODES += [BEAMS | {"use_cache": False}]
CHUNKS = {"prefill_chunk_size": 3}
WITH_CHUNKS = [] if older_than("5.0") else [CHUNKS]
PADDED = torch.ones(2, 7, dtype=torch.int64)
PADDED[1, :2] = 0


def build(name, **changes):
    torch.manual_seed(1)
    config_class, config = {
        "GPT2LMHeadModel": ("GPT2Config", GPT2 | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}),
        "LlamaForCausalLM": ("LlamaConfig", LLAMA),
        "MistralForCausalLM": ("MistralConfig", LLAMA | {"sliding_window": 4}),
        "T5ForConditionalGeneration": ("T5Config", T5 | {"pad_token_id": 0, "eos_token_id": 1}),
        "BartForConditionalGeneration": ("BartConfig", BART | {"forced_eos_token_id": None}),
    }[name]
    config = getattr(transformers, config_class)(**config | changes)
    return sharpened(getattr(transformers, name)._from_config(config, attn_implementation="sdpa").eval())


def generated(model, ids, **options):
    with rg.watch(model) as seen, torch.no_grad():
        out = model.generate(ids, **SIX | options)
    return seen.generation, out


def assert_one_pass(model, generation):
    """Every sequence is the full pass over its tokens, and the batch has the same rows."""
    batch = [weights.dense() for weights in generation.maps.values()]
    for n in range(generation.num_sequences):
        one = generation.sequence(n)
        expected = oracle(model, {"input_ids": one.tokens[:, :-1]})["all"]
        assert len(one) == len(expected) > 0
        for layer, weights in enumerate(expected):
            torch.testing.assert_close(one[layer].dense(), weights, atol=1e-5, rtol=0)
            size, start = weights.shape[2], generation.lengths[n] - 1 - weights.shape[2]
            own = batch[layer][n : n + 1, :, start : start + size, start : start + size]
            torch.testing.assert_close(own, weights, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM"])
def test_a_decoder_as_in_one_pass(name):
    model = build(name)
    modes = [*MODES, *WITH_CHUNKS] if name == "LlamaForCausalLM" else [{}, BEAMS, *WITH_CHUNKS]
    for number, options in enumerate(modes):
        mask = PADDED if number % 2 == 0 or options == BEAMS else None
        generation, out = generated(model, tokens(7), attention_mask=mask, **options)
        assert torch.equal(generation.tokens, out) and generation.lengths == [13] * len(out)
        assert_one_pass(model, generation)
        assert_verified(generation)
    generation, _ = generated(model, tokens(7, batch=1), **STATIC)
    assert_one_pass(model, generation)


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "BartForConditionalGeneration"])
def test_a_translator_as_in_one_pass(name):
    model, source = build(name), tokens(7)
    for options in MODES if name.startswith("T5") else [{}, BEAMS]:
        mask = None if options == STATIC else PADDED.flip(1)
        generation, out = generated(model, source, attention_mask=mask, **{"num_beams": 1} | options)
        for n in range(len(out)):
            one, text = generation.sequence(n), n * 2 // len(out)
            real = slice(None) if mask is None else mask[text].bool()
            given = {"input_ids": source[text : text + 1, real], "decoder_input_ids": one.tokens[:, :-1]}
            for part, expected in oracle(model, given).items():
                mine = getattr(one, part)
                assert len(mine) == len(expected) == 2
                for layer, weights in enumerate(expected):
                    torch.testing.assert_close(mine[layer].dense(), weights, atol=1e-5, rtol=0)
        assert generation.cross[0].shape == (len(out), 4, 6, 7) and generation.encoder[0].shape[0] == len(out)


@pytest.mark.parametrize("name", ["Qwen3Next", "Mamba", "Lfm2", "MiniMax"])
def test_recurrent_layers_as_in_one_pass(name):
    model = recurrent_models.build(name)
    no_beams = name == "MiniMax" or (name == "Lfm2" and older_than("5.1"))  # whose own cache failed with beams
    for options in ({}, {"use_cache": False}) if no_beams else ({}, BEAMS, {"use_cache": False}):
        generation, _ = generated(model, tokens(5), **options)
        for n in range(generation.num_sequences):
            one = generation.sequence(n)
            with rg.watch(model) as whole, torch.no_grad():
                model(one.tokens[:, :-1], use_cache=False)
            assert one.kinds == whole.kinds
            for path, weights in whole.maps.items():
                torch.testing.assert_close(one[path].dense(), weights.dense(), atol=1e-5, rtol=0)
                assert one[path].is_signed == weights.is_signed


def test_states_that_are_not_reordered_with_the_beams_are_shown_as_they_were():
    model = recurrent_models.build("MiniMax")  # its cache reorders keys, but not the states of its linear layers
    for _ in range(6):
        with rg.watch(model) as seen, torch.no_grad():
            out = model.generate(tokens(5, batch=1), **SIX, **BEAMS, return_dict_in_generate=True)
        if any(len(set(row.tolist())) > 1 for row in out.beam_indices[:, 1:]):
            break
    else:
        pytest.fail("no beam came from another row in six texts")
    for path in seen.names:
        joined = seen.generation[path].dense()
        for n, rows in enumerate(out.beam_indices.tolist()):
            for step in range(1, 6):
                own = seen.calls(path)[step].dense()[rows[step], :, 0]
                torch.testing.assert_close(joined[n, :, 4 + step, : 5 + step], own, atol=1e-6, rtol=0)


def test_beams_come_from_other_rows_and_end_early():
    model = build("LlamaForCausalLM")
    told = {"max_new_tokens": 8, "num_beams": 4, "num_return_sequences": 4, "do_sample": False}
    crossed = ended = False
    for _ in range(8):
        ids = tokens(4, batch=1)
        with rg.watch(model) as seen:
            out = model.generate(ids, **told, return_dict_in_generate=True)
        crossed |= any(len(set(row[row >= 0].tolist())) > 1 for row in out.beam_indices)
        ended |= len(set(seen.generation.lengths)) > 1
        assert_one_pass(model, seen.generation)
        if crossed and ended:
            break
    assert crossed and ended
    with rg.watch(model) as plain:
        assert torch.equal(model.generate(ids, **told), out.sequences)
    assert torch.equal(plain.generation.tokens, out.sequences)


def test_a_batch_whose_texts_end_at_different_steps():
    model = build("GPT2LMHeadModel")
    for _ in range(20):
        generation, _ = generated(model, tokens(4, batch=6), max_new_tokens=8, min_new_tokens=1, do_sample=True)
        if len(set(generation.lengths)) > 1:
            break
    assert len(set(generation.lengths)) > 1
    short = min(range(6), key=generation.lengths.__getitem__)
    assert generation.sequence(short)[0].shape[2] == generation.lengths[short] - 1
    assert not generation[0][short, :, generation.lengths[short] - 1 :].any()
    assert_one_pass(model, generation)


@needs_transformers("5.1", "drafts and a least length go together")
def test_refused_drafts_leave_no_row():
    model, assistant = build("LlamaForCausalLM"), build("LlamaForCausalLM", num_hidden_layers=1)
    ids = tokens(3, batch=1).repeat(1, 3)
    for drafts in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
        with rg.watch(model) as seen:
            out = model.generate(ids, **SIX, **drafts)
        fed = sum(weights.shape[2] for weights in seen.calls(0))
        assert fed > seen.generation[0].shape[2] == out.shape[1] - 1  # some drafts were read and refused
        assert_one_pass(model, seen.generation)
    sliding = build("MistralForCausalLM")
    generation, _ = generated(sliding, ids, prompt_lookup_num_tokens=3)
    assert_one_pass(sliding, generation)


def test_a_quantized_cache_shows_the_keys_of_each_step():
    model, ids = build("LlamaForCausalLM"), tokens(5)
    told = SIX | {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    generation, _ = generated(model, ids, **told)
    model.set_attn_implementation("eager")
    steps = model.generate(ids, **told, return_dict_in_generate=True, output_attentions=True).attentions
    for layer in (0, 1):
        rows = torch.cat([F.pad(step[layer], (0, 10 - step[layer].shape[3])) for step in steps], 2)
        torch.testing.assert_close(generation[layer].dense(), rows, atol=1e-5, rtol=0)


def past(model, cache):
    """The argument of a model that has the cache: transformers 5.24 has another name."""
    return {next(name for name in CACHES if name in inspect.signature(model.forward).parameters): cache}


def test_a_generation_that_continues_a_cache_or_embeddings():
    model, ids = build("LlamaForCausalLM"), tokens(6)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :4], **past(model, cache))
    generation, out = generated(model, ids, **past(model, cache))
    whole = oracle(model, {"input_ids": out[:, :-1]})["all"]
    for layer in (0, 1):  # the tokens of the earlier cache have keys and no rows
        torch.testing.assert_close(generation[layer].dense(), whole[layer][:, :, 4:], atol=1e-5, rtol=0)
    with rg.watch(model) as seen, torch.no_grad():
        out = model.generate(inputs_embeds=model.get_input_embeddings()(ids), **SIX)
    whole = oracle(model, {"input_ids": torch.cat([ids, out[:, :-1]], 1)})["all"]
    torch.testing.assert_close(seen.generation[1].dense(), whole[1], atol=1e-5, rtol=0)


def test_reductions_profiles_files_and_the_page_take_a_generation(tmp_path):
    for name in ("MistralForCausalLM", "GPT2LMHeadModel"):
        generation, _ = generated(build(name), tokens(7), attention_mask=PADDED, num_beams=2)
        weights, one = generation[0], generation.sequence(1)
        dense = weights.dense()
        entropy, received, top = weights.summarize(rg.maps.Entropy(), rg.maps.KeyTotals(), rg.maps.TopLinks(2))
        torch.testing.assert_close(entropy, -torch.xlogy(dense, dense).sum(-1), atol=1e-5, rtol=0)
        torch.testing.assert_close(received, dense.sum(2), atol=1e-5, rtol=0)
        torch.testing.assert_close(top.weights, dense.topk(2).values, atol=1e-6, rtol=0)
        torch.testing.assert_close(weights.select([1], [3, 0]).entropy(), entropy[1:, [3, 0]])
        words = [str(n) for n in range(one[0].shape[2])]
        allowed = rg.profile(one.maps, words).layers[0].allowed[0]
        assert allowed.tolist() == [min(n + 1, 4) if "Mistral" in name else n + 1 for n in range(10)]
        assert float(rg.rollout(one.maps, [9]).sum()) == pytest.approx(1.0, abs=1e-5)
        save_map(tmp_path / "map", one[1])
        torch.testing.assert_close(load_map(tmp_path / "map").dense(), one[1].dense(), atol=1e-6, rtol=0)
        one.show(words)


def test_values_of_a_generation_are_those_of_one_pass():
    for model, inputs in ((build("MistralForCausalLM"), {}), (recurrent_models.build("Qwen3Next"), {})):
        for options in (BEAMS, CHUNKS, {"use_cache": False}):
            with rg.watch(model, keep="qkv") as seen:
                model.generate(tokens(5), **SIX, **options, **inputs)
            for n in (0, 1):
                one = seen.generation.sequence(n)
                with rg.watch(model, keep="qkv") as whole, torch.no_grad():
                    model(one.tokens[:, :-1], use_cache=False)
                for path in whole.names:
                    torch.testing.assert_close(one[path].value, whole[path].value, atol=1e-5, rtol=0)
    model = build("T5ForConditionalGeneration")
    with rg.watch(model, keep="qkv") as seen:
        model.generate(tokens(7), attention_mask=PADDED.flip(1), **SIX, num_beams=1)
    one = seen.generation.sequence(1)
    assert one.cross[0].value.shape == (1, 4, 5, 8) and one.encoder[0].value.shape == (1, 4, 5, 8)


def test_statistics_of_a_generation_are_those_of_its_map():
    reductions = [rg.maps.Entropy(), rg.maps.KeyTotals(), rg.maps.TopLinks(2), rg.maps.Distance()]
    for name in ("MistralForCausalLM", "T5ForConditionalGeneration"):
        model, ids = build(name), tokens(7)
        for options in (
            {"num_beams": 3, "num_return_sequences": 2},
            {"num_beams": 1, "attention_mask": PADDED.flip(1)},
        ):
            with rg.watch(model) as seen:
                model.generate(ids, **SIX, **options)
            with rg.watch(model, keep="statistics", reductions=reductions) as kept:
                model.generate(ids, **SIX, **options)
            for path, weights in seen.generation.maps.items():
                if path.startswith("encoder"):
                    continue
                for reduction, expected in zip(reductions, weights.summarize(*reductions), strict=True):
                    if isinstance(reduction, rg.maps.Distance) and "EncDec" in path:
                        continue  # a query has no place among the tokens of the encoder
                    found = kept.generation.statistics[path].of(reduction)
                    assert isinstance(reduction, rg.maps.TopLinks) or found.shape == expected.shape
                    found, expected = (
                        x.weights if isinstance(reduction, rg.maps.TopLinks) else x for x in (found, expected)
                    )
                    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    with pytest.raises(rg.RegardError, match="only statistics were kept"):
        kept.generation.decoder[0].dense()


def test_keys_of_the_source_are_held_once_for_all_steps_of_all_beams():
    model = build("BartForConditionalGeneration")
    with rg.watch(model) as seen:
        model.generate(tokens(7), **SIX, num_beams=3)
    calls = seen.cross.calls(0)
    assert len(calls) == 6 and len({weights._prepared.key.untyped_storage().data_ptr() for weights in calls}) == 1


def test_most_generations_are_one_map_of_queries_and_keys():
    model = build("LlamaForCausalLM")
    for options in ({}, BEAMS, CHUNKS, STATIC, {"use_cache": False}):
        generation, _ = generated(model, tokens(7), attention_mask=PADDED, **options)
        one = generation.sequence(-1)
        assert type(one[0]) is rg.maps.scored_map.ScoredMap and repr(one[0].attention.mask) == "causal()"
        assert one[0]._prepared.key.shape[1:3] == (2, 10)
    quantized = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    generation, _ = generated(model, tokens(7), **quantized)
    assert type(generation[0]) is rg.maps.joined.JoinedMap


# While the model runs


@pytest.mark.parametrize("options", [BEAMS, STATIC])
@torch.no_grad()
def test_edited_weights_are_those_of_one_edited_pass(options):
    model, where = build("LlamaForCausalLM"), rg.Where(layers=1, heads=[0, 2], queries=slice(4, None), keys=[1, 8])
    knocked, rows = rg.KnockOut(where, renormalize=False), rg.Where(layers=0, heads=1, queries=[3, 9])
    edits = knocked & rg.edits.ScaleWeights(rg.Where(heads=3), 0.5) & rg.edits.ReplaceWeights(rows, "uniform")
    with rg.edit(model, edits), rg.watch(model) as seen:
        out = model.generate(tokens(7), **SIX | options)
    sequence = seen.generation.sequence(0)
    with rg.edit(model, edits), rg.watch(model) as whole:
        model(out[:1, :-1])
    for layer in range(2):
        torch.testing.assert_close(sequence[layer].dense(), whole[layer].dense(), atol=1e-5, rtol=0)
    assert not sequence[1][0, [0, 2], 4:, 1].any()


def test_each_step_has_its_rows_while_the_model_runs():
    model, ids, rows, places, read = build("BartForConditionalGeneration"), tokens(7), [], [], []

    def look(step):
        assert step.number == len(rows) and step.tokens.shape == (2, len(step.positions))
        rows.append([(weights.dense(), step.cross[n].dense()) for n, weights in enumerate(step.decoder.maps.values())])
        places.append(step.positions)
        read.append(step.tokens)

    with rg.watch(model, on_step=look) as seen:
        out = model.generate(ids, **SIX, num_beams=1)
    assert places == [range(n, n + 1) for n in range(6)] and torch.equal(torch.cat(read, 1), out[:, :-1])
    for layer in (0, 1):
        own = torch.cat([F.pad(step[layer][0], (0, 5 - n)) for n, step in enumerate(rows)], 2)
        assert torch.equal(own, seen.generation.decoder[layer].dense())
        assert torch.equal(torch.cat([step[layer][1] for step in rows], 2), seen.generation.cross[layer].dense())


def test_steps_outside_of_a_generation_and_of_statistics():
    model, ids, seen_steps = build("LlamaForCausalLM"), tokens(5), []
    cache = transformers.DynamicCache(config=model.config)
    with rg.watch(model, on_step=lambda step: seen_steps.append((step.number, step.positions))), torch.no_grad():
        for part in ids.split((3, 2), 1):
            model(part, **past(model, cache))
        model(ids, use_cache=False)
        model(ids[:, :2], use_cache=False)
    assert seen_steps == [(0, range(3)), (1, range(3, 5)), (2, range(5)), (3, range(2))]
    entropies = []
    look = lambda step: entropies.append(step.statistics[step.names[0]].of(rg.maps.Entropy))  # noqa: E731
    with rg.watch(model, on_step=look, keep="statistics"):
        out = model.generate(ids, **SIX)
    with rg.watch(model) as whole, torch.no_grad():
        model(out[:, :-1], use_cache=False)
    torch.testing.assert_close(torch.cat(entropies, 2), whole[0].entropy(), atol=1e-5, rtol=0)


def test_old_steps_are_dropped():
    model, held = build("MistralForCausalLM"), []
    with rg.watch(model, keep_steps=2, on_step=lambda step: held.append(len(seen.calls(0)))) as seen:
        model.generate(tokens(5), **SIX)
        model.generate(tokens(5), **SIX)
    assert max(held) <= 3 and [weights.shape[2] for weights in seen.calls(0)] == [1, 1]
    assert_verified(seen)
    with pytest.raises(rg.RegardError, match="first steps were dropped"):
        _ = seen.generation
    with rg.watch(model, keep_steps=9) as seen:
        model.generate(tokens(5), **SIX)
    assert_one_pass(model, seen.generation)


def test_an_error_in_the_callback_ends_the_block_cleanly():
    model, ids = build("LlamaForCausalLM"), tokens(5)
    expected = model.generate(ids, **SIX)
    originals = {name: getattr(transformers.GenerationMixin, name) for name in METHODS}

    def fail(step):
        if step.number == 2:
            raise KeyError("stop here")

    with pytest.raises(KeyError, match="stop here"), rg.watch(model, on_step=fail):
        model.generate(ids, **SIX)
    assert originals == {name: getattr(transformers.GenerationMixin, name) for name in METHODS}
    assert torch.equal(model.generate(ids, **SIX), expected)
    with rg.watch(model) as seen:
        model.generate(ids, **SIX)
    assert_one_pass(model, seen.generation)
    with pytest.raises(rg.RegardError, match="on_step must be a function"):
        rg.watch(model, on_step=3)
    with pytest.raises(rg.RegardError, match="keep_steps must be an integer of at least 1"):
        rg.watch(model, keep_steps=0)


def test_what_cannot_be_shown_says_why():
    model, ids = build("LlamaForCausalLM"), tokens(4)
    originals = {name: getattr(transformers.GenerationMixin, name) for name in METHODS}
    with rg.watch(model, layers=[1]) as seen, torch.no_grad():
        model(ids)
    with pytest.raises(rg.RegardError, match=r"no generate\(\) was watched.*inside the with-block"):
        _ = seen.generation
    with rg.watch(model, layers=[1]) as seen:
        first = model.generate(ids, **SIX)
        model.generate(tokens(3), **SIX)
    with pytest.raises(rg.RegardError, match=r"2 calls of generate\(\).*seen.generations"):
        _ = seen.generation
    assert torch.equal(seen.generations[0].tokens, first) and seen.generations[1][1].shape[2] == 8
    with pytest.raises(rg.RegardError, match="this module was not watched"):
        seen.generations[0]["model.layers.0.self_attn"]
    with pytest.raises(rg.RegardError, match="2 sequences were returned"):
        seen.generations[0].sequence(2)
    with rg.watch(model) as seen, pytest.raises(ValueError, match="max_new_tokens"):
        model.generate(ids, max_new_tokens=-1)
    with rg.watch(model) as seen, pytest.raises(ZeroDivisionError):
        model.generate(ids, stopping_criteria=[lambda *_: 1 / 0], **SIX)
    with pytest.raises(rg.RegardError, match="ended with an error"):
        _ = seen.generation
    assert originals == {name: getattr(transformers.GenerationMixin, name) for name in METHODS}
