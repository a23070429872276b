"""Users' mistakes: each is a RegardError that says what was asked, what came, the rule and the remedy."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.catalog import mechanism


def x(*shape):
    return torch.randn(*shape)


def attend(q, k, v, attention=None, **options):
    return rg.attend(attention or rg.Attention(), q, k, v, **options)


q, k = x(2, 4, 5, 8), x(2, 4, 6, 8)
floats = torch.zeros(5, 6)

MISTAKES = {
    "widths that do not match": (lambda: attend(q, x(2, 4, 6, 7), k), "width 8 and key width 7.*Project"),
    "heads that do not divide": (
        lambda: attend(q, x(2, 3, 6, 8), x(2, 3, 6, 8)),
        "4 query heads cannot share 3.*axis 1",
    ),
    "batches that differ": (lambda: attend(q, x(1, 4, 6, 8), x(1, 4, 6, 8)), "batch sizes differ"),
    "values without keys": (lambda: attend(q, k, x(2, 4, 5, 8)), "one value to each key"),
    "three axes": (lambda: attend(q[0], k, k), r"4 axes.*unsqueeze\(0\)"),
    "no tensor": (lambda: attend([1.0], k, k), "torch.Tensor, got list"),
    "an empty sequence": (lambda: attend(q, k[:, :, :0], k[:, :, :0]), "key is empty.*at least one"),
    "integers": (lambda: attend(q.long(), k, k), "floating point, got torch.int64"),
    "two dtypes": (lambda: attend(q, k.double(), k.double()), "share one dtype"),
    "NaN": (
        lambda: attend(q.index_fill(2, torch.tensor(3), torch.nan), k, k, check=True),
        r"query holds 64.*\[0, 0, 3, 0\]",
    ),
    "infinite values": (lambda: attend(q, k, k / 0, check=True), "value holds"),
    "an additive mask": (lambda: rg.given(floats), "boolean tensor with True = may attend.*mask == 0"),
    "an integer mask": (lambda: rg.given(floats.long()), r"mask\.bool\(\)"),
    "a mask without its heads": (lambda: rg.given(torch.ones(2, 5, 6, dtype=torch.bool)), r"mask\[:, None\]"),
    "a mask of keys as a mask of pairs": (
        lambda: attend(q, k, k, rg.Attention(mask=rg.given(torch.ones(2, 6, dtype=torch.bool)))),
        r"looks like \(batch, keys\).*padding",
    ),
    "a mask that would broadcast": (
        lambda: attend(q, k, k, rg.Attention(mask=rg.given(torch.ones(1, 6, dtype=torch.bool)))),
        "never broadcasts",
    ),
    "a mask of another batch": (
        lambda: attend(q, k, k, rg.Attention(mask=rg.given(torch.ones(3, 1, 5, 6, dtype=torch.bool)))),
        "made for a batch of 3",
    ),
    "a mask of other heads": (
        lambda: attend(q, k, k, rg.Attention(mask=rg.given(torch.ones(2, 3, 5, 6, dtype=torch.bool)))),
        "3 heads on axis 1, the query 4",
    ),
    "padding of another batch": (lambda: attend(q, k, k, rg.Attention(mask=rg.padding([3]))), "made for a batch of 1"),
    "padding that is too short": (
        lambda: attend(q, k, k, rg.Attention(mask=rg.padding(torch.ones(2, 4, dtype=torch.bool)))),
        "covers keys 0 to 3",
    ),
    "padding as floats": (lambda: rg.padding(torch.ones(2, 4)), r"attention_mask.*mask\.bool\(\)"),
    "a tensor in the mask slot": (lambda: rg.Attention(mask=torch.ones(5, 6).bool()), r"regard\.given\(tensor\)"),
    "a tensor composed with a mask": (lambda: rg.causal() & torch.ones(5, 6).bool(), r"regard\.given\(tensor\)"),
    "a class in a slot": (lambda: rg.Attention(rg.Dot), r"got the class Dot. Did you mean Dot\(\.\.\.\)"),
    "a predicate of numbers": (
        lambda: attend(q, k, k, rg.Attention(mask=rg.where(lambda b, h, i, j: i - j))),
        "boolean tensor, got torch.int64",
    ),
    "a bias of other heads": (
        lambda: attend(q, k, k, rg.Attention(bias=rg.ALiBi(8))),
        "made for 8 heads, the query has 4",
    ),
    "a sink of other heads": (lambda: attend(q, k, k, rg.Attention(normalizer=rg.LearnedSink(2))), "made for 2 heads"),
    "an additive score of other widths": (
        lambda: attend(q, k, k, rg.Attention(rg.Additive(3, 8, 4))),
        r"Create it as Additive\(8, 8",
    ),
    "temperature zero": (lambda: rg.Softmax(temperature=0.0), r"Hardmax\(\)"),
    "no key kept": (lambda: rg.TopK(0), "at least one key"),
    "a window of nothing": (lambda: rg.window(0), "at least 1"),
    "an odd rotation": (lambda: rg.RoPE(7), "even"),
    "a position beyond the table": (
        lambda: attend(q, k, k, rg.Attention(position=rg.LearnedPositions(4, 8))),
        "knows positions 0 to 3.*longer table",
    ),
    "positions of other keys": (
        lambda: attend(q, k, k, positions=rg.Positions.aligned_to_end(5, 9)),
        "6 keys were given but positions name 9",
    ),
    "dropout of everything": (lambda: rg.Attention(dropout=1.0), r"\[0, 1\)"),
    "no attention": (lambda: rg.attend(None, q, k, k), "regard.Attention, got NoneType"),
    "an unknown engine": (lambda: attend(q, k, k, engine="flesh"), "no engine 'flesh'.*Known names"),
    "an engine that cannot": (
        lambda: attend(q, k, k, rg.Attention(normalizer=rg.Sparsemax()), engine="fused"),
        "no softmax of scaled dot products.*Engines that can: reference, dense, blocked",
    ),
    "an unknown mechanism": (lambda: mechanism("longfromer"), "Did you mean 'longformer'"),
    "a choice of keys that is not there": (lambda: attend(q, k, k).weights.mass([6]), "indices from 0 to 5"),
    "too many random blocks": (lambda: rg.random_blocks(4, 9, 16), "count must lie between 1 and 4"),
    "an empty document": (lambda: rg.documents([3, 0]), "at least one token"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_remedy(mistake):
    make, message = MISTAKES[mistake]
    with pytest.raises(rg.RegardError, match=f"(?s){message}") as raised:
        make()
    assert isinstance(raised.value, ValueError)


def test_a_good_mask_is_not_refused():
    for shape in ((5, 6), (1, 1, 5, 6), (2, 1, 5, 6), (1, 4, 5, 6), (2, 4, 5, 6)):
        attend(q, k, k, rg.Attention(mask=rg.given(torch.ones(shape, dtype=torch.bool))))
