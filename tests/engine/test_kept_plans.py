"""A repeated call gives what a new plan gives, and costs no new plan."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
import regard as rg
from cataloged import SINGLE
from plan_calls import LEARNED, anew, assert_equal, inputs, results
from regard import attention_output
from regard.catalog import mechanisms
from regard.engine import kept_plans as kept_plans_file
from regard.engine import problem as problem_file
from regard.engine.kept_plans import kept_plans
from regard.pieces.fingerprint import NoFingerprint, fingerprint
from regard.pieces.mask import leaves

NAMES = SINGLE
#: Masks with tensors or with code of a user: no plan is kept for them.
UNKEPT = ("RealKeys", "Lengths", "mask_tensor", "mask_mod")


class Operations(TorchDispatchMode):
    """Lists the operations of a block, as a profiler of a user does."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names = [*getattr(self, "names", []), str(function)]
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Lists the functions of torch that a block calls."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names = [*getattr(self, "names", []), str(function)]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Operations, Functions])
def test_a_mode_of_the_user_sees_a_repeated_call_as_it_sees_the_first(mode):
    """A mode may change any operation, so a kept plan may not pass it by."""
    attention, tensors = rg.Attention(mask=rg.causal()), torch.randn(3, 1, 2, 40, 8)
    for _ in range(3):
        attention(*tensors)
    with mode() as repeated:
        attention(*tensors)
    kept_plans.clear()
    with mode() as first:
        attention(*tensors)
    assert repeated.names == first.names


@pytest.fixture
def plans_made(monkeypatch):
    """The problems that were planned anew."""
    made, plan = [], rg.attention_output.engine_plan
    monkeypatch.setattr(rg.attention_output, "engine_plan", lambda *given: made.append(given) or plan(*given))
    return made


def assert_repeats(attention, tensors, engine="auto"):
    """A call after a call with other numbers equals a first call."""
    other = [torch.randn_like(t).requires_grad_(t.requires_grad) for t in tensors]
    kept_plans.clear()
    results(attention, other, engine)
    repeated = results(attention, tensors, engine)
    assert_equal(repeated, anew(attention, tensors, engine))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_repeated_call_equals_a_first_call(name, grad, plans_made):
    attention, *tensors = mechanisms()[name].example(dtype=torch.float32)
    attention.eval()
    assert_repeats(attention, [t.detach().clone().requires_grad_(grad) for t in tensors])
    is_kept = all(type(leaf).__name__ not in UNKEPT for leaf in leaves(attention.mask))
    assert len(plans_made) == (2 if is_kept else 3), attention


@kernels.needs_kernel
@given(kernels.problems())
def test_a_repeated_call_of_the_kernel_equals_a_first_call(case):
    problem, tensors = case
    attention, given = kernels.in_dtype(problem, tensors)
    kept_plans.clear()
    first = results(attention, given, "kernel", positions=problem.positions)
    assert_equal(results(attention, given, "kernel", positions=problem.positions), first)


@pytest.mark.parametrize("engine", ["auto", "dense", "kernel"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", LEARNED)
def test_new_numbers_of_parameters_are_read(name, grad, engine, plans_made):
    """Changed in place, through .data, and by a new parameter."""
    if engine == "kernel" and not kernels.LEVELS:
        pytest.skip("the kernel does not run here")
    attention, tensors = LEARNED[name]().requires_grad_(grad), inputs(12, 20, 20, grad=grad)
    kept_plans.clear()
    results(attention, tensors, engine)
    plans_made.clear()
    for module in attention.modules():
        for key, parameter in [(key, x) for key, x in module._parameters.items() if x is not None]:
            for change in ("in place", "data", "new"):
                fresh = torch.randn_like(parameter)
                with torch.no_grad():
                    if change == "in place":
                        parameter.copy_(fresh)
                    elif change == "data":
                        parameter.data = fresh
                    else:
                        setattr(module, key, torch.nn.Parameter(fresh, requires_grad=grad))
                repeated = results(attention, tensors, engine)
                assert not plans_made, "the plan is kept"
                kept = dict(kept_plans._plans)
                assert_equal(repeated, anew(attention, tensors, engine))
                plans_made.clear()
                kept_plans._plans.update(kept)


def test_a_map_of_a_repeated_call_is_of_its_own_numbers():
    attention, tensors = LEARNED["table"](), inputs(5, 5, 5)
    attention(*tensors)
    before, same = (attention(*tensors).weights for _ in range(2))
    expected = same.dense()  # `before` is not read until the numbers have changed
    with torch.no_grad():
        attention.bias[0].table.add_(torch.randn(2, 7))
    after = attention(*tensors).weights
    assert torch.equal(before.dense(), expected) and not torch.equal(after.dense(), expected)
    with torch.no_grad():
        tensors[0].add_(1)
    with pytest.raises(rg.RegardError, match="changed in place"):
        after.dense()


CHANGES = {
    "score": lambda a: setattr(a, "score", rg.Dot(scale=3.0)),
    "mask": lambda a: setattr(a, "mask", rg.causal() & rg.window(2)),
    "normalizer": lambda a: setattr(a, "normalizer", rg.normalizers.Softmax(temperature=0.1)),
    "sink": lambda a: setattr(a, "normalizer", rg.normalizers.Softmax(sink=1.0)),
    "bias": lambda a: setattr(a, "bias", rg.ALiBi(2)),
    "order of biases": lambda a: setattr(a, "bias", (rg.biases.Softcap(0.1), rg.ALiBi(2))),
    "position": lambda a: setattr(a, "position", rg.RoPE(8)),
    "scaling": lambda a: setattr(a, "position", rg.RoPE(8, scaling=rg.encodings.LinearScaling(9.0))),
}


@pytest.mark.parametrize("engine", ["auto", pytest.param("kernel", marks=kernels.needs_kernel)])
@pytest.mark.parametrize("change", CHANGES)
def test_a_replaced_piece_is_used(change, engine):
    attention, tensors = rg.Attention(bias=(rg.ALiBi(2), rg.biases.Softcap(0.1))), inputs(9, 9, 9)
    attention.position = rg.RoPE(8, scaling=rg.encodings.LinearScaling(2.0))
    before = results(attention, tensors, engine)
    CHANGES[change](attention)
    after = results(attention, tensors, engine)
    assert_equal(after, anew(attention, tensors, engine))
    assert not torch.equal(before[0], after[0])


def strided(x, how):
    if how == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "expanded":
        return x[:, :1].expand_as(x)
    return x.repeat_interleave(2, -1)[..., ::2] if how == "sliced" else x.double() if how == "double" else x.to(how)


@pytest.mark.parametrize("engine", ["auto", pytest.param("kernel", marks=kernels.needs_kernel)])
@pytest.mark.parametrize("how", ["transposed", "expanded", "sliced", "double", torch.bfloat16, torch.float16])
def test_a_call_with_other_strides_or_dtypes_equals_a_first_call(how, engine):
    if (how, engine) == ("double", "kernel"):
        pytest.skip("the kernels have no float64")
    attention, tensors = rg.Attention(mask=rg.causal()), inputs(12, 12, 12)
    changed = [strided(t, how) for t in tensors]
    kept_plans.clear()
    results(attention, tensors, engine)
    assert_equal(results(attention, changed, engine), anew(attention, changed, engine))


@pytest.mark.parametrize("engine", ["auto", pytest.param("kernel", marks=kernels.needs_kernel)])
def test_gradients_reach_the_tensors_that_need_them(engine):
    attention, tensors = LEARNED["t5"](), inputs(12, 12, 12)
    for chosen in ((), (0,), (1, 2), (0, 1, 2), ()):
        for has_grad in (True, False):
            for bias in (True, False):
                attention.requires_grad_(bias)
                for n, t in enumerate(tensors):
                    t.requires_grad_(n in chosen)
                with torch.set_grad_enabled(has_grad):
                    seen = attention(*tensors, engine=engine)
                    assert seen.output.requires_grad == (has_grad and (bool(chosen) or bias))
                    found = results(attention, tensors, engine)
                    kept = dict(kept_plans._plans)
                    assert_equal(found, anew(attention, tensors, engine))
                    kept_plans._plans.update(kept)


@pytest.mark.parametrize("engine", ["auto", pytest.param("kernel", marks=kernels.needs_kernel)])
def test_a_plan_of_inference_mode_is_not_used_for_gradients(engine):
    """Inference mode records no gradients, also where they are enabled in it; its tensors cannot be saved for them."""
    attention, tensors = rg.Attention(bias=rg.ALiBi(2), mask=rg.masks.dilated(3, 2)), inputs(12, 12, 12, grad=True)
    for has_grad in (False, True):
        with torch.inference_mode(), torch.set_grad_enabled(has_grad):
            assert not attention(*tensors, engine=engine).output.requires_grad
    with torch.no_grad():
        results(attention, tensors, engine)
    found = results(attention, tensors, engine)
    assert_equal(found, anew(attention, tensors, engine))


def test_a_hook_that_changes_what_the_engine_gets_is_seen():
    """The compiled kernels, which ran without it, have no float64."""
    attention = rg.Attention(rg.scores.Additive(8, 8, hidden=4)).requires_grad_(False)
    tensors = inputs(150, 150, 150)
    before = results(attention, tensors)
    attention.score.query.register_forward_hook(lambda *given: given[-1].double())
    torch.testing.assert_close(results(attention, tensors)[0], before[0])


@kernels.needs_kernel
@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_number_of_threads_may_change(number):
    attention, tensors, before = (
        rg.Attention(mask=rg.causal()),
        inputs(400, 400, 400, grad=True),
        torch.get_num_threads(),
    )
    expected = anew(attention, tensors, "kernel")
    torch.set_num_threads(number)
    try:
        assert_equal(results(attention, tensors, "kernel"), expected)
    finally:
        torch.set_num_threads(before)


@kernels.every_level
def test_the_level_of_the_kernels_may_change(level):
    attention, tensors = rg.Attention(mask=rg.causal()), inputs(50, 50, 50)
    results(attention, tensors, "kernel")
    with kernels.at_level(level):
        assert_equal(results(attention, tensors, "kernel"), anew(attention, tensors, "kernel"))
    with kernels.at_level("off"), pytest.raises(rg.RegardError, match="REGARD_KERNEL=off"):
        attention(*tensors, engine="kernel")


def test_a_coarse_sink_is_noticed():
    attention, tensors = LEARNED["sink"]().requires_grad_(False), inputs(50, 50, 50)
    for number in (0.0, 1e6, 0.0):
        attention.normalizer.sink.fill_(number)
        assert_equal(results(attention, tensors), anew(attention, tensors))
        plan = rg.plan(*tensors, attention=attention)
        assert ("kernel" in plan.refused) == (number > 0 or not kernels.LEVELS)
    results(attention, tensors, "blocked")


@kernels.needs_kernel
def test_a_refused_call_is_refused_again_with_the_same_words():
    attention, tensors = rg.Attention(normalizer=rg.normalizers.Sparsemax()), inputs(5, 5, 5)
    words = []
    for _ in range(3):
        with pytest.raises(rg.RegardError) as error:
            attention(*tensors, engine="kernel")
        words.append(str(error.value))
    assert len(set(words)) == 1 and not len(kept_plans)


MASKS = {
    "lengths": (lambda x: rg.padding(x.sum(1)), (2, 9)),
    "padding": (rg.padding, (2, 9)),
    "tensor": (rg.mask_tensor, (2, 1, 9, 9)),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_with_tensors_are_read_at_every_call(name):
    """A mask copies its tensor. The copy itself may be changed only by force; then the next call sees it too."""
    make, shape = MASKS[name]
    allowed = torch.ones(shape, dtype=torch.bool)
    tensors = [torch.randn(2, 2, 9, 8) for _ in range(3)]
    attention = rg.Attention(mask=make(allowed))
    first = results(attention, tensors)
    allowed[..., 4:] = False
    assert_equal(results(attention, tensors), first)
    attention.mask = make(allowed)
    assert_equal(results(attention, tensors), anew(attention, tensors))
    assert not torch.equal(results(attention, tensors)[0], first[0])


class Growing(rg.biases.AdditiveBias):
    """A user's bias with a state."""

    def __init__(self):
        self.factor = 0.0

    def term(self, grid, rows, cols):
        return self.factor * grid.j


class Inherited(rg.window):
    """A user's mask that inherits one of ours, with a state of its own."""

    reach = 100

    def allowed(self, grid):
        return grid.distance.abs() < type(self).reach

    def all_allowed(self, start, stop):
        return rg.masks.Mask.all_allowed(self, start, stop)


def test_pieces_of_the_user_are_read_at_every_call(plans_made):
    bias, tensors = Growing(), inputs(9, 9, 9)
    attention = rg.Attention(bias=bias)
    outputs = []
    for bias.factor in (0.0, 1.0, 2.0):
        outputs.append(attention(*tensors).output)
    assert len(plans_made) == 3 and not len(kept_plans)
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[1], outputs[2])


def test_a_subclass_of_a_piece_is_a_piece_of_the_user(plans_made):
    attention, tensors = rg.Attention(mask=Inherited(100)), inputs(9, 9, 9)
    far = attention(*tensors).output
    with mock.patch.object(Inherited, "reach", 2):
        assert not torch.equal(attention(*tensors).output, far)
    assert len(plans_made) == 2 and not len(kept_plans)


class Tangent(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh()


@pytest.mark.parametrize(
    "part", [Growing(), Inherited(3), Tangent(2, 2), {"factor": 2.0}, [2.0]], ids=lambda x: type(x).__name__
)
def test_only_pieces_of_this_package_have_a_fingerprint(part):
    with pytest.raises(NoFingerprint):
        fingerprint((rg.Dot(), part), [])


CHANGED = {
    "a function in place of a method": lambda a: setattr(a.bias[0], "term", lambda *given: torch.zeros(1)),
    "a hook": lambda a: a.score.query.register_forward_hook(lambda *given: given[-1] * 0),
    "another attribute": lambda a: setattr(a.bias[0], "reach", 0),
    "a module of the user": lambda a: setattr(a.score, "query", Tangent(8, 4)),
    "a parametrization": lambda a: torch.nn.utils.parametrizations.weight_norm(a.score.query),
    "one tensor for two": lambda a: setattr(a.score.key, "weight", a.score.query.weight),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_changed_module_is_seen(change):
    attention = rg.Attention(rg.scores.Additive(8, 8, hidden=4), bias=rg.biases.LearnedTable(2, reach=3))
    torch.nn.init.normal_(attention.bias[0].table)
    tensors = inputs(6, 6, 6, grad=True)
    before = results(attention, tensors)
    CHANGED[change](attention)
    after = results(attention, tensors)
    assert not torch.equal(before[0], after[0]) or change == "a parametrization"
    assert_equal(after, anew(attention, tensors))


def test_layers_of_one_shape_share_a_plan(plans_made):
    layers = [rg.Attention(mask=rg.causal(), bias=rg.biases.T5Bias(2)) for _ in range(6)]
    for layer in layers:
        results(layer, inputs(20, 20, 20))
    assert len(plans_made) == 1


def test_an_explained_plan_is_made_anew(plans_made):
    attention, tensors = rg.Attention(mask=rg.causal()), inputs(9, 9, 9)
    results(attention, tensors)
    assert "linear" in rg.plan(*tensors, attention=attention).refused


def test_few_plans_are_kept_and_the_latest_stay(monkeypatch, plans_made):
    monkeypatch.setattr(kept_plans_file, "MOST_PLANS", 8)
    attention, favorite = rg.Attention(), inputs(3, 3, 3)
    for n in range(1, 60):
        attention(*inputs(n, n + 1, n + 1))
        attention(*favorite)
        assert len(kept_plans) <= 8
    assert len(plans_made) == 60  # the favorite once


@pytest.mark.parametrize(
    ("engine", "said"),
    [("auto", "storage"), pytest.param("kernel", "cannot be read from memory", marks=kernels.needs_kernel)],
)
def test_freed_memory_is_not_read(engine, said):
    """As sharded parameters are between two uses."""
    attention, tensors = rg.Attention(), inputs(30, 30, 30)
    results(attention, tensors, engine)
    tensors[1].untyped_storage().resize_(0)
    with pytest.raises((RuntimeError, rg.RegardError), match=said):
        attention(*tensors, engine=engine)


@pytest.mark.parametrize("engine", ["auto", pytest.param("kernel", marks=kernels.needs_kernel)])
def test_negative_views_are_read_with_their_sign(engine):
    attention, tensors = rg.Attention(), inputs(30, 30, 30)
    results(attention, tensors, engine)
    negative = torch.complex(tensors[0], tensors[0]).conj().imag  # -q, by a flag of the tensor
    changed = [negative, *tensors[1:]]
    assert negative.is_neg()
    assert_equal(results(attention, changed, engine), anew(attention, changed, engine))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_transformed_calls_are_planned_anew(plans_made):
    attention, (q, k, v) = rg.Attention(), inputs(5, 5, 5)
    attention(q, k, v)
    plans_made.clear()

    def loss(q):
        return attention(q, k, v).output.sum()

    _, slope = torch.func.jvp(loss, (q,), (torch.ones_like(q),))
    gradient = torch.func.grad(loss)(q)
    torch.testing.assert_close(slope, gradient.sum())
    assert len(plans_made) == 2


def test_a_second_derivative_is_refused_by_a_repeated_call_too():
    attention, tensors = rg.Attention(), inputs(400, 400, 400, grad=True)
    for _ in range(2):
        output = attention(*tensors, engine="blocked").output
        (first,) = torch.autograd.grad(output.sum(), tensors[:1], create_graph=True)
        with pytest.raises(rg.RegardError, match="derivatives of any order"):
            first.sum().backward()


@pytest.mark.parametrize(
    "positions", [None, rg.types.Positions.of(0, 5, 9), rg.types.Positions(7, rg.types.Spans.of((0, 4), (8, 13)))]
)
def test_positions_are_part_of_the_key(positions):
    attention, tensors = rg.Attention(mask=rg.causal(), bias=rg.ALiBi(2)), inputs(5, 9, 9)
    for other in (None, rg.types.Positions.of(2, 5, 9)):
        results(attention, tensors, positions=other)
    assert_equal(results(attention, tensors, positions=positions), anew(attention, tensors, positions=positions))


def test_dropout_has_a_new_seed_at_every_call(plans_made):
    attention, tensors = rg.Attention(dropout=0.5), inputs(30, 30, 30)
    outputs = [attention(*tensors).output for _ in range(3)]
    assert len(plans_made) == 1
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[1], outputs[2])
    attention.dropout = 0.25
    attention(*tensors)
    attention.eval()
    assert_equal(results(attention, tensors), anew(attention, tensors))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "attention",
    [
        rg.Attention(rg.Dot(0.3)),
        rg.Attention(mask=rg.causal()),
        rg.Attention(mask=rg.window(3)),
        rg.Attention(bias=rg.ALiBi(2)),
        rg.Attention(position=rg.RoPE(8)),
        rg.Attention(normalizer=rg.normalizers.Softmax(sink=1.0)),
        rg.Attention(normalizer=rg.normalizers.Softmax(temperature=3.0)),
    ],
    ids=repr,
)
def test_a_repeated_call_of_torchs_kernel_leaves_out_no_piece(attention, grad):
    has_sink = attention.normalizer.sink is not None  # the kernel computes it without gradients only
    assert_repeats(attention, inputs(9, 9, 9, grad=grad and not has_sink), "fused")


PLAIN = {
    "fused": (rg.Attention(), rg.Attention(mask=rg.causal())),
    "kernel": (rg.Attention(), rg.Attention(mask=rg.causal()), rg.Attention(bias=rg.ALiBi(2))),
}


@pytest.mark.parametrize("engine", ["fused", pytest.param("kernel", marks=kernels.needs_kernel)])
def test_a_call_of_plain_pieces_is_repeated_in_one_function(engine):
    for attention in PLAIN[engine]:
        tensors, other = inputs(9, 9, 9), inputs(9, 9, 9)
        kept_plans.clear()
        attention(*other, engine=engine)
        (kept,) = kept_plans._plans.values()
        again, first = kept.repeat.run(*tensors), anew(attention, tensors, engine)
        assert_equal([again.output, again.row_statistic[0]], [first[0], first[2]])


def test_autocast_is_part_of_the_key():
    attention, tensors = LEARNED["shaw"](), inputs(12, 12, 12, dtype=torch.bfloat16)
    results(attention, tensors)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(attention, tensors)
        assert found[0].dtype == torch.bfloat16
        assert_equal(found, anew(attention, tensors))


def test_the_half_of_the_plans_that_was_used_last_is_kept(monkeypatch):
    monkeypatch.setattr(kept_plans_file, "MOST_PLANS", 6)
    attention = rg.Attention(mask=rg.causal())

    def call(length):
        attention(*torch.randn(3, 1, 1, length, 4))

    for length in (3, 4, 5, 6, 7, 8, 3):
        call(length)
    assert len(kept_plans) == 6
    used_last = [key for key, plan in sorted(kept_plans._plans.items(), key=lambda item: -item[1].used)[:3]]
    call(9)
    assert len(kept_plans) == 4 and {*used_last} < {*kept_plans._plans}


def test_a_kept_plan_has_its_own_pieces():
    """The attention that made a plan may get other pieces; another attention with the first ones uses the plan."""
    first, tensors = rg.Attention(mask=rg.causal()), inputs(9, 9, 9)
    first(*tensors)
    first.mask = None
    weights = rg.Attention(mask=rg.causal())(*tensors).weights
    assert torch.equal(weights.dense() > 0, torch.ones(9, 9, dtype=torch.bool).tril().expand(1, 2, 9, 9))


@pytest.mark.parametrize("learns", [False, True])
def test_a_call_copies_the_tensors_of_its_pieces_once(learns, monkeypatch):
    """Its map has the copies of the call; with gradients the call has the tensors themselves, and its map copies."""
    attention, tensors, copied = LEARNED["table"](), inputs(20, 20, 20), []
    copy = problem_file.tensor_snapshot
    monkeypatch.setattr(problem_file, "tensor_snapshot", lambda tensor: copied.append(tensor) or copy(tensor))
    with torch.set_grad_enabled(learns):
        for count in (1, 2):
            attention(*tensors)
            assert [part is attention.bias[0].table for part in copied] == [True] * count


def test_a_repeated_call_is_completed_once_and_under_autocast_each_time(monkeypatch):
    """Completing casts the tensors of a call, and adds what a cache and dropout need."""
    tensors, completed, extended = torch.randn(3, 1, 2, 40, 8), [], attention_output.extended
    monkeypatch.setattr(attention_output, "extended", lambda *given: completed.append(1) or extended(*given))
    for _ in range(3):
        rg.attend(*tensors)
    assert len(completed) == 1
    with torch.autocast("cpu", torch.bfloat16):
        outputs = [rg.attend(*tensors).output for _ in range(3)]
    assert len(completed) == 4 and {output.dtype for output in outputs} == {torch.bfloat16}
