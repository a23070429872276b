"""Weights and reductions have gradients: those of dense float64 autograd, in O(n) memory."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import regard as rg
from exact_reductions import some_reductions
from extras import needs_transformers
from regard.catalog import mechanisms
from regard.edits.layer_edits import EditedMap, LayerEdit, LayerEdits, Pairs
from regard.maps import attention_map, transported_map
from regard.maps import gradients as gradients_of_maps
from regard.maps.axis_reductions import Extreme, Product, Sum
from regard.maps.changed_map import HeadMean, PositiveMap, ValueWeightedMap
from regard.maps.joined import joined
from regard.maps.reductions import Pyramid
from regard.maps.stored import save_map
from regard.stats import Agreement, Offsets
from regard.stats.statistics import Allowed

every_mechanism = pytest.mark.parametrize("name", sorted(mechanisms()))
EXACT, ROUNDED = {"rtol": 1e-8, "atol": 1e-10}, {"rtol": 2e-4, "atol": 2e-6}


def drawn_call(name, **sizes):
    """A mechanism, its inputs and tensors of the call with gradients, and everything that has one."""
    entry = mechanisms()[name]
    attention, *inputs = entry.example(**sizes)
    tensors = {
        label: t.detach().clone().requires_grad_(t.is_floating_point())
        for label, t in entry.tensors(attention, *inputs).items()
    }
    q, k, v = (t.detach().clone().requires_grad_() for t in inputs)
    learned = [q, k, *(t for t in tensors.values() if t.requires_grad), *attention.parameters()]
    return attention, (q, k, v), tensors, learned


def dense_weights(attention, inputs, tensors):
    """The weights by torch's own autograd: the output for unit vectors as values. No map is involved."""
    q, k, _ = inputs
    units = torch.eye(k.shape[2], dtype=q.dtype).expand(*k.shape[:2], -1, -1)
    is_recurrent = isinstance(attention, rg.Attention) and attention.transition is not None
    return attention(q, k, units, engine="recurrent" if is_recurrent else "dense", **tensors).output


def live_map(attention, inputs, tensors):
    return attention(*inputs, **tensors)


def gradients(loss, learned):
    found = torch.autograd.grad(loss, learned, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(learned, found, strict=True)]


def times_noise(x):
    """A drawn linear function."""
    torch.manual_seed(x.numel())
    return (x * torch.randn(x.shape, dtype=torch.float64)).sum()


def entropy_of(weights):
    shares = weights.abs() / weights.abs().sum(-1, keepdim=True).clamp_min(1e-30)
    return -(shares * shares.clamp_min(1e-30).log()).sum(-1)


@pytest.fixture
def small_ranges(monkeypatch):
    """Tiles and ranges of a few queries, so that tiny maps have several."""
    for module in (attention_map, transported_map):
        monkeypatch.setattr(module, "TILE", (6, 4))
    monkeypatch.setattr(attention_map, "GAP", 1)


@pytest.mark.usefixtures("small_ranges")
@every_mechanism
def test_gradients_of_weights_and_reductions_are_those_of_dense_weights(name):
    """Of tiles with strides and repeated keys, of all kinds of reductions, and of the output in the same loss."""
    attention, inputs, tensors, learned = drawn_call(name, batch=1)
    seen, dense = live_map(attention, inputs, tensors), dense_weights(attention, inputs, tensors)
    weights = seen.weights
    loss = times_noise(weights.dense().square()) + times_noise(weights[:, -1:, 1::3, [2, 0, 2]])
    expected = times_noise(dense.square()) + times_noise(dense[:, -1:, 1::3][..., [2, 0, 2]])
    loss, expected = (x + seen.output.square().sum() for x in (loss, expected))
    for found, exact in zip(gradients(loss, learned), gradients(expected, learned), strict=True):
        torch.testing.assert_close(found, exact, **EXACT)

    shape = dense.shape
    target = torch.rand(shape[2:]).softmax(-1)
    received, top, mass, cells, offsets = weights.summarize(
        rg.maps.KeyTotals(), rg.maps.TopLinks(2), rg.maps.MassOn([0, 2]), rg.maps.Pool(3, 2), Offsets(-2, 1)
    )
    entropy, divergence = weights.shares().summarize(rg.maps.Entropy(), rg.maps.Divergence(to=target))
    shares = dense.abs() / dense.abs().sum(-1, keepdim=True).clamp_min(1e-300)
    i, j = torch.meshgrid(weights.grid.query, weights.grid.key, indexing="ij")
    cell_of = [torch.arange(n) * c // n for n, c in zip(shape[2:], (min(3, shape[2]), min(2, shape[3])), strict=True)]
    members = [torch.nn.functional.one_hot(x).double() for x in cell_of]
    dense_cells = (members[0] / members[0].sum(0)).T @ dense @ members[1]
    is_live = (shares > 2.0**-100) & (target > 0)
    dense_divergence = -(target * shares.where(is_live, 1.0).log()).sum(-1)
    pairs = [
        (received, dense.sum(2)),
        (top.weights, dense.topk(2).values.clamp_min(0)),
        (mass, dense[..., 0] + dense[..., 2]),
        (cells, dense_cells),
        (offsets, torch.stack([(dense * (j - i == by)).sum((-2, -1)) for by in range(-2, 2)], -1)),
        (entropy, entropy_of(dense)),
        (divergence, dense_divergence),
    ]
    assert not top.keys.requires_grad
    loss = sum(times_noise(found) for found, _ in pairs)
    expected = sum(times_noise(exact) for _, exact in pairs)
    for found, exact in zip(gradients(loss, learned), gradients(expected, learned), strict=True):
        torch.testing.assert_close(found, exact, **ROUNDED)


@every_mechanism
def test_a_map_is_in_the_graph_if_one_of_its_tensors_is_and_gradients_are_recorded(name):
    attention, inputs, tensors, learned = drawn_call(name, batch=1)
    for alone in learned:
        for tensor in (*learned, inputs[2]):
            tensor.requires_grad_(tensor is alone)
        is_in_graph = dense_weights(attention, inputs, tensors).requires_grad
        assert live_map(attention, inputs, tensors).weights.requires_grad is is_in_graph
        with torch.no_grad():
            assert not live_map(attention, inputs, tensors).weights.requires_grad
    alone.requires_grad_(False)
    assert not live_map(attention, inputs, tensors).weights.requires_grad


def of_keys(k):
    return rg.Attention()(torch.ones(1, 2, 5, 4), k, k).weights


#: Maps that are made of others and of tensors, with the shapes of the tensors.
MADE = {
    "sum": (lambda k, l, c, d: rg.maps.SumMap([of_keys(k), of_keys(l)], [c, d]), (5, 4), (5, 4), (5, 1), (5, 1)),
    "product": (lambda k, l: rg.maps.ProductMap([of_keys(k), of_keys(l)]), (5, 4), (5, 4)),
    "joined": (lambda k, l: joined([of_keys(k), of_keys(torch.cat((k, l), 2))]), (5, 4), (5, 4)),
    "gradient": (lambda k, g, v: rg.maps.GradientMap(of_keys(k), g, v), (5, 4), (5, 3), (5, 3)),
    "value weighted": (lambda k, norms: rg.maps.ValueWeightedMap(of_keys(k), norms), (5, 4), (5,)),
    "shares": (lambda k, g, v: rg.maps.GradientMap(of_keys(k), g, v).shares(), (5, 4), (5, 3), (5, 3)),
}


@pytest.mark.parametrize("name", MADE)
def test_a_map_that_is_made_of_others_is_in_the_graph_if_one_of_its_tensors_is(name):
    make, *shapes = MADE[name]
    for which in range(len(shapes)):
        tensors = [torch.rand(1, 2, *shape).requires_grad_(n == which) for n, shape in enumerate(shapes)]
        assert make(*tensors).requires_grad
        with torch.no_grad():
            assert not make(*tensors).requires_grad
    assert not make(*(tensor.detach() for tensor in tensors)).requires_grad


def strongest(weights):
    return weights.amax((-2, -1))


class Strongest(rg.maps.Reduction):
    """A maximum: states do not add up."""

    def init(self, shape, device):
        return [torch.zeros(shape[:2], device=device)]

    def add(self, state, tile):
        state[0].copy_(state[0].maximum(tile.weights.amax((-2, -1))))

    def merge(self, state, other):
        return [state[0].maximum(other[0])]


class Above(rg.maps.Reduction):
    """A count: no derivative."""

    def init(self, shape, device):
        return [torch.zeros(shape[:2], device=device)]

    def add(self, state, tile):
        state[0] += (tile.weights > 0.2).sum((-2, -1))


def simple_map(**options):
    q, k, v = (torch.randn(2, heads, 9, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    attention = rg.Attention(mask=rg.causal() & rg.window(5), **options)
    return (q, k), live_map(attention, (q, k, v), {}).weights, dense_weights(attention, (q, k, v), {})


@pytest.mark.usefixtures("small_ranges")
def test_reductions_of_maxima_and_of_pairs_of_heads_have_gradients():
    (q, k), weights, dense = simple_map()
    flat = dense.flatten(2)
    unit = flat / flat.norm(dim=-1, keepdim=True)
    centered = (dense - dense.mean(2, keepdim=True)).flatten(2)
    agreeing = centered / centered.norm(dim=-1, keepdim=True)
    padded = torch.nn.functional.pad(dense, (0, 1, 0, 1)).unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2))
    pairs = [
        (weights.summarize(Strongest())[0], strongest(dense)),
        (weights.summarize(Pyramid(1))[0][1], padded.amax((-3, -1))),
        (weights.similarity(), unit @ unit.mT),
        (weights.summarize(Agreement())[0], agreeing @ agreeing.mT),
        (HeadMean(weights)[0, 0, 4], dense[0].mean(0)[4]),
    ]
    for found, exact in pairs:
        for grad, expected in zip(
            gradients(times_noise(found), (q, k)), gradients(times_noise(exact), (q, k)), strict=True
        ):
            torch.testing.assert_close(grad, expected, rtol=2e-4, atol=2e-5)


def test_reductions_without_a_derivative_say_so():
    _, weights, _ = simple_map()
    (above,) = weights.summarize(Above())
    with pytest.raises(rg.RegardError, match=r"Above has no gradient.*comparisons, counts"):
        above.sum().backward()


@pytest.mark.parametrize(
    "normalizer",
    [
        rg.normalizers.Softmax(),
        rg.normalizers.Softmax(2.0, sink=0.5),
        rg.normalizers.Sparsemax(),
        rg.normalizers.Entmax15(),
    ],
)
def test_second_derivatives_are_exact(normalizer):
    attention = rg.Attention(mask=rg.causal(), normalizer=normalizer)

    def weights(q, k):
        return live_map(attention, (q, k, k), {}).weights[..., 1:, :]

    inputs = [torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert gradcheck(weights, inputs, fast_mode=True) and gradgradcheck(weights, inputs, fast_mode=True)


def test_second_derivatives_of_a_recurrence_are_refused():
    attention, inputs, tensors, (q, *_) = drawn_call("deltanet")
    (slope,) = torch.autograd.grad(
        live_map(attention, inputs, tensors).weights.dense().square().sum(), q, create_graph=True
    )
    with pytest.raises(rg.RegardError, match="no gradient"):
        slope.sum().backward()


NORMALIZERS = [
    rg.normalizers.Softmax(),
    rg.normalizers.Softmax(sink=0.0),
    rg.normalizers.LearnedSink(2),
    rg.normalizers.Sparsemax(),
    rg.normalizers.Entmax15(),
    rg.normalizers.TopK(2),
]


@pytest.mark.parametrize("normalizer", [*NORMALIZERS, rg.normalizers.Sigmoid()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_scores_and_empty_rows_give_no_nan(normalizer, dtype):
    q, k, v = (torch.randn(1, 2, 6, 4, dtype=dtype, requires_grad=True) for _ in range(3))
    real = torch.tensor([[False, True, True, True, True, False]])
    attention = rg.Attention(mask=rg.causal() & rg.padding(real), normalizer=normalizer)
    weights = live_map(attention, (q * 200, k * 200, v), {}).weights
    shares = weights if weights.has_shares else weights.shares()
    entropy, divergence, similarity = shares.summarize(
        rg.maps.Entropy(), rg.maps.Divergence(to=torch.full((6, 6), 1 / 6)), rg.maps.Similarity()
    )
    loss = entropy.sum() + divergence.sum() + similarity.sum() + weights.dense().square().sum()
    loss.backward()
    assert loss.isfinite() and q.grad.isfinite().all() and k.grad.isfinite().all() and q.grad.dtype == dtype


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0), (1, 1), (1, 4)])
def test_empty_and_single_rows_have_gradients(queries, keys):
    q = torch.randn(1, 2, queries, 4, requires_grad=True)
    k = torch.randn(1, 2, keys, 4, requires_grad=True)
    weights = live_map(rg.Attention(), (q, k, k), {}).weights
    loss = weights.received().square().sum() + weights.entropy().sum() + weights.dense().sum()
    loss.backward()
    assert q.grad is not None and q.grad.shape == q.shape and k.grad.isfinite().all()


class Largest(TorchDispatchMode):
    """The numbers in the largest tensor that any operation returns."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("transition", [None, rg.transitions.Decay(-0.05)], ids=["softmax", "retention"])
def test_memory_is_linear_in_the_length(transition, monkeypatch):
    """No tensor of n x n numbers is made, forward or backward, and what is kept between both is O(n)."""
    for module in (attention_map, transported_map):
        monkeypatch.setattr(module, "TILE", (32, 64))
        monkeypatch.setattr(module, "WORKSPACE", 1 << 19)
    n, kept = 300, []
    q, k, v = (torch.randn(1, 2, n, 8, requires_grad=True) for _ in range(3))
    attention = rg.Attention(mask=rg.causal()) if transition is None else rg.Attention(transition=transition)

    def keep(x):
        kept.append(x.numel())
        return x

    weights = live_map(attention, (q, k, v), {}).weights
    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        shares = weights.shares() if transition else weights
        target = weights.select(0, [0])
        loss = shares.entropy().sum() + weights.received().square().sum() + weights[0, 0, ::40].square().sum()
        if transition is None:
            loss = loss + weights.summarize(rg.maps.Divergence(to=target))[0].sum()
        assert max(kept) <= n * 16 and sum(kept) < n * 200
        loss.backward()
    assert largest.numbers < n * n / 2 and q.grad.abs().sum() > 0


def test_maps_made_in_grad_mode_of_tensors_that_require_grad_do_too():
    q, k, v = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
    live = rg.Attention()(q, k, v).weights
    with torch.no_grad():
        teacher = rg.Attention()(q, k, v).weights
    constant = rg.Attention()(q.detach(), k.detach(), v).weights
    assert live.requires_grad and live.with_gradients() is live
    copies = pickle.loads(pickle.dumps(live)), copy.deepcopy(live), live.detach(), live.shares().detach().source
    for weights in (teacher, constant, *copies):
        assert not weights.requires_grad and not weights.dense().requires_grad and weights.detach() is weights
        assert not weights.entropy().requires_grad and torch.equal(weights.dense(), live.dense())
        with pytest.raises(rg.RegardError, match=r"does not require grad.*watch\(model, grad=True\)"):
            weights.with_gradients()
    with torch.no_grad():
        assert not live.entropy().requires_grad and not live[0, 0, 1].requires_grad
    assert live.select(0, [1]).requires_grad and live.shares().requires_grad


@pytest.mark.parametrize("learned", [0, 1, None])
def test_a_map_of_two_parts_requires_grad_if_one_of_them_does(learned):
    tensors = torch.randn(2, 1, 2, 4, 4).unbind()
    if learned is not None:
        tensors[learned].requires_grad_()
    parts = [rg.Attention(mask=rg.causal())(x, x, x).weights for x in tensors]
    norms = tensors[1].norm(dim=-1)
    made = rg.maps.SumMap(parts, [1.0, 2.0]), rg.maps.ProductMap(parts), ValueWeightedMap(parts[0], norms)
    for weights in made:
        assert weights.requires_grad == weights.dense().requires_grad == (learned is not None)
        assert not weights.detach().requires_grad
    with torch.no_grad():
        assert not ValueWeightedMap(parts[0].detach(), norms).requires_grad


def test_a_map_that_changed_since_it_was_made_is_not_copied():
    x = torch.randn(1, 2, 3, 4)
    weights = rg.Attention()(x, x, x).weights
    x += 1
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(rg.RegardError, match="changed in place"):
            copied(weights)


def test_only_watches_with_grad_keep_graphs():
    model, x = rg.nn.TransformerConfig(8, num_heads=2).encoder(layers=2), torch.randn(1, 5, 8)
    with rg.watch(model) as detached, rg.watch(model, grad=True) as live:
        model(x)
        with torch.no_grad():
            model(x)
    first, teacher = live.calls(0)
    assert first.requires_grad and not teacher.requires_grad and not detached.calls(0)[0].requires_grad
    torch.testing.assert_close(first.dense(), detached.calls(0)[0].dense())
    first.entropy().sum().backward()
    for mode in (torch.no_grad, torch.inference_mode):
        with (
            mode(),
            pytest.raises(rg.RegardError, match=f"watch.grad=True.: torch.{mode.__name__} is active"),
            rg.watch(model, grad=True),
        ):
            pass
    with pytest.raises(rg.RegardError, match="without a graph"):
        rg.watch(model, grad=True, keep="statistics")


def test_a_watched_layer_without_a_graph_is_missing_and_not_constant():
    """A constant in a loss would add nothing to it, without a word."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BloomConfig(hidden_size=8, n_head=2, n_layer=1, vocab_size=9)
    model, ids = transformers.BloomForCausalLM(config).eval(), torch.tensor([[3, 1, 4]])
    with rg.watch(model) as detached:
        model(ids)
    with pytest.raises(rg.RegardError, match="no gradients"), rg.watch(model, grad=True):
        model(ids)
    assert not detached[0].entropy().requires_grad


def test_other_libraries_get_no_map_that_requires_grad():
    """As of a tensor that requires grad: they would drop its graph without a word."""
    numpy, x = pytest.importorskip("numpy"), torch.randn(1, 2, 5, 4, requires_grad=True)
    weights = rg.Attention()(x, x, x).weights
    for read in (numpy.asarray, torch.as_tensor, torch.from_dlpack, torch.asarray):
        with pytest.raises(rg.RegardError, match=r"requires grad.*weights\.detach\(\)"):
            read(weights)
        assert read(weights.detach()).shape == (1, 2, 5, 5)
        with torch.no_grad():
            assert read(weights).shape == (1, 2, 5, 5)


READERS = {
    "heatmap": lambda maps, tokens, path: rg.heatmap(maps["0"], tokens, head=1),
    "figure": lambda maps, tokens, path: rg.figure(maps["0"], tokens, head=1),
    "table": lambda maps, tokens, path: rg.weight_table(maps["0"], tokens, head=1),
    "show": lambda maps, tokens, path: maps["0"].show(tokens),
    "save": lambda maps, tokens, path: save_map(path / "map", maps["0"]),
    "profile": lambda maps, tokens, path: rg.findings(rg.profile(maps, tokens)),
    "roles": lambda maps, tokens, path: rg.roles(maps, tokens, null=maps, null_tokens=tokens[::-1]),
    "alignments": lambda maps, tokens, path: rg.stats.alignment_roles(maps, lengths=[(9, 9)]),
    "patches": lambda maps, tokens, path: rg.stats.patch_roles(maps, rg.stats.PatchGrid(3, 3), null=maps),
    "split": lambda maps, tokens, path: rg.stats.cache_split(maps, sinks=1, window=2),
    "locality": lambda maps, tokens, path: rg.stats.locality(maps),
    "masks": lambda maps, tokens, path: rg.stats.mask_findings(maps, causal=True),
    "patterns": lambda maps, tokens, path: rg.stats.patterns(maps["0"]),
    "rollout": lambda maps, tokens, path: rg.rollout(maps, [0, 8]).numpy(),
    "words": lambda maps, tokens, path: f"{maps['0']!r} {maps['0'].shape}",
}


@pytest.mark.parametrize("reader", READERS)
def test_what_draws_or_counts_a_map_detaches_it_by_itself(reader, tmp_path):
    """Warnings are errors: torch warns where a number that requires grad becomes one of Python."""
    if reader in ("heatmap", "figure"):
        pytest.importorskip("matplotlib")
    if reader == "show":
        pytest.importorskip("anywidget")
    x = torch.randn(1, 2, 9, 4, requires_grad=True)
    maps = {name: rg.Attention(mask=rg.causal())(x, x, x).weights for name in "01"}
    torch.set_warn_always(True)
    try:
        READERS[reader](maps, [f"t{n}" for n in range(9)], tmp_path)
    finally:
        torch.set_warn_always(False)
    assert x.grad is None and all(weights.requires_grad for weights in maps.values())


def test_changes_in_place_and_freed_graphs_are_errors():
    """Of the backward pass alone: values come from the snapshot, which no optimizer step changes."""
    sink = rg.normalizers.LearnedSink(2)
    attention = rg.Attention(normalizer=sink)
    q, k, v = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
    received = (weights := attention(q, k, v).weights).received().sum()
    received.backward(retain_graph=True)
    received.backward()
    assert sink.sink.grad.abs().sum() > 0
    with pytest.raises(rg.RegardError, match=r"already freed the graph.*retain_graph"):
        received.backward()
    read_before, before = weights.entropy().sum(), weights.dense().detach()
    torch.optim.SGD(sink.parameters(), lr=1.0).step()
    with pytest.raises(rg.RegardError, match="changed in place"):
        read_before.backward()
    heads = weights.select(None, [1])
    for read, expected in (
        (weights.dense(), before),
        (weights[0, 1], before[0, 1]),
        (heads.dense(), before[:, 1:]),
        (rg.maps.SumMap([weights, weights], [0.5, 0.5]).dense(), before),
        (weights.shares().received(), weights.detach().shares().received()),
    ):
        torch.testing.assert_close(read.detach(), expected)
        with pytest.raises(rg.RegardError, match="before the change, but they have no gradients any more"):
            read.sum().backward()
    assert weights.detach().entropy().isfinite().all()


@pytest.mark.parametrize("change", ["factor", "groups"])
def test_changed_factors_and_groups_answer_from_their_snapshot(change):
    x = torch.randn(1, 1, 4, 8)
    if change == "factor":
        parameter = torch.nn.Parameter(torch.tensor(0.5))
        weights = rg.maps.SumMap([rg.Attention()(x, x, x).weights] * 2, [1.0, parameter])
    else:
        attention = rg.composites.Grouped(rg.Attention(), groups := rg.composites.ProjectedGroups(4, 2))
        weights, parameter = attention(x, x, x).weights, groups.of_values
    before = weights.dense().detach()
    weights.dense().square().sum().backward()
    assert parameter.grad.abs().sum() > 0
    with torch.no_grad():
        parameter += 1.0
    torch.testing.assert_close(weights.dense().detach(), before)
    with pytest.raises(rg.RegardError, match="changed in place"):
        weights.dense().sum().backward()


HIDDEN = {}


class Hidden(rg.scores.Score):
    def check(self, sizes, key_dim):
        pass

    def tile(self, query, key, grid):
        return HIDDEN["scale"] * query @ key.mT


class Detached(Hidden):
    def tile(self, query, key, grid):
        return torch.from_numpy((query @ key.mT).detach().numpy())


@pytest.mark.parametrize("score", [Hidden, Detached])
def test_weights_without_right_gradients_can_be_read_and_refuse_backward(score):
    HIDDEN["scale"] = torch.ones((), requires_grad=True)
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    weights = rg.Attention(score())(q, q, q, engine="dense").weights
    for read in (weights.entropy(), weights[0, 0, 1], weights.dense(), weights.select(0, 0).received()):
        assert read.requires_grad and read.detach().isfinite().all()
        with pytest.raises(rg.RegardError, match=r"is none of its attributes|without derivatives"):
            read.sum().backward()
    assert q.grad is None and not weights.detach().entropy().requires_grad
    q = q.detach()  # then a hidden tensor is the only one with a gradient
    weights = rg.Attention(score())(q, q, q, engine="dense").weights
    assert weights.requires_grad == (score is Hidden)


def test_transforms_of_functions_are_refused():
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    weights = rg.Attention()(q, q, q).weights
    with pytest.raises(rg.RegardError, match=r"torch\.func"):
        torch.func.grad(lambda x: weights.entropy().sum() * x)(torch.ones(()))


def test_norms_of_values_have_gradients():
    q, k, v, project = (torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(4))
    weights = rg.Attention()(q, k, v).weights
    for projection in (None, project[0, :, :3]):
        seen = rg.stats.value_weighted(weights, v, projection)
        norms = (v if projection is None else v @ projection).norm(dim=-1)
        dense = (q @ k.mT / 3**0.5).softmax(-1) * norms[:, :, None]
        for found, exact in ((seen.carried(), dense.sum(-1)), (seen.received(), dense.sum(2)), (seen.dense(), dense)):
            learned = [q, k, v] + ([] if projection is None else [project])
            for grad, slope in zip(
                gradients(times_noise(found), learned), gradients(times_noise(exact), learned), strict=True
            ):
                torch.testing.assert_close(grad, slope, rtol=1e-5, atol=1e-6)


def test_a_hundred_steps_that_log_a_number_use_constant_memory():
    """No map, and no graph of one, outlives a step: no cycle waits for the garbage collector."""
    model = rg.nn.MultiHeadAttention(8, 2, is_causal=True)
    attention = rg.Attention(
        bias=rg.biases.LearnedTable(num_heads=2, reach=4), mask=rg.causal(), normalizer=rg.normalizers.LearnedSink(2)
    )
    optimizer = torch.optim.Adam([*model.parameters(), *attention.parameters()])
    logged, alive = [], []

    def step():
        output, weights = model(x := torch.randn(2, 6, 8))
        heads = output.unflatten(-1, (2, 4)).transpose(1, 2)
        seen = attention(heads, heads, heads)
        loss = (output - x).square().mean() + seen.output.square().mean() + 0.1 * seen.weights.received().var()
        loss.backward()
        logged.append(weights.entropy().mean().item() + seen.weights.shares()[0, 0, 2].sum().item())
        optimizer.step()
        optimizer.zero_grad()

    gc.collect()
    gc.disable()
    try:
        for number in range(100):
            step()
            if number % 20 == 19:
                alive.append(sum(issubclass(type(x), (torch.Tensor, rg.AttentionMap)) for x in gc.get_objects()))
    finally:
        gc.enable()
    assert len(set(alive)) == 1 and len(logged) == 100


@pytest.mark.parametrize("is_causal", [False, True])
def test_modules_give_live_maps(is_causal):
    """Those of rg.nn, and torch's own under a watch, with fast paths and without; parameters get gradients."""
    x = torch.randn(2, 5, 8)
    own = rg.nn.MultiHeadAttention(8, 2, is_causal=is_causal)
    _, weights = own(x, x, x)
    weights.entropy().sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in own.parameters())

    mask = torch.ones(5, 5).triu(1).bool() if is_causal else None
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with rg.watch(theirs, grad=True) as seen:
        _, returned = theirs(x, x, x, attn_mask=mask, need_weights=True, average_attn_weights=False)
    found = gradients(times_noise(seen[0].dense()), [theirs.in_proj_weight])
    torch.testing.assert_close(found, gradients(times_noise(returned), [theirs.in_proj_weight]))


@needs_transformers("5.15", "T5 calls the attention interface")
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_watched_models_give_live_maps(kind):
    """Gradients of all parameters equal those of the weights that the eager backend returns."""
    transformers = pytest.importorskip("transformers")
    if kind == "llama":
        sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 16}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=16, vocab_size=20, **sizes))
    else:
        config = transformers.T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=2, vocab_size=20)
        model = transformers.T5EncoderModel(config)
    for parameter in (model := model.eval()).parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9]])
    model.set_attn_implementation("sdpa")
    with rg.watch(model, grad=True) as seen:
        model(ids)
    with torch.no_grad():
        assert not seen[0].dense().requires_grad  # the first look is no loss
    loss = sum(seen[layer].summarize(rg.maps.Entropy())[0].square().sum() for layer in range(2))
    model.set_attn_implementation("eager")
    expected = sum(entropy_of(weights).square().sum() for weights in model(ids, output_attentions=True).attentions)
    parameters = list(model.parameters())
    torch.testing.assert_close(loss, expected)
    for found, exact in zip(gradients(loss, parameters), gradients(expected, parameters), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-5)


def test_divergence_is_that_of_torch_and_checks_its_target():
    _, weights, dense = simple_map()
    (q, k), teacher, dense_teacher = simple_map()
    expected = torch.nn.functional.kl_div(dense.log(), dense_teacher, reduction="none").nan_to_num(0.0).sum(-1)
    (found,) = weights.summarize(rg.maps.Divergence(to=teacher))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    found.sum().backward()
    assert q.grad is None and k.grad is None  # a target is a constant
    full = rg.Attention()(q, q, q).weights
    (hidden,) = weights.select(0, [0]).summarize(rg.maps.Divergence(to=full.select(0, [0])))
    assert (hidden[0, 0, 0] > 10) and hidden.isfinite().all()  # the mask hides keys that have a target
    rows = torch.eye(9)
    (sharp,) = weights.summarize(rg.maps.Divergence(to=rows))
    torch.testing.assert_close(sharp.double(), -dense.diagonal(dim1=-2, dim2=-1).log(), rtol=1e-5, atol=1e-6)
    for target, words in (
        (rows[:3], "need the same queries and keys"),
        (-rows, "must not be negative"),
        (rows.long(), "target rows are floats"),
        (rg.maps.SumMap([full, full], [1.0, -1.0]), "targets are shares"),
    ):
        with pytest.raises(rg.RegardError, match=words):
            weights.summarize(rg.maps.Divergence(to=target))


@pytest.mark.usefixtures("small_ranges")
def test_maps_made_of_a_live_map_are_live():
    """Shares, means over heads, edits, positive parts and norms of values; the numbers of a page are not."""
    (q, k), weights, dense = simple_map()
    norms, halved = torch.rand(2, 4, 9), rg.edits.ScaleWeights(rg.Where(keys=0), 0.5)
    edits = LayerEdits((LayerEdit(halved, Pairs(keys=halved.where.indices("keys"))),))
    factors, signs = torch.ones(9, dtype=torch.float64), torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None, None]
    factors[0] = 0.5
    slopes, values = torch.randn(2, 4, 9, 3), torch.randn(2, 2, 9, 3)
    pairs = [
        (EditedMap(weights, edits), dense * factors),
        (PositiveMap(rg.maps.SumMap([weights], [signs])), (dense * signs).clamp_min(0)),
        (ValueWeightedMap(weights, norms), dense * norms[:, :, None]),
        (rg.maps.GradientMap(weights, slopes, values), dense * (slopes @ values.repeat_interleave(2, 1).mT)),
    ]
    for live, exact in pairs:
        for found, expected in (
            (live[1, 2:, 1::2, [3, 0]], exact[1, 2:, 1::2][..., [3, 0]]),
            (live.received(), exact.sum(2)),
        ):
            for grad, slope in zip(
                gradients(times_noise(found), (q, k)), gradients(times_noise(expected), (q, k)), strict=True
            ):
                torch.testing.assert_close(grad, slope, rtol=1e-5, atol=1e-6)
    profile = rg.profile({"0": weights}, [f"t{n}" for n in range(9)]).layers[0]
    assert not any(isinstance(x, torch.Tensor) and x.requires_grad for x in vars(profile).values())


@pytest.mark.parametrize("length", [0, 1, 3])
def test_weights_on_groups_of_keys_have_gradients_of_zero_before_the_first_group(length):
    query, key = torch.randn(2, 1, 2, length, 4).requires_grad_().unbind()
    attention = rg.composites.Grouped(rg.Attention(mask=rg.causal()), rg.composites.MeanGroups(4))
    weights = attention(query, key, key).weights
    for number in (weights.entropy(), weights.distance(), weights.dense(), weights[0, 1]):
        grads = torch.autograd.grad(number.sum(), [query, key])
        assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("part", [(slice(None), 0, []), ([],), (0, slice(None), slice(None), [])])
def test_a_selection_of_nothing_is_in_the_graph(part):
    query, key = torch.randn(2, 1, 2, 3, 4).requires_grad_().unbind()
    weights = rg.Attention()(query, key, key).weights
    grads = torch.autograd.grad(weights[part].sum(), [query, key])
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("heads, groups", [(2, 2), (4, 2)])
def test_no_heads_of_weight_times_gradient_are_an_empty_map_as_of_weights(heads, groups):
    seen = rg.Attention()(torch.randn(1, heads, 5, 4), *torch.randn(2, 1, groups, 5, 4))
    links = rg.maps.GradientMap(seen.weights, torch.randn(1, heads, 5, 4), torch.randn(1, groups, 5, 4))
    for chosen in (([], []), ([0], []), ([], [0])):
        assert links.select(*chosen).dense().shape == seen.weights.select(*chosen).dense().shape


@pytest.mark.usefixtures("small_ranges")
def test_a_reduction_whose_states_of_disjoint_queries_add_up_says_so():
    """Gradients of others keep the state before each range of queries."""
    weights = rg.Attention()(*torch.randn(3, 1, 2, 9, 4)).weights
    reductions = (
        *(*some_reductions(*weights.shape, 1), Strongest(), Above(), rg.maps.Divergence(torch.ones(9, 9) / 9)),
        *(Sum(axis, torch.float64) for axis in (2, 3)),
        *(Extreme(axis, is_largest, torch.float64) for axis in (2, 3) for is_largest in (False, True)),
        *(Product(3, torch.randn(1, 2, 9, 3)), Product(2, torch.randn(1, 2, 9, 3)), Allowed(weights)),
    )
    for reduction in reductions:
        new, *states = ([part.double() for part in reduction.init(weights.shape, weights.device)] for _ in range(4))
        for tile in weights.tiles():
            for state in (states[tile.rows.start > 2], states[2]):
                reduction.add(state, tile)
        adds = all(torch.allclose(a + b - empty, both) for empty, a, b, both in zip(new, *states, strict=True))
        assert gradients_of_maps._adds_up(reduction) is adds, reduction


def test_gradients_on_two_devices_are_refused():
    x = torch.randn(1, 2, 5, 4)
    weights = rg.Attention()(x, x, x).weights
    for gradient, value in ((x.to("meta"), x), (x, x.to("meta")), (x.to("meta"), x.to("meta"))):
        with pytest.raises(rg.RegardError, match="Move them to one device"):
            rg.maps.GradientMap(weights, gradient, value)


@pytest.mark.parametrize("reduction", [rg.maps.KeyTotals(), rg.maps.Entropy(), rg.maps.TopLinks(2)], ids=str)
def test_only_states_that_do_not_add_up_are_copied_for_their_graph(reduction, monkeypatch):
    hooks, used = torch.autograd.graph.saved_tensors_hooks, []
    monkeypatch.setattr(torch.autograd.graph, "saved_tensors_hooks", lambda *given: used.append(given) or hooks(*given))
    state = reduction.init((1, 2, 5, 5), torch.device("cpu"))
    x = torch.randn(1, 2, 5, 4)
    tiles = list(rg.Attention()(x, x, x).weights.tiles())
    gradients_of_maps._add(reduction, state, tiles)
    assert bool(used) is not gradients_of_maps._adds_up(reduction)
    with torch.no_grad():
        used.clear()
        gradients_of_maps._add(reduction, state, tiles)
        assert not used
