"""Users' mistakes: each is a RegardError that names the operation, the inputs received, the rule and the remedy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import regard as rg
from regard.catalog import mechanism
from regard.viewer import write_page


def x(*shape):
    return torch.randn(*shape)


def attend(q, k, v, attention=None, **options):
    return rg.attend(q, k, v, attention=attention, **options)


q, k = x(2, 4, 5, 8), x(2, 4, 6, 8)
floats = torch.zeros(5, 6)
large = attend(*(torch.zeros(1, 2, 16384, 1),) * 3, rg.Attention(mask=rg.window(1)))

MISTAKES = {
    "widths that do not match": (lambda: attend(q, x(2, 4, 6, 7), k), "width 8 and key width 7.*Project"),
    "heads that do not divide": (
        lambda: attend(q, x(2, 3, 6, 8), x(2, 3, 6, 8)),
        "4 query heads cannot share 3.*axis 1",
    ),
    "batches that differ": (lambda: attend(q, x(1, 4, 6, 8), x(1, 4, 6, 8)), "batch sizes differ"),
    "values without keys": (lambda: attend(q, k, x(2, 4, 5, 8)), "one value for each key"),
    "three axes": (lambda: attend(q[0], k, k), r"4 axes.*unsqueeze\(0\)"),
    "no tensor": (lambda: attend([1.0], k, k), "array of numbers, got list"),
    "no key heads": (lambda: attend(q, k[:, :0], k[:, :0]), "key has shape.*heads and width are at least 1"),
    "no channels": (lambda: attend(q[..., :0], k[..., :0], k), "query has shape.*heads and width are at least 1"),
    "integers": (lambda: attend(q.long(), k, k), "floating point, got torch.int64"),
    "two dtypes": (lambda: attend(q, k.double(), k.double()), "share one dtype"),
    "NaN": (
        lambda: attend(q.index_fill(2, torch.tensor(3), torch.nan), k, k, check=True),
        r"query holds 64.*\[0, 0, 3, 0\]",
    ),
    "infinite values": (lambda: attend(q, k, k / 0, check=True), "value holds"),
    "an additive mask": (lambda: rg.mask_tensor(floats), "boolean tensor with True = may attend.*mask == 0"),
    "an integer mask": (lambda: rg.mask_tensor(floats.long()), r"mask\.bool\(\)"),
    "a mask without its heads": (lambda: rg.mask_tensor(torch.ones(2, 5, 6, dtype=torch.bool)), r"mask\[:, None\]"),
    "a mask of keys as a mask of pairs": (
        lambda: attend(q, k, k, rg.Attention(mask=rg.mask_tensor(torch.ones(2, 6, dtype=torch.bool)))),
        r"looks like \(batch, keys\).*padding",
    ),
    "a mask that would broadcast": (
        lambda: attend(q, k, k, rg.Attention(mask=rg.mask_tensor(torch.ones(1, 6, dtype=torch.bool)))),
        "never broadcasts",
    ),
    "a mask of another batch": (
        lambda: attend(q, k, k, rg.Attention(mask=rg.mask_tensor(torch.ones(3, 1, 5, 6, dtype=torch.bool)))),
        "made for a batch of 3",
    ),
    "a mask of other heads": (
        lambda: attend(q, k, k, rg.Attention(mask=rg.mask_tensor(torch.ones(2, 3, 5, 6, dtype=torch.bool)))),
        "3 heads on axis 1, the query has 4",
    ),
    "padding of another batch": (lambda: attend(q, k, k, rg.Attention(mask=rg.padding([3]))), "made for a batch of 1"),
    "padding that is too short": (
        lambda: attend(q, k, k, rg.Attention(mask=rg.padding(torch.ones(2, 4, dtype=torch.bool)))),
        "covers keys 0 to 3",
    ),
    "padding as floats": (lambda: rg.padding(torch.ones(2, 4)), r"1 = real: regard\.padding\(mask\.bool\(\)\)"),
    "a tensor in the mask slot": (lambda: rg.Attention(mask=torch.ones(5, 6).bool()), r"regard\.mask_tensor\(mask\)"),
    "a tensor composed with a mask": (lambda: rg.causal() & torch.ones(5, 6).bool(), r"regard\.mask_tensor\(mask\)"),
    "a class in a slot": (lambda: rg.Attention(rg.Dot), r"got the class Dot. Did you mean Dot\(\.\.\.\)"),
    "a predicate of numbers": (
        lambda: attend(q, k, k, rg.Attention(mask=rg.mask_mod(lambda b, h, i, j: i - j))),
        "boolean tensor, got torch.int64",
    ),
    "a bias of other heads": (
        lambda: attend(q, k, k, rg.Attention(bias=rg.ALiBi(8))),
        "made for 8 heads, the query has 4",
    ),
    "a sink of other heads": (
        lambda: attend(q, k, k, rg.Attention(normalizer=rg.normalizers.LearnedSink(2))),
        "made for 2 heads",
    ),
    "an additive score of other widths": (
        lambda: attend(q, k, k, rg.Attention(rg.scores.Additive(3, 8, 4))),
        r"Create it as Additive\(8, 8",
    ),
    "temperature zero": (lambda: rg.normalizers.Softmax(temperature=0.0), r"Hardmax\(\)"),
    "no key kept": (lambda: rg.normalizers.TopK(0), "at least 1"),
    "a window of nothing": (lambda: rg.window(0), "at least 1"),
    "an odd rotation": (lambda: rg.RoPE(7), "even"),
    "a position beyond the table": (
        lambda: attend(q, k, k, rg.Attention(position=rg.encodings.LearnedPositions(4, 8))),
        "has positions 0 to 3.*longer table",
    ),
    "positions of other keys": (
        lambda: attend(q, k, k, positions=rg.types.Positions.aligned_to_end(5, 9)),
        "6 keys were given, but positions has 9",
    ),
    "dropout of everything": (lambda: rg.Attention(dropout=1.0), r"\[0, 1\)"),
    "no attention": (lambda: rg.attend(q, k, k, attention=3), "regard.Attention, got int"),
    "an unknown engine": (lambda: attend(q, k, k, engine="flesh"), "no engine 'flesh'.*Known names"),
    "an engine that cannot": (
        lambda: attend(q, k, k, rg.Attention(normalizer=rg.normalizers.Sparsemax()), engine="fused"),
        "no softmax of scaled dot products.*Engines that can: reference, dense, blocked",
    ),
    "an unknown parameter of a mechanism": (
        lambda: mechanism("longformer").build(sizes=3),
        r"longformer: got an unexpected keyword argument 'sizes'.*longformer\(size: int = 257",
    ),
    "a mask with a row too few": (
        lambda: attend(q, q, q, rg.Attention(mask=rg.mask_tensor(floats[:4, :5] == 0))),
        "the mask is for 4 queries and 5 keys, this call has 5 queries and 5 keys",
    ),
    "an unknown mechanism": (lambda: mechanism("longfromer"), "Did you mean 'longformer'"),
    "a choice of keys that is not there": (lambda: attend(q, k, k).weights.mass([6]), "indices from -6 to 5"),
    "too many random blocks": (lambda: rg.masks.random_blocks(4, 9, 16), "count must be between 1 and 4"),
    "random blocks of nothing": (lambda: rg.masks.random_blocks(0, 1, 8), r"random_blocks\(size=0\).*at least 1"),
    "random blocks of an empty sequence": (lambda: rg.masks.random_blocks(4, 1, 0), r"length=0.*at least 1"),
    "half a block": (lambda: rg.masks.bigbird(64, window_blocks=-1), "window_blocks must be an integer of at least 0"),
    "positions from the end": (
        lambda: rg.masks.global_tokens([-1]),
        r"global_tokens\(\[-1\]\).*at least 0.*length - 1",
    ),
    "one position from the end": (lambda: rg.masks.global_tokens([3, -1]), r"\[3, -1\].*at least 0"),
    "positions between two": (lambda: rg.masks.global_tokens([1.5]), "integers"),
    "lengths below 0": (lambda: attend(q, k, k, rg.Attention(mask=rg.padding([3, -1]))), "at least 0, got -1"),
    "lengths of no number": (lambda: rg.padding([[1], [2, 3]]), r"real\[0\] must be an integer, got \[1\]"),
    "documents of half a token": (lambda: rg.documents([2.5, 1.5]), "integers"),
    "no bucket beyond the exact": (
        lambda: rg.biases.T5Bias(2, num_buckets=2),
        "num_buckets is at least 4, 2 for each direction",
    ),
    "a distance within the exact buckets": (lambda: rg.biases.T5Bias(2, 32, 8), "max_distance is above 8"),
    "a reach below 0": (lambda: rg.biases.LearnedTable(2, -1), "reach must be an integer of at least 0"),
    "a Shaw reach below 0": (lambda: rg.biases.ShawBias(8, -1), "reach must be an integer of at least 0"),
    "no heads": (lambda: rg.ALiBi(0), "num_heads must be an integer of at least 1"),
    "a number of positions": (lambda: attend(q, k, k, positions=3), r"positions=3.*got int.*Positions\.of\(3"),
    "positions of a number": (lambda: rg.types.Positions(0, 5), r"regard\.types\.Spans\.of\(\(0, 5\)\)"),
    "a start between two": (lambda: rg.types.Positions.of(1.5, 2, 3), "start must be an integer"),
    "a predicate of two": (lambda: rg.mask_mod(lambda i, j: j <= i), r"takes \(i, j\).*called with.*\(b, h, i, j\)"),
    "a predicate that is none": (lambda: rg.mask_mod(torch.ones(2, 2)), "got Tensor|expected a function"),
    "a mask in another slot": (lambda: rg.Attention(rg.causal()), r"score=\.\.\..*expected a Score, got causal"),
    "a mask as a bias": (lambda: rg.Attention(bias=rg.causal()), r"bias=\.\.\..*expected a Bias, got causal"),
    "a mask for an attention": (
        lambda: rg.attend(q, k, k, attention=rg.causal()),
        r"regard\.Attention\(mask=causal\(\)\)",
    ),
    "a score for an attention": (lambda: attend(q, k, k, rg.Dot()), r"regard\.Attention\(Dot\(\)\)"),
    "a name for an attention": (lambda: attend(q, k, k, "alibi"), r"regard\.mechanism\('alibi'\)\.build"),
    "a mechanism for an attention": (lambda: attend(q, k, k, mechanism("alibi")), r"mechanism\.build\(\.\.\.\)"),
    "a mask in a module": (
        lambda: rg.nn.MultiHeadAttention(8, 2, attention=rg.causal()),
        r"Attention\(mask=causal\(\)\)",
    ),
    "a name in a module": (
        lambda: rg.nn.MultiHeadAttention(8, 2, attention="alibi"),
        r"regard\.mechanism\('alibi'\)\.build",
    ),
    "a mechanism in a module": (
        lambda: rg.nn.MultiHeadAttention(8, 2, attention=mechanism("alibi")),
        r"mechanism\.build",
    ),
    "torch's mask": (
        lambda: attend(q, k, k, attn_mask=floats),
        "attn_mask: it is called mask",
    ),
    "a piece in place of the mechanism": (
        lambda: attend(q, k, k, bias=rg.ALiBi(4)),
        r"bias: it is a piece of the mechanism: attention=regard\.Attention\(bias=\.\.\.\)",
    ),
    "flash-attn's causal flag": (lambda: attend(q, k, k, causal=True), "it is called is_causal"),
    "another width": (lambda: rg.nn.MultiHeadAttention(d_model=8, num_heads=2), "d_model: it is called embed_dim"),
    "torch's layout": (lambda: rg.nn.MultiHeadAttention(8, 2, batch_first=True), "batch_first: inputs are always"),
    "torch's causal flag of a layer": (
        lambda: rg.nn.MultiHeadAttention(8, 2, attention=rg.Attention(), is_causal=True),
        r"mask=regard\.causal\(\)",
    ),
    "torch's mask of a module's call": (
        lambda: rg.nn.MultiHeadAttention(8, 2)(x(1, 3, 8), attn_mask=floats),
        "attn_mask: it is called mask",
    ),
    "causality of the container": (
        lambda: rg.Attention(causal=True),
        r"causal: .*Attention\(mask=regard\.causal\(\)\)",
    ),
    "another name of the base": (lambda: rg.RoPE(64, theta=1e4), "theta: it is called base"),
    "a word that is nearly right": (lambda: attend(q, k, k, engin="dense"), "Did you mean 'engine'"),
    "an argument that is missing": (lambda: rg.attend(q, k), "missing a required argument: 'value'"),
    "a page of what was seen": (lambda: write_page(attend(q, k, k)), "write_page"),
    "a page of maps": (lambda: write_page("a.html", [attend(q, k, k)]), r"TextReading"),
    "a page of one map": (lambda: write_page("a.html", attend(q, k, k).weights), "TextReading"),
    "an array without a copy": (
        lambda: np.array(attend(q, k, k).weights, copy=False),
        "each call computes a new array",
    ),
    "an array that is too large": (lambda: np.asarray(large.weights), "takes 2,048 MiB, the budget is 1,024 MiB"),
    "an empty document": (lambda: rg.documents([3, 0]), "at least one token"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_remedy(mistake):
    make, message = MISTAKES[mistake]
    with pytest.raises(rg.RegardError, match=f"(?s){message}") as raised:
        make()
    assert isinstance(raised.value, ValueError)


def test_a_good_mask_is_not_refused():
    expected = attend(q, k, k, rg.Attention()).output
    for shape in ((5, 6), (1, 1, 5, 6), (2, 1, 5, 6), (1, 4, 5, 6), (2, 4, 5, 6)):
        masked = attend(q, k, k, rg.Attention(mask=rg.mask_tensor(torch.ones(shape, dtype=torch.bool))))
        torch.testing.assert_close(masked.output, expected)


def test_integers_of_numpy_and_of_tensors_are_integers():
    for kind in (np.int64, np.uint8, torch.tensor):
        assert rg.window(kind(3)) == rg.window(3) and type(rg.window(kind(3)).size) is int
        assert rg.masks.random_blocks(kind(4), kind(1), kind(8)) == rg.masks.random_blocks(4, 1, 8)
        assert rg.types.Positions(kind(2), rg.types.Spans.of((0, 3))) == rg.types.Positions.of(2, 1, 3)
        assert (
            rg.normalizers.TopK(kind(2)) == rg.normalizers.TopK(2)
            and rg.maps.TopLinks(kind(2)) == rg.maps.TopLinks(2)
            and rg.ALiBi(kind(2)) == rg.ALiBi(2)
        )
    for kind in (np.array, torch.tensor, tuple, list):
        assert rg.documents(kind([3, 1])) == rg.documents([3, 1])
        assert rg.masks.global_tokens(kind([3, 1])) == rg.masks.global_tokens([1, 3])
    real = rg.padding(np.array([3, 1], dtype=np.int16))
    assert real.allowed(rg.types.Grid.whole(rg.types.Positions.of(0, 1, 4), 2, 1, 1))[:, 0, 0].sum(-1).tolist() == [
        3,
        1,
    ]
    for wrong in (True, 3.0, "3", None):
        with pytest.raises(rg.RegardError, match="integer"):
            rg.window(wrong)


def test_a_map_is_an_array_of_its_weights():
    weights = attend(q, k, k).weights
    for array in (np.asarray(weights), np.array(weights), np.asarray(weights, dtype=np.float64)):
        np.testing.assert_allclose(array, weights.dense().numpy(), rtol=1e-6)
    assert np.asarray(weights, dtype=np.float64).dtype == np.float64
    assert np.asarray(attend(q.bfloat16(), k.bfloat16(), k.bfloat16()).weights).dtype == np.float32


@pytest.mark.parametrize(
    ("mask", "is_causal"),
    [
        (rg.causal(), True),
        (rg.causal() & rg.mask_mod(lambda b, h, i, j: j > 0), True),
        (rg.window(1), True),
        (~(~rg.causal() | ~rg.window(3)), True),
        (rg.causal() | (rg.causal() & rg.window(3)), True),
        (rg.causal() | rg.masks.prefix(2), False),
        (~rg.causal(), False),
        (rg.window(2), False),
        (None, False),
    ],
    ids=["causal", "and", "own key", "de Morgan", "or", "prefix", "not", "window", "none"],
)
def test_a_module_is_causal_if_no_query_sees_a_later_key(mask, is_causal):
    assert rg.nn.MultiHeadAttention(8, 2, attention=rg.Attention(mask=mask)).is_causal is is_causal


def test_a_learned_table_has_no_positions_before_the_first():
    attention = rg.Attention(position=rg.encodings.LearnedPositions(8, 4))
    with pytest.raises(rg.RegardError, match="has positions 0 to 7, this call needs -1 to 1"):
        attention(x(1, 1, 3, 4), x(1, 1, 2, 4), x(1, 1, 2, 4))
    for positions in ([2, -1, 3], [0, 8, 1]):  # in any order
        with pytest.raises(rg.RegardError, match="has positions 0 to 7"):
            attention.position.encode(x(1, 1, 3, 4), torch.tensor(positions))


@pytest.mark.parametrize("piece", [rg.RoPE(4), rg.encodings.Sinusoidal()], ids=repr)
def test_positions_are_whole_numbers(piece):
    with pytest.raises(rg.RegardError, match=r"must be integers, got torch.float32.*LinearScaling\(2"):
        piece.encode(x(1, 1, 2, 4), torch.tensor([0.5, 1.5]))


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: rg.plan(q, k, k, attention="masked"),
        lambda: rg.plan(q, k, k, attention="masked", engine="ring"),
        lambda: rg.plan(q[0], k, k, attention=rg.Attention()),
        lambda: rg.plan(q, k, k, attention=rg.Attention(), engine="desne"),
    ],
)
def test_errors_of_plan_name_plan(mistake):
    with pytest.raises(rg.RegardError, match=r"^plan\b"):
        mistake()
