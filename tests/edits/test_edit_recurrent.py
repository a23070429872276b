"""Edits of recurrent layers: a link is removed for one read, as the function of the model shows with other values."""

from __future__ import annotations

import inspect

import pytest
import torch

import regard as rg
from extras import needs_transformers
from recurrent_models import KINDS, build, tokens
from regard.edits import AddToScores, ReplaceWeights, ScaleWeights
from regard.hf.recurrent.core_functions import core_functions
from regard.hf.recurrent.inline_layers import named_arguments

N = 9
MODELS = ("Qwen3_5Text", "KimiLinear", "Mamba2", "Mamba", "FalconH1", "Rwkv")
#: torch loads rules of forward mode.
forward_mode = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
of_transformers = needs_transformers("5.23", "its recurrent layers are read")


def first_recurrent(model, name):
    with rg.watch(model) as seen, torch.no_grad():
        plain = model(tokens(N, 1), use_cache=False).logits
    assert bool(plain.isfinite().all())
    return next(path for path, kind in seen.kinds.items() if kind == KINDS[name])


class Cores:
    """The functions of recurrent layers that ran, with their arguments and results."""

    def __init__(self):
        self.calls = []

    def core_called(self, name, given, result, edits):
        self.calls.append((name, given, result[0] if isinstance(result, tuple) else result, edits))


def links(path, **given):
    """Two edits that share a query, of which one selects a head and a batch entry."""
    removed = rg.KnockOut(rg.Where(layers=path, queries=[5, 7], keys=[2, 5], **given), renormalize=False)
    return removed & ScaleWeights(rg.Where(layers=path, heads=[1], batch=[0], queries=7, keys=slice(1, 3)), -2.0)


def factors(shape):
    """The factor of each weight (B, H, I, J) under `links`."""
    table = torch.ones(shape)
    for query in (5, 7):
        table[:, :, query, [2, 5]] = 0
    table[0, 1, 7, 1:3] *= -2
    return table


@of_transformers
@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_an_edited_row_is_that_of_the_function_of_the_model_with_other_values(name):
    model, ids = build(name), tokens(N)
    path, cores = first_recurrent(model, name), Cores()
    with core_functions.observed_by(cores, [model.get_submodule(path)]):
        with rg.watch(model) as plain:
            before = model(ids, use_cache=False).logits
        with rg.watch(model, verify="all") as outside, rg.edit(model, links(path)) as run, rg.watch(model) as inside:
            after = model(ids, use_cache=False).logits
    own = [call for call in cores.calls if call[3] is not None]
    (function, given, result, _), table = own[0], factors(plain[path].shape)
    assert len(own) == 1 and run.calls[path] == 1 and not outside.missing
    assert torch.equal(before[:, :5], after[:, :5]) and not torch.allclose(before[:, 5:], after[:, 5:])
    for seen in (outside, inside):
        assert torch.equal(seen[path].dense(), plain[path].dense() * table) and seen.verify()[path].ok
    of_values = next(key for key in ("value", "hidden_states") if key in given)
    by_channel, value = name in ("Mamba", "Rwkv"), given[of_values]
    axis = 2 if name == "Mamba" else 1  # of the tokens
    same = next(call for call in cores.calls if call[0] == function and call[3] is None)[2]
    model_function = inspect.unwrap(type(model.get_submodule(path)).forward).__globals__[function]
    arguments = {key: given[key] for key in given if key != "before"}
    for query in range(N):
        row = table[:, :, query]  # (B, H, J)
        if axis == 1:
            row = row.transpose(1, 2)
        row = row if by_channel else row[..., None]
        scaled = model_function(**{**arguments, of_values: value * row.to(value)})
        scaled = scaled[0] if isinstance(scaled, tuple) else scaled
        torch.testing.assert_close(result.select(axis, query), scaled.select(axis, query), atol=2e-6, rtol=1e-4)
        if query not in (5, 7):
            assert torch.equal(result.select(axis, query), same.select(axis, query))


@of_transformers
@torch.no_grad()
@pytest.mark.parametrize("name", ["Qwen3_5Text", "Mamba2", "Mamba"])
def test_no_change_all_links_and_half_precision(name):
    model, ids = build(name), tokens(N)
    path, cores = first_recurrent(model, name), Cores()
    plain = model(ids, use_cache=False).logits
    with rg.edit(model, ScaleWeights(rg.Where(layers=path), 1.0)):
        torch.testing.assert_close(model(ids, use_cache=False).logits, plain, atol=1e-5, rtol=1e-4)
    observed = core_functions.observed_by(cores, [model.get_submodule(path)])
    with observed, rg.edit(model, rg.KnockOut(rg.Where(layers=path, queries=3))):
        model(ids, use_cache=False)
    result = next(call[2] for call in cores.calls if call[3] is not None)
    axis = result.ndim - 1 if name == "Mamba" else 1
    assert not bool(result.select(axis, 3).any()) and bool(result.select(axis, 4).any())
    half = build(name, torch.bfloat16)
    with rg.edit(half, links(path)), rg.watch(half, verify="all") as seen:
        half(ids, use_cache=False)
    assert seen.verify()[path].ok and not seen.missing


@of_transformers
@torch.no_grad()
@pytest.mark.parametrize("name", ["Qwen3_5Text", "Mamba2", "Lfm2", "MiniMax", "RecurrentGemma"])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_steps_of_a_generation_read_what_one_pass_reads(name, num_beams):
    model = build(name)
    edit = rg.KnockOut(rg.Where(queries=slice(4, None), keys=[1, 6]), renormalize=False)
    with rg.edit(model, edit) as run, rg.watch(model) as seen:
        out = model.generate(
            tokens(6), max_new_tokens=5, num_beams=num_beams, do_sample=False, eos_token_id=None, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    path = next(path for path, kind in seen.kinds.items() if kind == KINDS[name])
    assert run.calls[path] == 5 and all(check.ok for check in seen.verify().values()) and not seen.missing
    with rg.edit(model, edit), rg.watch(model) as whole:
        logits = model(out.sequences[:, :-1], use_cache=False).logits
    if num_beams == 1:
        torch.testing.assert_close(torch.stack(out.logits, 1), logits[:, 5:], atol=2e-5, rtol=1e-3)
        generated, once = seen.calls(path)[-1].dense(), whole[path].dense()
        torch.testing.assert_close(generated[:, :, -1], once[:, :, -1], atol=1e-5, rtol=1e-3)
        assert not bool(generated[..., [1, 6]].any())


@of_transformers
@pytest.mark.parametrize("name", ["Qwen3_5Text", "Mamba2", "Rwkv"])
def test_an_edited_run_has_the_gradients_of_the_layer(name):
    model, ids = build(name), tokens(N, 1)
    path = first_recurrent(model, name)

    def slopes(edit):
        model.zero_grad()
        with rg.edit(model, edit):
            model(ids, use_cache=False).logits[0, -1, 5].backward()
        return {key: x.grad.clone() for key, x in model.named_parameters() if x.grad is not None}

    plain, same = slopes(rg.edits.EditSequence()), slopes(ScaleWeights(rg.Where(layers=path), 1.0))
    assert plain.keys() == same.keys()
    for key, x in plain.items():
        torch.testing.assert_close(same[key], x, atol=2e-4 * float(x.abs().max()) + 1e-6, rtol=1e-3)
    with rg.edit(model, rg.KnockOut(rg.Where(keys=0), renormalize=False)):
        first = model(ids[:, :4], use_cache=True)
        cache = first["state" if name == "Rwkv" else "past_key_values" if "Qwen" in name else "cache_params"]
        given = {"state" if name == "Rwkv" else "past_key_values" if "Qwen" in name else "cache_params": cache}
        with pytest.raises(rg.RegardError, match=r"continues a state.*Use torch.no_grad"):
            model(ids[:, 4:5], use_cache=True, **given)


@of_transformers
@forward_mode
@pytest.mark.parametrize("name", ["Qwen3_5Text", "Mamba2", "Mamba", "Rwkv"])
def test_an_edited_run_inside_torch_func_has_the_derivatives_of_autograd(name):
    model = build(name)
    path = first_recurrent(model, name)
    x = model.get_input_embeddings()(tokens(N, 1)).detach()
    along = torch.randn_like(x)

    def number(x):
        return model(inputs_embeds=x, use_cache=False).logits.sin().sum()

    with rg.edit(model, links(path)):
        (wanted,) = torch.autograd.grad(number(leaf := x.clone().requires_grad_()), leaf)
        by_func = torch.func.grad(number)(x)
    (unedited,) = torch.autograd.grad(number(leaf), leaf)
    close = {"atol": 1e-4 * float(wanted.abs().max()), "rtol": 1e-3}
    torch.testing.assert_close(by_func, wanted, **close)
    assert not torch.allclose(unedited, wanted, **close)
    if name != "Qwen3_5Text":  # torch has no forward derivative of its other layers
        with rg.edit(model, links(path)):
            slope = torch.func.jvp(number, (x,), (along,))[1]
        torch.testing.assert_close(slope, (wanted * along).sum(), atol=1e-3 * float(wanted.abs().sum()), rtol=1e-3)


@of_transformers
@torch.no_grad()
def test_what_recurrent_layers_do_not_have_is_refused_or_left_out():
    model, ids = build("Qwen3_5Text"), tokens(N)
    path = first_recurrent(model, "Qwen3_5Text")
    for edit in (AddToScores(rg.Where(keys=1), 2.0), ReplaceWeights(rg.Where(queries=3), "uniform")):
        refusal = pytest.raises(
            rg.RegardError, match=r"has no scores and no softmax. KnockOut and ScaleWeights.*Name the"
        )
        with refusal, rg.edit(model, edit):
            model(ids)
    steered = AddToScores(rg.Where(layers="*", keys=1), 2.0)
    with rg.edit(model, rg.KnockOut(rg.Where(layers="*", keys=1)) & steered) as run:
        model(ids)
    assert run.calls[path] == 1 and set(run.left_out) == {path}
    with (
        pytest.raises(rg.RegardError, match="has heads 0 to 3"),
        rg.edit(model, rg.KnockOut(rg.Where(heads="L0.H9", keys=1))),
    ):
        model(ids)
    rwkv = build("Rwkv")
    with pytest.raises(rg.RegardError, match="weighted mean"), rg.edit(rwkv, rg.KnockOut(rg.Where(keys=1))):
        rwkv(ids)
    kept = model(ids, use_cache=True).past_key_values
    refusal = pytest.raises(rg.RegardError, match="begins with a state from before")
    with refusal, rg.edit(model, rg.KnockOut(rg.Where(keys=1))):
        model(ids[:, :1], past_key_values=kept)


@of_transformers
@torch.no_grad()
def test_the_number_of_a_layer_with_attention_and_a_recurrence_means_the_attention():
    model, ids = build("FalconH1"), tokens(N)
    with rg.edit(model, rg.KnockOut(rg.Where(layers=0, keys=1))) as run:
        model(ids)
    assert set(run.calls) == {"model.layers.0.self_attn"} and set(run.left_out) == {"model.layers.0.mamba"}
    with rg.edit(model, rg.KnockOut(rg.Where(keys=1))) as run:
        model(ids)
    assert len(run.calls) == 4 and not run.left_out


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = rg.Attention(rg.Dot(1.0), transition=rg.transitions.Delta(unit=False))

    def forward(self, query, key, value, beta):
        return self.self_attn(query, key, value, beta=beta)


def test_own_recurrent_attention_equals_a_loop_without_the_write():
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 7, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    beta, model = torch.rand(2, 3, 7, dtype=torch.float64), torch.nn.Sequential(Recurrent())
    layer: torch.nn.Module = model[0]
    removed, read = 1, 4
    with rg.edit(model, rg.KnockOut(rg.Where(heads=[2], queries=read, keys=removed))), rg.watch(model) as seen:
        output = layer(query, key, value, beta).output
    expected = []
    for number in range(7):
        state = query.new_zeros(2, 3, 4, 4)
        for t in range(number + 1):
            k, v = key[:, :, t, :, None], value[:, :, t, None, :]
            written = beta[:, :, t, None, None] * k @ v
            if (number, t) == (read, removed):
                written = torch.cat([written[:, :2], 0 * written[:, 2:]], 1)
            state = state - beta[:, :, t, None, None] * k @ (k.mT @ state) + written
        expected.append((query[:, :, number, None] @ state)[:, :, 0])
    expected = torch.stack(expected, 2)
    torch.testing.assert_close(output, expected)
    slope = torch.randn_like(output)
    for mine, theirs in zip(
        torch.autograd.grad(output, (query, key, value), slope),
        torch.autograd.grad(expected, (query, key, value), slope),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-6)
    assert not bool(next(iter(seen.maps.values()))[:, 2, read, removed].any())


@of_transformers
@pytest.mark.parametrize("name", ["Qwen3_5Text", "KimiLinear", "Mamba2", "Mamba", "FalconH1", "Rwkv"])
def test_weight_times_gradient_is_the_slope_of_an_edit(name):
    """d L / d c, where c scales the weights, is sum w dL/dw: a central difference, whose error is that of c^3."""
    model, ids, step = build(name), tokens(N, 1), 0.02
    model.requires_grad_(False)
    path = first_recurrent(model, name)
    found = rg.attribute(model, {"input_ids": ids, "use_cache": False}, 5, test=False)
    assert not found.missing and path in found.maps
    links = found.maps[path].dense()[0]
    for head, query, keys in ((0, slice(2, 5), None), (1, N - 1, [1, 4]), (1, None, 2)):
        numbers = []
        for factor in (1 + step, 1 - step):
            where = rg.Where(layers=path, heads=[head], queries=query, keys=keys)
            with torch.no_grad(), rg.edit(model, ScaleWeights(where, factor)):
                numbers.append(float(model(ids, use_cache=False).logits[0, -1, 5]))
        rows = links[head] if query is None else links[head, query]
        total = rows.sum() if keys is None else rows[..., keys].sum()
        slope = (numbers[0] - numbers[1]) / (2 * step)
        assert slope == pytest.approx(float(total), abs=2e-2 * max(float(links.abs().max()), 1e-2))


@of_transformers
def test_relevance_passes_through_recurrent_layers_one_after_the_other():
    model, ids = build("Qwen3_5Text"), tokens(N, 1)
    links = rg.attribute(model, ids, 5, test=False)
    relevance, product = rg.attribute(model, ids, 5, "chefer", test=False), torch.eye(N)
    for weights in links.maps.values():
        product = product + weights.dense()[0].clamp_min(0).mean(0) @ product
    torch.testing.assert_close(relevance.tokens()[0], product[-1] - torch.eye(N)[-1])
    with pytest.raises(rg.RegardError, match=r"0.mamba and model.layers.0.self_attn are in one block"):
        rg.attribute(build("FalconH1"), ids, 5, "chefer", test=False)
    with pytest.raises(rg.RegardError, match="it is recurrent: method='weight-gradient' and 'chefer'"):
        rg.attribute(build("Mamba2"), ids, 5, "attention-flow", test=False)


@of_transformers
@torch.no_grad()
def test_nested_blocks_are_one_edit_and_another_model_does_not_hide_it():
    model, other, ids = build("Mamba2"), build("Mamba2"), tokens(N)
    path = first_recurrent(model, "Mamba2")
    first, second = links(path).parts
    with rg.edit(model, first & second):
        joint = model(ids, use_cache=False).logits
    with rg.edit(model, first), rg.edit(model, second):
        assert torch.equal(model(ids, use_cache=False).logits, joint)
    with rg.edit(model, first & second) as run, rg.edit(other, first):
        assert torch.equal(model(ids, use_cache=False).logits, joint) and run.calls[path] == 1
        other(ids, use_cache=False)


def of_convolution(module, seen):
    """Weights (C, J, J) of LFM2 and the values (C, J), by loops over its taps, and what it adds."""
    into, out, x = seen["in_proj"][0].T.chunk(3)
    taps, weights = module.conv.weight[:, 0], torch.zeros(len(x), N, N, dtype=x.dtype)
    for i in range(N):
        for back in range(min(taps.shape[1], i + 1)):
            weights[:, i, i - back] = out[:, i] * taps[:, -1 - back] * into[:, i - back]
    return weights, x[..., None], (out * module.conv.bias[:, None])[..., None]


def of_lightning(module, seen):
    """q_i . k_j exp(-slope (i - j)) for each head of MiniMax."""
    query, key, value = (module.act_fn(seen["qkv_proj"][0]).unflatten(-1, (module.num_attention_heads, -1))
                         .transpose(0, 1).chunk(3, -1))  # fmt: skip
    back = torch.arange(N)[:, None] - torch.arange(N)
    decays = (-module.slope_rate.view(-1, 1, 1) * back).exp().where(back >= 0, 0)
    return query @ key.mT * decays, value, 0.0


def of_gates(module, seen):
    """a_i ... a_(j+1) sqrt(1 - a_j^2) times the input gate of token j, for each channel of RecurrentGemma."""
    x = seen["activations"][0]
    heads = x.unflatten(-1, (module.num_attention_heads, -1)).transpose(0, 1)
    gates = [
        (heads @ getattr(module, f"{name}_gate_weight") + getattr(module, f"{name}_gate_bias")[:, None]).sigmoid()
        for name in ("input", "recurrent")
    ]
    into, kept = (gate.transpose(0, 1).flatten(1).T for gate in gates)  # (C, N)
    decay = (-8 * kept * torch.nn.functional.softplus(module.recurrent_param)[:, None]).exp()
    weights = torch.zeros(len(decay), N, N, dtype=x.dtype)
    for j in range(N):
        for i in range(j, N):
            factor = (1 - decay[:, j] ** 2).sqrt() if j else torch.ones_like(decay[:, 0])  # the first token resets
            weights[:, i, j] = decay[:, j + 1 : i + 1].prod(1) * factor * into[:, j]
    return weights, x.T[..., None], 0.0


def of_memory(module, seen):
    """exp(f_i + ... + f_(j+1) + new_j) q_i . k_j of xLSTM, divided by the larger of 1 and the size of their sum."""
    query, key, value, new, forget = (seen[name][0] for name in ("query", "key", "value", "igate", "fgate"))
    kept = torch.nn.functional.logsigmoid(forget).cumsum(-1)
    exponents = kept[..., None] - kept[..., None, :] + new[..., None, :]
    weights = exponents.exp().tril() * (query @ key.mT) * query.shape[-1] ** -0.5
    return weights / weights.sum(-1, keepdim=True).abs().clamp_min(1), value, 0.0


#: Models whose recurrent layers compute inside their module -> the part that reads the recurrence, the function of its
#: weights, and the error of the precision in which the model computes it.
INSIDE = {
    "Lfm2": ("out_proj", of_convolution, 1e-10),
    "MiniMax": ("norm", of_lightning, 1e-6),
    "RecurrentGemma": ("", of_gates, 1e-5),
    "xLSTM": ("", of_memory, 1e-4),
}


@of_transformers
@torch.no_grad()
@pytest.mark.parametrize("name", INSIDE)
def test_a_layer_that_computes_inside_its_module_is_its_formula_without_the_links(name):
    part, formula, error = INSIDE[name]
    model, ids = build(name, torch.float64), tokens(N)
    model.set_experts_implementation("eager")  # the other one has no float64
    path = first_recurrent(model, name)
    module = model.get_submodule(path)

    def run(edit):
        """What the layer was given and computed, what the maps of watches inside and outside are, and the run."""
        seen = {}
        with rg.watch(model, verify="all") as outside, rg.edit(model, edit) as edited, rg.watch(model) as inside:
            keep_result = (
                module.get_submodule(part).register_forward_hook(lambda _, args, out: seen.update(result=args[0]))
                if part
                else module.register_forward_hook(
                    lambda _, args, out: seen.update(result=out[0] if isinstance(out, tuple) else out)
                )
            )
            hooks = [keep_result, module.register_forward_pre_hook(
                lambda own, args, kwargs: seen.update(named_arguments(own, args, kwargs)), with_kwargs=True
            )]  # fmt: skip
            for child, own in module.named_children():
                hooks.append(own.register_forward_hook(lambda _, args, out, n=child: seen.update({n: out})))
            model(ids, use_cache=False)
            for hook in hooks:
                hook.remove()
        return seen, outside, inside, edited

    plain, before, _, _ = run(rg.edits.EditSequence())
    after, outside, inside, edited = run(links(path))
    weights, value, offset = formula(module, plain)
    table = factors((len(ids), len(weights), N, N)).to(weights)
    H, B = len(weights), len(ids)
    result = {
        "": lambda x: x if x.ndim == 4 else x.transpose(1, 2)[..., None],
        "out_proj": lambda x: x.transpose(1, 2)[..., None],
        "norm": lambda x: x.unflatten(-1, (H, -1)).transpose(1, 2),
    }[part]
    torch.testing.assert_close(result(plain["result"])[0], weights @ value + offset, atol=error, rtol=error)
    torch.testing.assert_close(result(after["result"])[0], weights * table[0] @ value + offset, atol=error, rtol=error)
    unedited = [n for n in range(N) if n not in (5, 7)]
    assert torch.equal(result(after["result"])[:, :, unedited], result(plain["result"])[:, :, unedited])
    assert not torch.allclose(after["result"], plain["result"]) and edited.calls[path] == 1 and not edited.left_out
    for seen in (outside, inside):
        torch.testing.assert_close(seen[path].dense(), before[path].dense() * factors(before[path].shape).to(weights))
        assert seen.verify()[path].ok and not seen.missing and before[path].shape[:2] == (B, H)
    again, unchanged, _, _ = run(rg.edits.EditSequence())
    assert torch.equal(again["result"], plain["result"]) and unchanged.verify()[path].ok


@of_transformers
@pytest.mark.parametrize("name", INSIDE)
def test_gradients_of_an_edit_inside_a_module_are_refused(name):
    model, edit = build(name), rg.KnockOut(rg.Where(layers="*", keys=1))
    with (
        pytest.raises(rg.RegardError, match="inside its module, so an edited run has no gradients"),
        rg.edit(model, edit),
    ):
        model(tokens(N, 1), use_cache=False)


@of_transformers
@forward_mode
def test_a_forward_derivative_of_an_edit_inside_a_module_is_refused():
    """Its tensors require no gradient, and the edited rows would have a derivative of 0."""
    model, edit = build("xLSTM").requires_grad_(False), rg.KnockOut(rg.Where(layers="*", keys=1))
    x = model.get_input_embeddings()(tokens(N, 1))
    with (
        pytest.raises(rg.RegardError, match="inside its module, so an edited run has no gradients"),
        rg.edit(model, edit),
    ):
        torch.func.jvp(lambda x: model(inputs_embeds=x, use_cache=False).logits, (x,), (x,))


@of_transformers
@torch.no_grad()
@pytest.mark.parametrize("name", ["Lfm2", "xLSTM"])
def test_nested_edits_inside_a_module_are_one_edit(name):
    model, ids = build(name), tokens(N)
    path = first_recurrent(model, name)
    first, second = links(path).parts
    with rg.edit(model, first & second):
        joint = model(ids, use_cache=False).logits
    with rg.edit(model, first), rg.edit(model, second), rg.watch(model, verify="all") as seen:
        assert torch.equal(model(ids, use_cache=False).logits, joint)
    assert seen.verify()[path].ok
