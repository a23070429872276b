"""The lowering to FlexAttention: right by the reference on CPU, block by block by torch's own block masks."""

from __future__ import annotations

import types
from importlib import import_module

import pytest
import torch
from hypothesis import given
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import drawn
import regard as rg
from cataloged import SINGLE
from drawn import BIASES, CLOSE, examples, problems
from regard.base.shapes import Sizes
from regard.base.versions import numbers
from regard.catalog import mechanisms
from regard.engine import flex
from regard.engine.plan import plan
from regard.engine.problem import Problem
from regard.reference import reference

SCORES = {name: drawn.SCORES[name] for name in ("dot", "unscaled", "cosine", "bilinear")}
NORMALIZERS = {name: drawn.NORMALIZERS[name] for name in ("softmax", "warm", "sink")}
LOWERED_BIASES = {name: BIASES[name] for name in BIASES if name not in ("transformer_xl", "learned_softcap")}


def problem_of(attention, q, k, v, positions=None):
    sizes = Sizes.of(q, k, v)
    return Problem(attention, q, k, v, positions or rg.types.Positions.aligned_to_end(sizes.I, sizes.J), sizes)


@examples(150)
@given(problem=problems(scores=SCORES, biases=LOWERED_BIASES, normalizers=NORMALIZERS, learned=False))
@torch.no_grad()
def test_what_is_lowered_is_what_the_reference_computes(problem):
    if (reason := flex.Flex().refusal(problem)) is not None:
        without_form = "mask_mod(...)" in reason or "no form for single pairs" in reason
        assert without_form, "of these pieces, only predicates and chosen keys cannot be lowered"
        return
    result = flex.Flex().run(problem)
    output, _ = reference(problem)
    torch.testing.assert_close(result.output, torch.from_numpy(output), **CLOSE)
    dense = plan(problem, "dense")
    expected = dense.problem.attention.normalizer.row_statistic(scores_of(problem), torch.arange(problem.sizes.J))
    torch.testing.assert_close(sum(result.row_statistic), sum(expected), **CLOSE)


def scores_of(problem):
    from regard.attention import scores

    return scores(problem.attention, problem.prepared, problem.grid)


RAN = {
    "self_attention",
    "multi_head",
    "longformer",
    "bigbird",
    "alibi",
    "t5",
    "shaw",
    "softcap",
    "sinks",
    "sliding_window",
}
LEFT = {
    "transformer_xl": "TransformerXLBias has no form",
    "linear": "no softmax",
    "bahdanau": "no softmax of scaled dot products",
    "top_k": "no softmax",
}


def test_which_mechanisms_of_the_catalog_it_runs():
    refused = {}
    for name in SINGLE:
        attention, q, k, v = mechanisms()[name].example()
        for parameter in attention.parameters():
            parameter.requires_grad_(False)
        refused[name] = rg.plan(q, k, v, attention=attention).refused.get("flex")
    assert {name for name in refused if refused[name] is None} >= RAN
    for name, reason in LEFT.items():
        assert reason in refused[name]


# Blocks

LONG = {
    "causal": rg.causal(),
    "window": rg.causal() & rg.window(100),
    "wide": rg.window(300),
    "packed": rg.documents([200, 1, 299, 100]) & rg.causal(),
    "padded": rg.padding([600, 333]) & rg.causal(),
    "longformer": rg.window(30) | rg.masks.global_tokens([0, 1, 400]),
    "bigbird": rg.masks.bigbird(600, block=32),
    "local": rg.masks.block_local(64, before=1),
    "prefix": rg.causal() | rg.masks.prefix(150),
    "dilated": rg.masks.dilated(9, 7),
    "but": ~rg.window(200) & rg.causal(),
    "nothing": rg.masks.prefix(0),
}


@pytest.mark.parametrize("queries", [600, 512, 130])
@pytest.mark.parametrize("name", LONG)
def test_blocks_from_spans_hold_what_the_mask_says(name, queries):
    q, k = torch.randn(2, 2, queries, 16), torch.randn(2, 2, 600, 16)
    problem = problem_of(rg.Attention(mask=LONG[name]), q, k, k)
    lowered = flex.lower(problem)
    mine = lowered.blocks
    allowed = torch.nn.functional.pad(
        LONG[name].allowed(problem.grid).expand(2, 2, queries, 600), (0, -600 % 128, 0, -queries % 128)
    )
    tiles = allowed.unflatten(3, (-1, 128)).unflatten(2, (-1, 128)).transpose(3, 4)
    some, whole = tiles.flatten(-2).any(-1).any(0).any(0), tiles.flatten(-2).all(-1).all(0).all(0)
    partial, full = (dense(*table, some.shape) for table in tables(mine))
    assert not (partial & full).any()
    assert (partial | full)[some].all() and whole[full].all()
    theirs = create_block_mask(mine.mask_mod, 2, None, queries, 600, device="cpu")
    assert (theirs.to_dense().amax(0)[0].bool() == some).all(), "their blocks are read the same way"
    if name in ("causal", "window", "wide", "packed", "prefix", "local"):
        assert torch.equal(partial | full, some), "spans of these are exact"
    inside = (slice(queries // 128), slice(600 // 128))
    if name in ("causal", "wide", "prefix"):
        assert torch.equal(full[inside], whole[inside])


def tables(blocks):
    return (blocks.kv_num_blocks, blocks.kv_indices), (blocks.full_kv_num_blocks, blocks.full_kv_indices)


def dense(counts, indices, shape):
    flags = torch.zeros(shape, dtype=torch.bool)
    for row, (count, chosen) in enumerate(zip(counts[0, 0], indices[0, 0], strict=True)):
        flags[row, chosen[:count].long()] = True
    return flags


def captured(function, seen):
    """Everything a function closes over, through the functions it calls."""
    if id(function) in seen:
        return
    seen.add(id(function))
    for cell in function.__closure__ or ():
        for value in cell.cell_contents if isinstance(cell.cell_contents, list) else [cell.cell_contents]:
            if isinstance(value, types.FunctionType):
                yield from captured(value, seen)
            else:
                yield value


@pytest.mark.parametrize("name", LONG)
def test_no_python_number_is_compiled_in(name):
    q = torch.randn(2, 2, 600, 16)
    biases = [rg.biases.Softcap(3.0), rg.ALiBi(2), rg.biases.ShawBias(16, 4)]
    attention = rg.Attention(mask=LONG[name], bias=biases, normalizer=rg.normalizers.Softmax(temperature=2.0))
    lowered = flex.lower(problem_of(attention, q, q, q))
    held = [*captured(lowered.change, set()), *captured(lowered.blocks.mask_mod, set())]
    assert held and all(isinstance(value, torch.Tensor) for value in held)


def test_planning_65536_tokens_holds_nothing_like_all_pairs():
    q = torch.empty(1, 1, 65_536, 8)
    lowered = flex.lower(problem_of(rg.Attention(mask=rg.causal() & rg.window(256)), q, q, q))
    assert lowered.blocks.kv_indices.numel() == 512 * 512
    assert int(lowered.blocks.kv_num_blocks.sum() + lowered.blocks.full_kv_num_blocks.sum()) == 3 * 512 - 3


# Compiled, as on CUDA

COMPILED = {
    "window of shared heads": rg.Attention(mask=rg.causal() & rg.window(100)),
    "capped and padded": rg.Attention(mask=rg.padding([300, 210]), bias=[rg.biases.Softcap(2.0), rg.ALiBi(4)]),
    "packed": rg.Attention(mask=rg.documents([100, 130, 70]) & rg.causal()),
}


#: What torch says without vector instructions: it refuses, or takes a program of its cache whose C++ does not compile.
NO_COMPILER = ("current platform is not supported for CPU", "CppCompileError")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", COMPILED)
@torch.no_grad()
def test_compiled_it_gives_the_same(name):
    q, k, v = torch.randn(2, 4, 300, 16), torch.randn(2, 2, 300, 16), torch.randn(2, 2, 300, 16)
    lowered = flex.lower(problem_of(COMPILED[name], q, k, v))
    try:
        output = torch.compile(flex_attention)(*lowered.tensors, **lowered.options)
    except torch._dynamo.exc.BackendCompilerFailed as failure:
        if any(reason in str(failure) for reason in NO_COMPILER):
            pytest.skip("torch does not compile FlexAttention for a processor without vector instructions")
        if numbers(torch.__version__) < (2, 9) and name == "capped and padded":
            pytest.skip("torch 2.8 does not compile FlexAttention with a mask in batches")
        raise
    torch.testing.assert_close(output, COMPILED[name](q, k, v, engine="dense").output, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_other_numbers_are_no_other_program():
    """A window of another size runs what was compiled: constants are tensors."""
    count = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(flex_attention, backend=count, fullgraph=True)
    x = torch.randn(1, 2, 300, 16)
    for size, cap in ((100, 3.0), (70, 5.0), (130, 9.0)):
        attention = rg.Attention(mask=rg.causal() & rg.window(size), bias=rg.biases.Softcap(cap))
        lowered = flex.lower(problem_of(attention, x, x, x))
        compiled(*lowered.tensors, **lowered.options)
    assert count.frame_count == 1


# What is asked of it

x = torch.randn(1, 2, 8, 16)
REFUSED = {
    "sparsemax": (rg.Attention(normalizer=rg.normalizers.Sparsemax()), "no softmax of scaled dot products"),
    "entmax": (rg.Attention(normalizer=rg.normalizers.Entmax15()), "no softmax"),
    "top k": (rg.Attention(normalizer=rg.normalizers.TopK(3)), "no softmax"),
    "additive scores": (rg.Attention(rg.scores.Additive(16, 16, 4)), "no softmax of scaled"),
    "dropout": (rg.Attention(dropout=0.5), "dropout acts on weights"),
    "a predicate": (
        rg.Attention(mask=rg.mask_mod(lambda b, h, i, j: i != j)),
        r"predicate.*regard\.mask_tensor\(tensor\)",
    ),
    "transformer_xl": (
        rg.Attention(bias=rg.biases.TransformerXLBias(2, 16)).requires_grad_(False),
        "TransformerXLBias has no",
    ),
    "gradients on CPU": (rg.Attention(normalizer=rg.normalizers.LearnedSink(2)), "no backward pass on CPU"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_cannot_run_is_refused_with_who_can(what):
    attention, message = REFUSED[what]
    with pytest.raises(rg.RegardError, match=f"(?s)flex engine cannot run.*{message}.*Engines that can: .*dense"):
        attention(x, x, x, engine="flex")
    if what != "dropout":
        assert "The flex engine cannot run this" in str(rg.plan(x, x, x, attention=attention))


def test_rings_with_sinks_run():
    attention, cache = rg.Attention(mask=rg.causal()), rg.caches.RingCache(5, sinks=2)
    whole = attention(*(x for _ in range(3)), cache=cache)
    ours = attention(x, x, x, cache=whole.cache, engine="flex")
    torch.testing.assert_close(ours.output, attention(x, x, x, cache=whole.cache).output)
    torch.testing.assert_close(ours.weights.dense(), attention(x, x, x, cache=whole.cache).weights.dense())


@torch.no_grad()
def test_bfloat16_stays_within_its_rounding():
    q, k, v = (torch.randn(2, heads, 200, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
    attention = rg.Attention(mask=rg.causal() & rg.window(50), bias=rg.ALiBi(4))
    mine = attention(q, k, v, engine="flex").output
    exact = attention(q.double(), k.double(), v.double(), engine="dense").output
    assert mine.dtype == torch.bfloat16
    assert (mine.double() - exact).abs().max() <= 4 * 2**-8 * v.abs().max()


def test_it_is_chosen_on_a_gpu_alone(monkeypatch):
    monkeypatch.setenv("REGARD_KERNEL", "off")
    q = torch.randn(1, 2, 2048, 16)
    attention = rg.Attention(mask=rg.causal() & rg.window(64))
    assert rg.plan(q, q, q, attention=attention).engine == "blocked"
    monkeypatch.setattr(import_module("regard.engine.plan"), "on_gpu", lambda problem: True)
    assert rg.plan(q, q, q, attention=attention).engine == "flex"
    assert rg.plan(q, q, q, attention=rg.Attention(mask=rg.causal())).engine == "fused"
    assert (
        rg.plan(q, q, q, attention=rg.Attention(normalizer=rg.normalizers.Sparsemax(), mask=rg.window(64))).engine
        == "blocked"
    )
