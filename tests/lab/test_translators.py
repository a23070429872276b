"""The law of every translator: steps are teacher forcing, in any batch, under any reordering, and all of it is seen."""

from __future__ import annotations

import json

import pytest
import torch

import regard as rg
from regard.lab import SYSTEMS, build
from regard.lab.data import WordTokenizer

V, W, C = 20, 24, 16
RECURRENT = [
    ("none", {}),
    ("none", {"cell": "gru", "layers": 2, "bidirectional": False}),
    ("bahdanau", {}),
    ("bahdanau", {"cell": "gru", "layers": 2}),
    ("bahdanau", {"attention": "sparse"}),
    ("bahdanau", {"attention": {"name": "sliding_window", "size": 3}}),
    ("bahdanau", {"bridge_heads": 2, "attention": "multi_head"}),
    ("luong_dot", {}),
    ("luong_dot", {"input_feeding": False, "layers": 2}),
    ("luong_general", {}),
    ("luong_general", {"input_feeding": False, "cell": "gru"}),
    ("luong_concat", {"layers": 2}),
    ("luong_general", {"attention": "alibi"}),
    ("luong_general", {"attention": "performer"}),
    ("hybrid", {"num_heads": 2}),
    ("hybrid", {"num_heads": 2, "layers": 2, "cell": "gru"}),
]
TRANSFORMERS = [
    {},
    {"norm": "post", "activation": "gelu", "tied": True},
    {"activation": "swiglu", "num_key_value_heads": 1, "layers": 1},
    *({"positions": p} for p in ("learned", "rope", "alibi", "t5", "none")),
    *({"attention": name} for name in ("sliding_window", "bigbird", "linear", "performer")),
    {"attention": {"encoder": "longformer", "decoder": "linear", "cross": "sparse"}, "scaled": False},
]
CASES = [*RECURRENT, *(("transformer", {"num_heads": 2, "feed_forward": 24} | options) for options in TRANSFORMERS)]
every = pytest.mark.parametrize(("name", "options"), CASES, ids=str)


def made(name, options):
    torch.manual_seed(1)
    return build(name, source_size=V, target_size=W, width=C, **options).double().eval()


def pairs():
    """Sources of 5, 2 and 1 tokens, and targets."""
    source = torch.tensor([[5, 6, 7, 8, 3], [9, 3, 0, 0, 0], [3, 0, 0, 0, 0]])
    return source, torch.randint(4, W, (3, 6))


def steps(model, source, target):
    memory = model.encode(source)
    state, found = model.start(memory), []
    for tokens in target.unbind(1):
        logits, state = model.step(memory, state, tokens)
        found.append(logits)
    assert state.length == target.shape[1]
    return torch.stack(found, 1)


def close(a, b, atol=1e-10):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


@every
def test_steps_are_teacher_forcing(name, options):
    model, (source, target) = made(name, options), pairs()
    close(steps(model, source, target), model.logits(model(source, target)))


@every
def test_neither_the_batch_nor_padding_changes_a_sentence(name, options):
    model, (source, target) = made(name, options), pairs()
    together = model(torch.cat((source, torch.zeros(3, 4, dtype=torch.long)), 1), target)
    for row, length in enumerate((5, 2, 1)):
        close(model(source[row : row + 1, :length], target[row : row + 1])[0], together[row])


@every
def test_states_are_selected_like_the_rows_of_beams_and_steps_are_pure(name, options):
    model, (source, target) = made(name, options), pairs()
    memory = model.encode(source)
    state = model.start(memory)
    for tokens in target[:, :3].unbind(1):
        _, state = model.step(memory, state, tokens)
    before, _ = model.step(memory, state, target[:, 3])
    index = torch.tensor([2, 0, 0, 1])
    chosen, _ = model.step(memory.select(index), state.select(index), target[index, 3])
    close(chosen, before[index])
    model.step(memory, state, target[:, 4])
    close(model.step(memory, state, target[:, 3])[0], before, atol=0)


@every
def test_every_attention_is_seen_and_steps_show_the_maps_of_teacher_forcing(name, options):
    model, (source, target) = made(name, options), pairs()
    if model.cross_attention is None:
        assert name == "none"
        return
    with rg.watch(model) as taught, torch.no_grad():
        model(source, target)
    with rg.watch(model) as stepped, torch.no_grad():
        steps(model, source, target)
    assert not taught.missing and model.cross_attention in taught.cross.names
    assert (
        set(taught.names) == {n for n, m in model.named_modules() if isinstance(m, rg.nn.Attends)} == set(stepped.names)
    )
    for module, weights in taught.maps.items():
        close(stepped[module].dense(), weights.dense())
    alignment = taught[model.cross_attention]
    assert alignment.shape == (3, alignment.shape[1], 6, 5)
    assert not alignment.dense()[1, :, :, 2:].any() and not alignment.dense()[2, :, :, 1:].any()


def test_statistics_are_kept_instead_of_maps():
    model, (source, target) = made("transformer", {"num_heads": 2}), pairs()
    with rg.watch(model, keep="statistics") as seen, torch.no_grad():
        model(source, target)
    assert seen.statistics[model.cross_attention].of(rg.maps.Entropy).shape == (3, 2, 6)


def test_two_sentences_after_each_other_are_two_maps():
    model, (source, target) = made("bahdanau", {}), pairs()
    with rg.watch(model) as seen, torch.no_grad():
        model(source, target)
        model(source, target[:, :4])
    assert [weights.shape[2] for weights in seen.calls("bridge")] == [6, 4]


@every
def test_gradients_reach_every_parameter_and_are_finite(name, options):
    model, (source, target) = made(name, options), pairs()
    model.train().logits(model(source, target)).logsumexp(-1).mean().backward()
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.isfinite().all(), path


@every
def test_settings_rebuild_the_model(name, options):
    model = made(name, options)
    settings = json.loads(json.dumps(model.settings()))
    again = build(**settings).double().eval()
    assert again.settings() == model.settings()
    again.load_state_dict(model.state_dict())
    source, target = pairs()
    close(again(source, target), model(source, target), atol=0)


PRUNED = [
    (
        "transformer",
        {"num_heads": 4},
        {"encoder.layers.0.self_attention": [1], "decoder.layers.1.cross_attention": [0, 3]},
    ),
    ("transformer", {"num_heads": 4, "num_key_value_heads": 2}, {"decoder.layers.0.self_attention": [0, 1]}),
]


@pytest.mark.parametrize(("name", "options", "heads"), PRUNED)
def test_a_pruned_model_is_saved_and_read_as_it_is(name, options, heads, tmp_path):
    from regard.lab.runs.run import (
        SOURCE,
        TARGET,
        WEIGHTS,
        load_run,
        read_settings,
        save_weights,
        write_settings,
    )

    model = build(name, source_size=V, target_size=W, width=C, layers=2, **options).eval()
    rg.prune(model, {f"transformer.{path}": numbers for path, numbers in heads.items()})
    write_settings(tmp_path, model, {})
    save_weights(model, {}, tmp_path / WEIGHTS, {})
    for file, size in ((SOURCE, V), (TARGET, W)):
        WordTokenizer([f"w{number}" for number in range(size - 4)]).save(tmp_path / file)
    again, (source, target) = load_run(tmp_path).model, pairs()
    assert again.settings() == model.settings() == {**read_settings(tmp_path)["model"]}
    close(again(source, target), model(source, target), atol=0)
    rg.prune(
        again, {"transformer.encoder.layers.1.self_attention": [0] if "num_key_value_heads" not in options else [2, 3]}
    )
    twice = build(**json.loads(json.dumps(again.settings())))
    twice.load_state_dict(again.state_dict())
    close(twice.eval()(source, target), again(source, target), atol=0)
    with pytest.raises(rg.RegardError, match=r"'transformer.encoder.layers.9.* has no attention heads"):
        build(name, source_size=V, target_size=W, width=C, heads_left={"transformer.encoder.layers.9": 1})


def test_every_system_takes_the_common_options():
    for name, system in SYSTEMS.items():
        model = build(name, source_size=V, target_size=W, width=C, layers=1, num_heads=2, dropout=0.1)
        assert (model.source_size, model.target_size, system.name) == (V, W, name)
        assert system.title and system.meaning.endswith(".")


@pytest.mark.parametrize("name", SYSTEMS)
def test_mixed_precision_runs_and_is_near(name):
    model, (source, target) = build(name, source_size=V, target_size=W, width=C, layers=2, num_heads=2), pairs()
    exact = model(source, target).detach()
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(source, target)
        memory = model.encode(source)
        model.step(memory, model.start(memory), target[:, 0])
    rough.float().square().mean().backward()
    torch.testing.assert_close(rough.float(), exact, atol=0.05 * float(exact.abs().max()), rtol=0)


# Formulas, written out


def softmaxed(scores, states, length):
    weights = torch.softmax(scores[:length], 0)
    return sum(w * h for w, h in zip(weights, states, strict=False))


def first_state(model, memory):
    return [part[0] for part in model.cells.first(memory.final)[0]]


def lstm(cell, x, fed, h, c):
    gates = cell.input.weight @ x + cell.input.bias + cell.recurrent @ h + (0 if fed is None else cell.fed @ fed)
    i, f, g, o = gates.view(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def test_bahdanau_is_the_paper():
    model, (source, target) = made("bahdanau", {}), pairs()
    memory, score = model.encode(source), model.bridge.attention.score
    hidden, length = model(source, target), 2
    states, (h, c) = memory.states[1], first_state(model, memory.select(torch.tensor([1])))
    for t, token in enumerate(target[1]):
        e = model.target_embedding.table.weight[token]
        energies = torch.stack(
            [score.direction @ torch.tanh(score.query.weight @ h + score.key.weight @ s) for s in states]
        )
        context = softmaxed(energies, states, length)
        h, c = lstm(model.cells.layers[0], e, context, h, c)
        close(hidden[1, t], torch.tanh(model.readout.weight @ torch.cat((h, context, e)) + model.readout.bias))


@pytest.mark.parametrize("feeding", [True, False])
@pytest.mark.parametrize("kind", ["dot", "general", "concat"])
def test_luong_is_the_paper(kind, feeding):
    model, (source, target) = made(f"luong_{kind}", {"input_feeding": feeding}), pairs()
    memory, score = model.encode(source), model.bridge.attention.score
    scored = {
        "dot": lambda h, s: h @ s,
        "general": lambda h, s: h @ score.weight[0] @ s,
        "concat": lambda h, s: score.direction @ torch.tanh(score.projection.weight @ torch.cat((h, s))),
    }[kind]
    hidden, states = model(source, target), memory.states[0]
    (h, c), vector = first_state(model, memory), torch.zeros(C).double()
    for t, token in enumerate(target[0]):
        e = model.target_embedding.table.weight[token]
        h, c = lstm(model.cells.layers[0], e, vector if feeding else None, h, c)
        context = softmaxed(torch.stack([scored(h, s) for s in states]), states, 5)
        vector = torch.tanh(model.attentional.weight @ torch.cat((context, h)) + model.attentional.bias)
        close(hidden[0, t], vector)


def test_without_attention_only_the_last_state_is_known():
    model, (source, target) = made("none", {}), pairs()
    memory = model.encode(source)
    blind = type(memory)(torch.full_like(memory.states, torch.nan), memory.real, (), memory.final)
    close(model.decode(blind, target), model(source, target), atol=0)
    e = model.target_embedding.table.weight[target[0, 0]]
    h, _ = lstm(model.cells.layers[0], torch.cat((e, memory.final[0])), None, *first_state(model, memory))
    expected = torch.tanh(model.readout.weight @ torch.cat((h, memory.final[0], e)) + model.readout.bias)
    close(model(source, target)[0, 0], expected)


# Mistakes


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bahdanu", {}, "Did you mean 'bahdanau'"),
        ("bahdanau", {"input_feding": True}, "no option 'input_feding'"),
        ("luong_dot", {"input_feding": True}, "Did you mean 'input_feeding'"),
        ("bahdanau", {"cell": "lsmt"}, "Did you mean 'lstm'"),
        ("bahdanau", {"attention": "bahdana"}, "Did you mean 'bahdanau'"),
        ("transformer", {"num_heads": 3}, "must divide"),
        ("transformer", {"layers": 0}, "at least 1"),
        ("none", {"width": 15}, "even"),
    ],
)
def test_names_and_numbers_are_checked(name, options, message):
    with pytest.raises(rg.RegardError, match=message):
        build(name, **{"source_size": V, "target_size": W, "width": C} | options)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (torch.tensor([[5, 20]]), torch.tensor([[2]]), "source: token id 20.*0 to 19"),
        (torch.tensor([[5, 3]]), torch.tensor([[-1]]), "target: token id -1"),
        (torch.tensor([5, 3]), torch.tensor([[2]]), r"ids\[None\]"),
        (torch.ones(1, 2), torch.tensor([[2]]), "integers"),
        (torch.tensor([[5, 3]]), torch.tensor([[2], [2]]), "1 sources and 2 targets"),
    ],
)
def test_batches_are_checked(source, target, message):
    with pytest.raises(rg.RegardError, match=message):
        made("luong_dot", {})(source, target)


def test_the_memory_of_another_model_is_refused():
    """A decoder says what it needs and the memory lacks."""
    models = {name: made(name, {}) for name in SYSTEMS}
    source, target = torch.tensor([[5, 4, 3]]), torch.tensor([[2, 6]])
    for name, model in models.items():
        for of, encoder in models.items():
            memory = encoder.encode(source)
            starts = name == "transformer" or of != "transformer"
            if not starts:
                with pytest.raises(rg.RegardError, match=r"last state of its encoder, .* model\.encode\(source\)"):
                    model.start(memory)
            elif of == "none" != name:
                with pytest.raises(
                    rg.RegardError, match=r"keys for attention of its encoder|layer has cross-attention"
                ):
                    model.step(memory, model.start(memory), target[:, 0])
            if not starts or of == "none" != name:
                with pytest.raises(rg.RegardError, match=r"of its encoder|layer has cross-attention"):
                    model.decode(memory, target)
