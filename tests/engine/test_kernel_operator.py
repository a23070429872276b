"""`regard::attention`, the operator of the compiled kernels: what it computes is what the dense engine computes."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import regard as rg
from kernels import REASON, at_level, every_level, needs_kernel
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.spans import Spans
from regard.engine.kernel.operator import OPERATOR
from regard.pieces.dropout import kept
from regard.pieces.same_group import groups_mask

pytestmark = needs_kernel
REAL = torch.tensor([[False, True, True, True, False, True, True, True, True], [True] * 6 + [False] * 3])
GROUPS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 3]])
#: Masks: the arguments of the operator, and the same mask in pieces, for 9 tokens in a batch of 2.
MASKS = {
    "none": ({}, None),
    "causal": ({"is_causal": True}, rg.causal()),
    "window": ({"is_causal": True, "window": 4}, rg.causal() & rg.window(4)),
    "window both ways": ({"window": 3}, rg.window(3)),
    "padding": ({"real": REAL}, rg.padding(REAL)),
    "no padding": ({"real": torch.ones_like(REAL)}, None),
    "causal padding": ({"real": REAL, "is_causal": True}, rg.causal() & rg.padding(REAL)),
    "groups": ({"groups": GROUPS}, groups_mask(GROUPS)),
    "equal groups": ({"groups": GROUPS[:1].expand(2, -1), "is_causal": True}, rg.causal() & rg.documents([3, 4, 2])),
    "groups and window": (
        {"groups": GROUPS, "is_causal": True, "window": 2},
        rg.causal() & rg.window(2) & groups_mask(GROUPS),
    ),
}


def arguments(tensors, **given):
    """All arguments of the operator in their order."""
    usual = {"sink": None, "real": None, "groups": None, "offset": None, "seed": None, "owner": None}
    usual |= {"start": 0, "first": 0, "is_causal": False, "window": 0, "scale": 0.3, "cap": 0.0, "dropout": 0.0}
    return *tensors, *(usual | given).values()


def drawn(I=9, J=9, dtype=torch.float32, B=2, H=4, G=2, D=16, E=24):
    torch.manual_seed(1)
    shapes = (B, H, I, D), (B, G, J, D), (B, G, J, E)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def assert_same(given, attention, tensors, sink=None, positions=None, close=2e-5):
    """Output, log-sum-exp and gradients are those of the dense engine in float64."""
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = attention.double()(*exact, positions=positions, engine="dense").output
    output, logsumexp = OPERATOR(*arguments(tensors, **given, **({} if sink is None else {"sink": sink})))
    toward = torch.randn_like(output)
    learned = [*tensors, *([] if sink is None else [sink])]
    also = [*exact, *([] if sink is None else [attention.normalizer.sink])]
    grads = torch.autograd.grad(output, learned, toward)
    torch.testing.assert_close(output.double(), expected, rtol=close, atol=close)
    for mine, wanted in zip(grads, torch.autograd.grad(expected, also, toward.double()), strict=True):
        torch.testing.assert_close(mine.double(), wanted, rtol=10 * close, atol=10 * close * float(wanted.abs().max()))
    assert output.dtype == tensors[2].dtype and not logsumexp.requires_grad


@every_level
@pytest.mark.parametrize("name", MASKS)
def test_masks(level, name):
    given, mask = MASKS[name]
    with at_level(level):
        assert_same(given, rg.Attention(rg.Dot(0.3), mask=mask), drawn())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype):
    given, mask = MASKS["causal padding"]
    assert_same(given, rg.Attention(rg.Dot(0.3), mask=mask), drawn(dtype=dtype), close=2e-2)


def test_soft_cap_and_learned_sinks():
    attention = rg.Attention(
        rg.Dot(0.3), bias=[rg.biases.Softcap(1.5)], mask=rg.causal(), normalizer=rg.normalizers.LearnedSink(4)
    )
    attention.normalizer.sink.data.normal_()
    sink = attention.normalizer.sink.detach().clone().requires_grad_()
    assert_same({"cap": 1.5, "is_causal": True}, attention, drawn(), sink)


@pytest.mark.parametrize("offset", [None, torch.tensor(3)], ids=["number", "tensor"])
def test_positions_of_a_cache(offset):
    """Two queries at 7 and 8, keys from 4 on; a static cache knows the position as a tensor only."""
    given = {"is_causal": True, "window": 4, "first": 4, "start": 7 if offset is None else 4, "offset": offset}
    attention = rg.Attention(rg.Dot(0.3), mask=rg.causal() & rg.window(4))
    assert_same(given, attention, drawn(2, 6), positions=Positions(7, Spans(((4, 10),))))


def test_keys_behind_the_end_of_a_padding_mask_are_not_written_yet():
    given = {"real": REAL[:, :7], "is_causal": True}
    attention = rg.Attention(
        rg.Dot(0.3), mask=rg.causal() & rg.padding(torch.cat([REAL[:, :7], REAL[:, :2] & False], 1))
    )
    assert_same(given, attention, drawn())


def test_dropout_drops_the_weights_of_the_hash():
    tensors, rate, seed = drawn(I=40, J=40, E=8), 0.4, 1234
    value = torch.eye(40).expand(2, 2, 40, 40)[..., :40]
    given = {"dropout": rate, "seed": torch.tensor(seed), "is_causal": True}
    weights, _ = OPERATOR(*arguments([*tensors[:2], value], **given))
    exact, _ = OPERATOR(*arguments([*tensors[:2], value], is_causal=True))
    grid = rg.types.Grid.whole(Positions.aligned_to_end(40, 40), 2, 4, 40)
    expected = exact * kept(grid, rate, seed) / (1 - rate)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


CHECKED = {
    "causal": {"is_causal": True},
    "padding": {"real": REAL, "cap": 2.0},
    "groups": {"groups": GROUPS, "is_causal": True, "window": 2},
    "cache": {"offset": torch.tensor(3), "is_causal": True, "first": 1},
    "dropout": {"seed": torch.tensor(5), "dropout": 0.3},
    "sinks": {"sink": torch.arange(4.0, requires_grad=True)},
}


#: From torch 2.15 on torch's own check reads the gradient of a tensor that is no leaf (meta_utils.py).
of_opcheck = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@of_opcheck
@pytest.mark.parametrize("name", CHECKED)
def test_opcheck(name):
    """Schema, fake tensors (shapes, strides, dtypes), autograd and compiled graphs agree with the operator."""
    opcheck(OPERATOR, arguments(drawn(), **CHECKED[name]))


@of_opcheck
@pytest.mark.parametrize("shape", [{"I": 0}, {"J": 0}, {"B": 0}], ids=str)
def test_nothing_to_attend_to(shape):
    tensors = drawn(**shape)
    output, logsumexp = OPERATOR(*arguments(tensors, is_causal=True))
    assert output.shape == (*tensors[0].shape[:3], 24) and not output.any() and (logsumexp == -torch.inf).all()
    assert all(not grad.any() for grad in torch.autograd.grad(output.sum(), tensors))
    opcheck(OPERATOR, arguments(tensors, is_causal=True))


def test_gradients_of_coarse_scores_are_refused():
    query, key, value = drawn()
    output, _ = OPERATOR(*arguments([query * 1e4, key, value]))
    with pytest.raises(RegardError, match="too coarse"):
        output.sum().backward()


def test_a_second_derivative_is_refused():
    tensors = drawn()
    output, _ = OPERATOR(*arguments(tensors))
    (grad,) = torch.autograd.grad(output.square().sum(), tensors[:1], create_graph=True)
    with pytest.raises(RegardError, match="no gradient"):
        grad.sum().backward()


def test_activation_checkpointing_gives_the_same_gradients():
    tensors = drawn()

    def layer(*tensors):
        return OPERATOR(*arguments(tensors, is_causal=True))[0]

    output = layer(*tensors)
    along = torch.randn_like(output)
    found = torch.autograd.grad(checkpoint(layer, *tensors, use_reentrant=False), tensors, along)
    assert all(map(torch.equal, found, torch.autograd.grad(output, tensors, along)))


def test_without_the_library_the_error_says_why(monkeypatch):
    monkeypatch.setenv("REGARD_KERNEL", "off")
    with pytest.raises(RegardError, match=r"needs the compiled kernels.*off"):
        OPERATOR(*arguments(drawn()))
    assert not REASON
