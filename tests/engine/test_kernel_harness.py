"""The kernels on AArch64, emulated by qemu, and under the sanitizers of gcc: all their numbers against float64.

The calls are those of the engine; only the processor that computes them is another one. Both programs hold the
baseline of the kernels, whose vectors have four numbers on x86-64 and on AArch64.
"""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import build_kernels
import regard as rg
from exact_reductions import check, some_reductions
from kernel_harness import Harness, stand_in
from kernels import additive
from regard.engine.kernel import (
    attention,
    chosen,
    indexer,
    library,
    recurrence,
    rotation,
    similarity,
    statistics,
    sums,
    transport,
)
from regard.maps import compiled_reductions

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.example,
    pytest.mark.skipif(not library.PATH.exists(), reason="the kernels were not built; `make kernels` builds them"),
]
SANITIZERS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
#: name -> the pieces, and the sizes (B, H, G, I, J, D, E).
CASES = {
    "plain": (lambda: {}, (2, 2, 2, 37, 41, 16, 24)),
    "causal with shared keys": (lambda: {"mask": rg.causal()}, (1, 4, 2, 150, 150, 32, 32)),
    "window behind more keys": (lambda: {"mask": rg.causal() & rg.window(20)}, (1, 1, 1, 100, 230, 64, 64)),
    "window of a long text": (lambda: {"mask": rg.causal() & rg.window(20)}, (1, 1, 1, 3200, 3200, 4, 16)),
    "padding": (lambda: {"mask": rg.padding([50, 3, 0])}, (3, 2, 1, 33, 50, 16, 16)),
    "documents": (lambda: {"mask": rg.documents([50, 50, 20]) & rg.causal()}, (1, 2, 2, 120, 120, 16, 16)),
    "predicate": (lambda: {"mask": rg.mask_mod(lambda b, h, i, j: (i * 7 + j) % 3 > 0)}, (2, 2, 1, 45, 70, 17, 19)),
    "ALiBi under a cap": (lambda: {"bias": (rg.ALiBi(2), rg.biases.Softcap(2.0))}, (1, 2, 2, 60, 77, 16, 16)),
    "T5": (lambda: {"bias": rg.biases.T5Bias(2)}, (2, 2, 1, 70, 70, 16, 16)),
    "Shaw": (lambda: {"bias": (rg.biases.ShawBias(16, reach=9), rg.biases.Softcap(2.0))}, (1, 4, 2, 60, 77, 16, 16)),
    "dropout": (lambda: {"mask": rg.causal(), "dropout": 0.4}, (2, 4, 2, 50, 130, 16, 24)),
    "sink": (lambda: {"normalizer": rg.normalizers.Softmax(sink=0.5)}, (1, 2, 2, 30, 40, 16, 16)),
    "one query of width 256": (lambda: {"mask": rg.causal()}, (2, 2, 1, 1, 90, 256, 256)),
    "widths of no whole vector": (lambda: {}, (1, 1, 1, 5, 3, 1, 3)),
    "additive": (lambda: {"score": additive(16, 16, 10), "mask": rg.causal()}, (1, 4, 2, 50, 70, 16, 5)),
    "additive, far apart": (lambda: {"score": additive(8, 8, 33, size=100.0)}, (2, 1, 1, 15, 20, 8, 8)),
}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    if find_spec("ziglang") is None:
        pytest.skip("the compiler is not installed; `make kernels` installs it")
    if shutil.which("qemu-aarch64") is None:
        pytest.skip("qemu-aarch64 is not installed: apt-get install qemu-user")
    program = tmp_path_factory.mktemp("emulated") / "harness"
    return Harness("qemu-aarch64", str(build_kernels.build_harness(build_kernels.emulated_compiler(), program)))


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    if shutil.which("gcc") is None:
        pytest.skip("gcc, which has the sanitizers, is not installed")
    program = tmp_path_factory.mktemp("sanitized") / "harness"
    return Harness(str(build_kernels.build_harness(["gcc", *SANITIZERS], program)))


#: Each program is compiled by one worker of xdist.
@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("emulated", "sanitized")])
def harness(request, monkeypatch):
    harness = request.getfixturevalue(request.param)
    monkeypatch.setenv("REGARD_KERNEL", "baseline")
    stand_in(monkeypatch, harness)
    harness.num_calls = 0
    return harness


def inputs(B, H, G, I, J, D, E, dtype=torch.float32):
    """Queries, keys and values whose channels are one batch of strided memory, as projections leave them."""
    shapes = (B, I, H, D), (B, J, G, D), (B, J, G, E)
    return [torch.randn(shape).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes]


def attend(mechanism, tensors, engine):
    torch.manual_seed(0)  # every call drops the same weights
    return mechanism(*tensors, engine=engine).output


def output_and_gradients(mechanism, tensors, grad, engine):
    output = attend(mechanism, tensors, engine)
    wanted = [*tensors, *(p for p in mechanism.parameters() if p.requires_grad)]
    return [output, *torch.autograd.grad(output, wanted, grad.to(output.dtype))]


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_float64(harness, case):
    pieces, sizes = CASES[case]
    mechanism, tensors = rg.Attention(**pieces()), inputs(*sizes)
    grad = torch.randn(*sizes[:2], sizes[3], sizes[6])
    found = output_and_gradients(mechanism, tensors, grad, "kernel")
    assert harness.num_calls == 2
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    exact = output_and_gradients(mechanism.double(), doubles, grad, "dense")
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_few_queries_are_those_of_float64(harness, monkeypatch, case, dtype):
    """Decoding, which keeps keys and values in their own layout, is right for any number of queries."""
    pieces, (B, H, G, I, J, D, E) = CASES[case]
    monkeypatch.setattr(attention, "FEW_ROWS", 1000)
    mechanism, tensors = rg.Attention(**pieces()), inputs(B, H, G, I, J, D, E, dtype)
    found = attend(mechanism, tensors, "kernel")
    assert harness.num_calls == 1
    exact = attend(mechanism.double(), [t.double() for t in tensors], "dense")
    half = 0.51 * torch.finfo(dtype).eps
    atol = 2 * half if case == "Shaw" else 2e-5  # its terms are products in the dtype of the queries
    torch.testing.assert_close(found.double(), exact, rtol=max(1e-4, half), atol=max(2e-5, atol))


@pytest.mark.parametrize("rope", [rg.RoPE(16), rg.RoPE(6, interleaved=True)], ids=["halves", "partial, interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rotations_are_those_of_float64(harness, monkeypatch, rope, dtype):
    monkeypatch.setattr(rotation, "run", harness)
    x, grad = (t.detach() for t in inputs(2, 3, 3, 77, 77, 16, 16, dtype)[:2])
    positions = torch.arange(5, 82)
    found = rope.encode(x.requires_grad_(), positions)
    gradient = torch.autograd.grad(found, x, grad)[0]
    assert harness.num_calls == 2
    exact = rope.encode(x.detach().double(), positions)
    back = rope.encode(grad.double(), -positions)
    for one, other in ((found, exact), (gradient, back)):
        torch.testing.assert_close(one.double(), other, rtol=0.51 * torch.finfo(dtype).eps, atol=2e-6)


@pytest.mark.parametrize("sizes", [(2, 4, 2, 97, 97, 20, 13), (1, 1, 1, 1, 1, 1, 1)], ids=str)
def test_sums_of_linear_attention_are_those_of_float64(harness, monkeypatch, sizes):
    monkeypatch.setattr(sums, "run", harness)
    attention = rg.Attention(rg.scores.FeatureScore(), mask=rg.causal(), normalizer=rg.normalizers.SumNormalizer())
    tensors, grad = inputs(*sizes), torch.randn(*sizes[:2], sizes[3], sizes[6])
    found = output_and_gradients(attention, tensors, grad, "linear")
    assert harness.num_calls == 2 + 2 * sizes[1] // sizes[2]
    exact = output_and_gradients(attention, [t.detach().double().requires_grad_() for t in tensors], grad, "dense")
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("sizes", [(2, 3, 97, 20, 13), (1, 1, 5, 1, 1)], ids=str)
def test_recurrences_are_those_of_float64(harness, monkeypatch, sizes):
    monkeypatch.setattr(recurrence, "run", harness)
    monkeypatch.setattr(transport, "run", harness)
    B, H, n, D, E = sizes
    attention, grad = rg.Attention(transition=rg.transitions.GatedDelta()), torch.randn(B, H, n, E)
    given = [torch.randn(B, H, n, width) for width in (D, D, E)] + [-torch.rand(B, H, n), torch.rand(B, H, n)]
    results, maps = [], []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in given]
        q, k, v, log_decay, beta = leaves
        seen = attention(q, k, v, log_decay=log_decay, beta=beta)
        results.append([seen.output, *torch.autograd.grad(seen.output, leaves, grad.to(dtype))])
        maps.append(seen.weights)
    assert harness.num_calls == 2
    rows = torch.tensor([0, n // 2, n - 1])
    for found, seen in zip(results, maps, strict=True):
        found.append(seen.tile(rows=rows))
    with torch.no_grad():  # few tokens go one by one
        few = [x[:, :, :3] for x in given]
        results[0].append(attention(*few[:3], log_decay=few[3], beta=few[4]).output)
    results[1].append(results[1][0][:, :, :3])
    for one, other in zip(*results, strict=True):
        atol = 2e-5 + 1e-4 * float(other.detach().abs().max())
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("size", [1, 5, 40])
def test_attention_to_chosen_keys_is_that_of_float64(harness, monkeypatch, size):
    monkeypatch.setattr(chosen, "run", harness)
    ids = torch.randint(-1, 150 // size + 1, (2, 2, 150, 6))
    mask = rg.causal() & rg.masks.chosen_keys(ids, size=size, num_heads=4) & rg.padding([150, 130])
    tensors, grad = inputs(2, 4, 2, 150, 150, 20, 13), torch.randn(2, 4, 150, 13)
    found = output_and_gradients(rg.Attention(mask=mask), tensors, grad, "chosen")
    assert harness.num_calls == 2
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    exact = output_and_gradients(rg.Attention(mask=mask), doubles, grad, "dense")
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=2e-5)


def test_an_indexer_chooses_the_same_keys(harness, monkeypatch):
    query, key, weights = (torch.randint(-3, 4, s).float() for s in ((2, 3, 40, 7), (2, 1, 90, 7), (2, 40, 3)))
    positions, scores = rg.types.Positions.aligned_to_end(40, 90), torch.randint(0, 9, (50, 37)).float()
    expected = indexer.indexed(query, key, weights, 11, positions, rg.causal(), 1), indexer.greatest(scores, 5)
    monkeypatch.setattr(indexer, "run", harness)
    found = indexer.indexed(query, key, weights, 11, positions, rg.causal(), 1), indexer.greatest(scores, 5)
    assert harness.num_calls == 2
    assert all(map(torch.equal, found, expected))


@torch.no_grad()
@pytest.mark.parametrize(
    "case", ["plain", "causal with shared keys", "padding", "predicate", "Shaw", "sink", "additive"]
)
def test_statistics_are_those_of_float64(harness, monkeypatch, case):
    """Every reduction that the kernels compute, and the products of heads."""
    pieces, (B, H, G, I, J, D, E) = CASES[case]
    attention, tensors = rg.Attention(**pieces()), inputs(B, H, G, I, J, D, E)
    seen = attention(*tensors, engine="kernel").weights
    monkeypatch.setattr(compiled_reductions, "FEWEST_PAIRS", 0)
    monkeypatch.setattr(library, "LOWEST_LEVEL", 0)
    monkeypatch.setattr(statistics, "run", harness)
    monkeypatch.setattr(similarity, "run", harness)
    harness.num_calls = 0
    states = seen.reduction_states(some_reductions(B, H, I, J))
    assert harness.num_calls >= (1 if case == "additive" else 3)
    exact = attention.double()(*(t.double() for t in tensors), engine="dense").weights
    check(states, exact.dense(), exact.grid.distance, 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once(harness, dtype):
    tensors = inputs(1, 2, 1, 40, 50, 16, 16, dtype)
    grad = torch.randn(1, 2, 40, 16).to(dtype)
    found = output_and_gradients(rg.Attention(mask=rg.causal()), tensors, grad, "kernel")
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    exact = output_and_gradients(rg.Attention(mask=rg.causal()), doubles, grad, "dense")
    unit = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(found[0].double(), exact[0], rtol=1.01 * unit, atol=1e-5)
    for one, other in zip(found[1:], exact[1:], strict=True):  # output * grad, of the rounded output, is in them too
        torch.testing.assert_close(one.double(), other, rtol=4 * unit, atol=16 * unit)


@pytest.mark.xdist_group("sanitized")
def test_the_sanitizers_see_a_buffer_that_is_too_short(sanitized, monkeypatch):
    monkeypatch.setenv("REGARD_KERNEL", "baseline")

    def shortened(workspace, library, name, call):
        call.J += 50  # more keys than there are
        sanitized(library, name, call, 0)

    monkeypatch.setattr(attention, "run_in", shortened)
    with pytest.raises(AssertionError, match="AddressSanitizer: heap-buffer-overflow"):
        rg.Attention()(*inputs(1, 1, 1, 20, 20, 16, 16), engine="kernel")


@pytest.mark.xdist_group("emulated")
def test_the_emulated_program_is_one_for_aarch64(emulated):
    header = Path(emulated.command[1]).read_bytes()[:20]
    assert header[:5] == b"\x7fELF\x02" and int.from_bytes(header[18:20], "little") == 183  # EM_AARCH64
    assert subprocess.run(emulated.command, input=b"", check=False).returncode == 0
