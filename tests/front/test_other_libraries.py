"""A missing name answers with what to call: names of other libraries, other cases, other rooms, slips of the hand."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from operator import attrgetter

import pytest
import torch

import regard as rg
from regard.base.other_libraries import CALLS, INNER_ROOMS, OF_MAPS, OF_WATCHED, ROOMS

OWNERS = {"WatchedAttention": rg.hf.WatchedAttention, "AttentionMap": rg.AttentionMap, "Tensor": torch.Tensor}
ROOTS = {"rg": rg, "seen": rg.hf.WatchedAttention, "weights": rg.AttentionMap}


def statements(code):
    return [ast.parse(part).body[0] for part in code.split(", then ")]


def found(node):
    """What an expression names: a module, a function, or the class of an instance; None if that is not known."""
    if isinstance(node, ast.Name):
        return ROOTS.get(node.id)
    if isinstance(node, ast.Subscript):
        return rg.AttentionMap if found(node.value) is rg.hf.WatchedAttention else None
    if isinstance(node, ast.Attribute) and (owner := found(node.value)) is not None:
        named = getattr(owner, node.attr)
        return OWNERS.get(named.fget.__annotations__.get("return")) if isinstance(named, property) else named
    if isinstance(node, ast.Call) and inspect.isclass(kind := found(node.func)):
        return kind
    return None


def check_calls(statement):
    """Every name exists, and every call has arguments that its function takes."""
    names = 0
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute):
            names += found(node.value) is not None
            found(node)
        if isinstance(node, ast.Call) and (called := found(node.func)) is not None:
            is_instance = isinstance(node.func, ast.Call)
            parameters = inspect.signature(called.forward if is_instance else called)
            is_method = inspect.isfunction(called) and not isinstance(
                found(getattr(node.func, "value", None)), type(rg)
            )
            own = [None] * (is_instance or (is_method and "." in called.__qualname__))
            parameters.bind(*own, *node.args, **{each.arg: each.value for each in node.keywords})
    return names


@pytest.mark.parametrize(
    "code", sorted({*CALLS.values(), *OF_WATCHED.values(), *OF_MAPS.values()}), ids=lambda code: code[:60]
)
def test_every_call_that_an_answer_names_exists(code):
    parts = [check_calls(statement) for statement in statements(code)]
    assert "[" in code or sum(parts)


@pytest.mark.parametrize("name", CALLS)
def test_a_name_of_another_library_answers_with_a_call(name):
    assert not hasattr(rg, name)
    with pytest.raises(AttributeError) as error:
        getattr(rg, name)
    assert str(error.value).endswith(f"Here: {CALLS[name]}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("owner", "name", "answer"),
    [
        (rg, "Causal", "Did you mean rg.causal?"),
        (rg, "rope", "Did you mean rg.RoPE?"),
        (rg, "wtach", "Did you mean rg.watch?"),
        (rg, "MultiheadAttention", "Did you mean rg.nn.MultiHeadAttention?"),
        (rg, "MultiHeadAttention", "Did you mean rg.nn.MultiHeadAttention?"),
        (rg, "beam_search", "Did you mean rg.lab.beam_search?"),
        (rg, "Performer", 'Did you mean rg.mechanism("performer")?'),
        (rg, "zzz", "module 'regard' has no attribute 'zzz'"),
        (rg, "_zzz", "module 'regard' has no attribute '_zzz'"),
        (rg.nn, "causal", "Did you mean rg.causal?"),
        (rg.nn, "MultiheadAttention", "Did you mean rg.nn.MultiHeadAttention?"),
        (rg.nn, "TransformerEncoder", ".encoder(layers=6)"),
        (rg.viewer, "write_pages", "Did you mean rg.viewer.write_page?"),
        (rg.lab.data, "Corpuss", "Did you mean rg.lab.data.Corpus or"),
        (rg.lab, "beamsearch", "Did you mean rg.lab.beam_search?"),
    ],
)
def test_another_case_a_room_or_a_slip_answers_with_the_name(owner, name, answer):
    assert not hasattr(owner, name)
    with pytest.raises(AttributeError) as error:
        getattr(owner, name)
    assert answer in str(error.value)


def test_no_name_of_another_library_hides_another_case_of_ours():
    rooms = [rg, *(attrgetter(room)(rg) for room in (*ROOMS, *INNER_ROOMS))]
    ours = {name.replace("_", "").lower() for room in rooms for name in room.__all__ if name not in ROOMS}
    assert not ours & {name.replace("_", "").lower() for name in CALLS}


def test_a_map_and_a_watched_run_answer_too():
    weights = rg.Attention()(*torch.randn(3, 1, 2, 3, 4)).weights
    encoder = rg.nn.TransformerConfig(8, num_heads=2).encoder(layers=2).eval()
    with rg.watch(encoder) as seen:
        encoder(torch.randn(1, 3, 8))
    for owner, table in ((weights, OF_MAPS), (seen, OF_WATCHED)):
        for name, code in table.items():
            assert not hasattr(owner, name)
            with pytest.raises(AttributeError) as error:
                getattr(owner, name)
            assert str(error.value).endswith(f"Here: {code}")
    with pytest.raises(AttributeError, match=r"Did you mean weights.entropy\?"):
        weights.entropi  # noqa: B018 - it is the missing name that is tested
    with pytest.raises(AttributeError, match=r"Here: weights.dense\(\).fill_"):
        weights.fill_(0)
    for name in (("pattern", 0), "pattern", "blocks.0.attn.hook_pattern"):
        with pytest.raises(rg.RegardError, match=r"there is no such attention module. Here: seen\[3\]. Known names"):
            seen[name]


def test_help_and_private_names_need_no_torch():
    script = "import sys, regard; hasattr(regard, '_ipython_display_'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
