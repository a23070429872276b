"""Roles of patches on the grid against sums over pairs, shuffled patches, and contact maps against transformers."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg
from regard.base.errors import RegardError
from regard.stats import PatchGrid, contact_maps, patch_roles, shuffle_patches
from regard.stats.roles import PATCH_KINDS
from vision_models import esm

GRID = PatchGrid(4, 5, start=2, frames=2)
LENGTH = 2 + len(GRID) + 1
IS_LINK = {
    "row": lambda a, b: a[1] == b[1] and abs(a[2] - b[2]) > 1,
    "column": lambda a, b: a[2] == b[2] and abs(a[1] - b[1]) > 1,
    "left": lambda a, b: a[1] == b[1] and b[2] == a[2] - 1,
    "right": lambda a, b: a[1] == b[1] and b[2] == a[2] + 1,
    "above": lambda a, b: a[2] == b[2] and b[1] == a[1] - 1,
    "below": lambda a, b: a[2] == b[2] and b[1] == a[1] + 1,
}


def maps_of(seed, heads=3):
    torch.manual_seed(seed)
    return {"layers.0": rg.Attention()(*torch.randn(3, 1, heads, LENGTH, 8)).weights}


def patches():
    return [(f, r, c) for f in range(GRID.frames) for r in range(GRID.rows) for c in range(GRID.columns)]


@pytest.mark.parametrize("kind", PATCH_KINDS)
def test_a_score_is_the_mean_over_the_patches_that_have_such_a_key(kind):
    maps, null = maps_of(0), maps_of(1)
    dense, empty = maps["layers.0"].dense()[0], null["layers.0"].dense()[0]
    found = {role.head: role for role in patch_roles(maps, GRID, null=null).of(kind)}
    for head in range(3):
        scores, nulls, chances = [], [], []
        for a in patches():
            keys = [b for b in patches() if a[0] == b[0] and a != b and IS_LINK[kind](a, b)]
            if keys:
                i, js = GRID.token(a[1], a[2], a[0]), [GRID.token(b[1], b[2], b[0]) for b in keys]
                scores.append(float(dense[head, i, js].sum()))
                nulls.append(float(empty[head, i, js].sum()))
                chances.append(len(js) / LENGTH)
        role = found[head]
        assert role.queries == len(scores)
        assert role.score == pytest.approx(sum(scores) / len(scores), abs=1e-6)
        assert role.null == pytest.approx(sum(nulls) / len(nulls), abs=1e-6)
        assert role.chance == pytest.approx(sum(chances) / len(chances), abs=1e-6)


@pytest.mark.parametrize("kind", ["left", "below", "column"])
def test_a_head_that_does_nothing_else_has_the_role(kind):
    grid = PatchGrid(6, 6, start=1)
    places = [(0, r, c) for r in range(6) for c in range(6)]
    scores = torch.zeros(37, 37)
    for n, a in enumerate(places):
        for m, b in enumerate(places):
            scores[1 + n, 1 + m] = 9.0 * (a != b and IS_LINK[kind](a, b))
    q, k = scores.expand(1, 1, 37, 37) * math.sqrt(37), torch.eye(37).expand(1, 1, 37, 37)
    maps = {"layers.2": rg.Attention()(q, k, k).weights}
    (role,) = patch_roles(maps, grid, null=maps).labeled
    assert (role.kind, role.layer, role.head) == (kind, 2, 0) and PATCH_KINDS[kind] in role.sentence
    flat = {"layers.2": rg.Attention()(0 * q, k, k).weights}
    assert not patch_roles(maps, grid, null=flat).labeled, "content only: the role is gone on shuffled patches"


def test_shuffled_patches_are_the_same_patches():
    image = torch.randn(2, 3, 8, 12)
    mixed = shuffle_patches(image, 2, 3)
    cut = [
        [x[:, :, r : r + 4, c : c + 4] for r in (0, 4) for c in (0, 4, 8)]
        for x in (image, mixed)
    ]  # fmt: skip
    order = [next(n for n, before in enumerate(cut[0]) if torch.equal(before, after)) for after in cut[1]]
    assert sorted(order) == list(range(6)) and order != list(range(6))
    with pytest.raises(RegardError, match="8 x 12 pixels cannot be cut into 3 x 3"):
        shuffle_patches(image, 3, 3)


def test_patch_roles_refuse_maps_without_the_patches():
    with pytest.raises(RegardError, match="the last patch of the grid is token 99"):
        patch_roles(maps_of(0), PatchGrid(10, 10), null=maps_of(1))
    with pytest.raises(RegardError, match="same layers"):
        patch_roles(maps_of(0), GRID, null={})


def test_contacts_are_those_of_the_esm_authors():
    from transformers.models.esm.modeling_esm import average_product_correct, symmetrize

    vision = esm()
    model = vision.make()
    model.set_attn_implementation("eager")
    with torch.no_grad(), rg.watch(model) as seen:
        output = model(**vision.inputs, output_attentions=True)
    for layer in range(2):
        residues = output.attentions[layer][0, :, 1:-1, 1:-1]  # without <cls> and <eos>
        expected = average_product_correct(symmetrize(residues))
        assert torch.allclose(contact_maps(seen[layer], special=[0, 11]), expected, atol=1e-5)


def test_contacts_need_a_square():
    weights = rg.Attention()(torch.randn(1, 1, 3, 4), *torch.randn(2, 1, 1, 5, 4)).weights
    with pytest.raises(RegardError, match="3 queries and 5 keys"):
        contact_maps(weights)
    square = rg.Attention()(*torch.randn(3, 1, 1, 5, 4)).weights
    with pytest.raises(RegardError, match="7 is not the index of one of 5 tokens"):
        contact_maps(square, special=[7])
