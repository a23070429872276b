"""The laws of attention on a pretend accelerator; test_accelerator.py runs this module in a process of its own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import regard as rg
from accelerator import DEVICE, device_dtype, moved, no_float64, on_host
from cataloged import COMPOSITES, TRANSPORTED
from regard.catalog import mechanisms
from regard.catalog.entry import call_tensors
from regard.diagnosis.laws import runs
from regard.engine import ENGINES
from regard.pieces.same_group import SameGroup

pytestmark = pytest.mark.usefixtures("small_blocks")
every_mechanism = pytest.mark.parametrize("name", sorted(mechanisms()))
#: Float64 as the laws of the CPU have it; float32 where the device has nothing else, as Apple's GPUs.
DTYPES = {torch.float64: {"rtol": 1e-9, "atol": 1e-10}, torch.float32: {"rtol": 1e-4, "atol": 1e-5}}


dtype = device_dtype()


def examples(name: str, dtype: torch.dtype):
    """The same problem on the CPU and on the device, each with the tensors of the call."""
    example = mechanisms()[name].example(dtype=dtype)
    of_call = call_tensors(*example)
    return (example, of_call), (moved(copy.deepcopy(example)), moved(of_call))


def engines(name: str, *without: str) -> set[str]:
    """Those that may run a mechanism; the parts of a composite choose theirs."""
    among = {"auto"} if name in COMPOSITES else {"recurrent", "reference"} if name in TRANSPORTED else set(ENGINES)
    return among - {"flex", *without}


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(on_host(found), expected.detach(), **DTYPES.get(expected.dtype, {}))


def gradients(engine: str, example, of_call) -> list[Tensor | None] | None:
    attention, *tensors = example
    inputs = [t.detach().requires_grad_() for t in tensors]
    of_call = {name: t.detach().requires_grad_() for name, t in of_call.items()}
    seen = runs(engine, attention, *inputs, tensors=of_call)
    if seen is None:
        return None
    toward = torch.linspace(-1, 1, seen.output.numel(), dtype=seen.output.dtype).view(seen.output.shape)
    wanted = [*inputs, *of_call.values(), *(p for p in attention.parameters() if p.requires_grad)]
    return list(torch.autograd.grad(seen.output, wanted, toward.to(seen.output.device), allow_unused=True))


@every_mechanism
@torch.no_grad()
def test_every_engine_gives_the_values_of_the_cpu(name, dtype):
    (here, of_call), (there, moved_tensors) = examples(name, dtype)
    expected = here[0](*here[1:], **of_call)
    ran = 0
    for engine in engines(name):
        seen = runs(engine, *there, tensors=moved_tensors)
        if seen is not None:
            ran += 1
            close(seen.output, expected.output)
            if hasattr(expected.weights, "row_statistic"):
                close(seen.weights.row_statistic[0].float(), expected.weights.row_statistic[0].float())
    assert ran


@every_mechanism
def test_gradients_are_those_of_the_cpu(name, dtype):
    here, there = examples(name, dtype)
    expected = gradients("auto" if name in COMPOSITES + TRANSPORTED else "dense", *here)
    assert expected
    for engine in engines(name, "reference"):
        for mine, theirs in zip(gradients(engine, *there) or (), expected, strict=False):
            if mine is None or theirs is None:
                assert all(g is None or not g.any() for g in (mine, theirs))
            else:
                close(mine, theirs)


@every_mechanism
@torch.no_grad()
def test_rows_tiles_and_reductions_are_those_of_the_cpu(name, dtype):
    here, there = (example[0](*example[1:], **of_call).weights for example, of_call in examples(name, dtype))
    close(there.dense(), here.dense())
    J = here.shape[3]
    close(there[1, -1, 2], here[1, -1, 2])
    close(there[0, :, 1:-1, J // 2 :], here[0, :, 1:-1, J // 2 :])
    close(there[..., [J - 1, 0, 0]], here[..., [J - 1, 0, 0]])
    close(there.received(), here.received())
    here, there = (weights if weights.has_shares else weights.shares() for weights in (here, there))
    reductions = (
        rg.maps.Entropy(),
        rg.maps.KeyTotals(),
        rg.maps.Distance(),
        rg.maps.MassOn([0, 2]),
        rg.maps.Pool(3, 3),
        rg.maps.Similarity(),
    )
    for mine, theirs in zip(there.summarize(*reductions), here.summarize(*reductions), strict=True):
        close(mine, theirs)
    close(there.top(2).weights, here.top(2).weights)


@every_mechanism
@torch.no_grad()
def test_decoding_with_a_cache_is_that_of_the_cpu(name, dtype):
    (here, of_call), (there, moved_tensors) = examples(name, dtype)
    length = here[1].shape[2]
    if length != here[2].shape[2]:
        return
    is_plain = name not in COMPOSITES + TRANSPORTED
    caches = (rg.GrowingCache(), rg.caches.RingCache(size=length)) if is_plain and not of_call else (rg.GrowingCache(),)
    for cache in (rg.caches.RecurrentCache(),) if name in TRANSPORTED else caches:
        close(decoded(there, moved_tensors, cache, is_plain), decoded(here, of_call, cache, is_plain))


def decoded(example, of_call, cache, is_plain: bool) -> Tensor:
    """The outputs of a prefill, one token and the rest; tensors of the call with an axis of tokens are cut too."""
    attention, *tensors = example
    length, outputs = tensors[0].shape[2], []
    if is_plain:
        attention = attention.with_mask(rg.causal() if attention.mask is None else attention.mask & rg.causal())
    for step in (slice(0, 4), slice(4, 5), slice(5, length)):
        part = {
            name: x.narrow(x.shape.index(length), step.start, step.stop - step.start) for name, x in of_call.items()
        }
        seen = attention(*(x[:, :, step] for x in tensors), cache=cache, **part)
        cache = seen.cache
        outputs.append(seen.output)
    return torch.cat(outputs, 2)


@every_mechanism
def test_plan_says_of_the_device_what_it_says_of_the_cpu(name, dtype):
    plans = [rg.plan(*example[1:], attention=example[0], **of_call) for example, of_call in examples(name, dtype)]
    assert type(plans[0]) is type(plans[1]) and all(map(str, plans))


@pytest.mark.parametrize(
    "mask",
    [
        rg.padding([24, 5]),
        rg.padding(torch.arange(24) < torch.tensor([[24], [5]])),
        rg.mask_tensor(torch.ones(24, 24, dtype=torch.bool).tril()),
        rg.documents([10, 14]),
        rg.masks.random_blocks(4, 1, 24),
        rg.mask_mod(lambda b, h, i, j: (i + 2 * j + b) % 3 != 0),
        rg.causal() & ~rg.window(2) | rg.masks.prefix(1),
        rg.masks.block_local(4) | rg.masks.dilated(3, 2),
    ],
)
@torch.no_grad()
def test_masks_made_on_the_host_serve_the_device(mask, dtype):
    attention, q, k, v = mechanisms()["multi_head"].example(dtype=dtype)
    expected = attention.with_mask(mask)(q, k, v)
    for engine in ("dense", "fused", "blocked"):
        seen = attention.with_mask(mask)(*moved((q, k, v)), engine=engine)
        close(seen.output, expected.output)
    close(seen.weights.dense(), expected.weights.dense())
    close(seen.weights.entropy(), expected.weights.entropy())


@pytest.mark.parametrize(
    "mask",
    [
        lambda place: SameGroup(place(torch.tensor([[0, 0, 1], [0, 1, 1]]))),
        lambda place: rg.mask_tensor(
            place(torch.ones(2, 1, 3, 3).tril().bool() & torch.eye(2).bool()[:, :1, None, None])
        ),
        lambda place: rg.masks.chosen_keys(place(torch.tensor([[[[0], [1], [2]]], [[[2], [0], [0]]]]))),
        lambda place: rg.padding(place(torch.tensor([3, 1]))),
    ],
)
def test_indices_on_the_host_select_entries_of_masks_made_on_the_device(mask):
    index = torch.tensor([1, 0, 1])
    expected = mask(lambda tensor: tensor).dense(3)[index]
    torch.testing.assert_close(mask(moved).select(index).dense(3), expected)


def test_dropout_drops_what_it_drops_on_the_cpu(dtype):
    attention, *tensors = mechanisms()["multi_head"].example(dtype=dtype)
    dropping = rg.Attention(attention.score, mask=attention.mask, dropout=0.4)
    outputs = []
    for given in (tensors, moved(tuple(tensors))):
        torch.manual_seed(3)
        outputs.append(dropping(*given).output)
    close(outputs[1], outputs[0])


def test_far_positions_keep_their_precision_without_float64():
    x, places = torch.randn(1, 1, 3, 16), torch.tensor([5, 999_999, 20_000_003])
    by = places.double()[:, None] * 10_000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    waves = torch.stack((by.sin(), by.cos()), -1).flatten(1)
    turned = torch.view_as_real(torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(by), by))
    with no_float64():
        added, rotated = (piece.encode(moved(x), moved(places)) for piece in (rg.encodings.Sinusoidal(), rg.RoPE(16)))
    torch.testing.assert_close(on_host(added).double(), x + waves, rtol=0, atol=2e-6)
    torch.testing.assert_close(on_host(rotated).double(), torch.cat(turned.unbind(-1), -1), rtol=0, atol=2e-6)


def test_a_table_that_is_too_short_is_refused_before_the_device_reads_it():
    learned = moved(rg.encodings.LearnedPositions(4, 8))
    x = torch.randn(1, 2, 6, 8, device=DEVICE)
    with pytest.raises(rg.RegardError, match="has positions 0 to 3, this call needs 0 to 5"):
        rg.Attention(position=learned)(x, x, x)
    embedding = moved(rg.nn.Embedding(9, 8, rg.encodings.LearnedPositions(4, 8)))
    with pytest.raises(rg.RegardError, match="has positions 0 to 3, this call needs 3 to 4"):
        embedding(torch.ones(1, 2, dtype=torch.int64, device=DEVICE), start=3)


def test_the_device_mixes_with_no_other():
    x = torch.ones(3, device=DEVICE)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    assert on_host(x + torch.tensor(2.0)).tolist() == [3.0, 3.0, 3.0]
    with pytest.raises(rg.RegardError, match="one device"):
        rg.Attention()(torch.randn(1, 1, 3, 4, device=DEVICE), *torch.randn(2, 1, 1, 3, 4))
