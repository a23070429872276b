"""Roles of a long text are read from some of its queries: their rows, the scores, and how many pairs are read."""

import math
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
import torch
from rich.console import Console
from test_shares import FAMILIES

import regard as rg
from exact_maps import exact
from regard.catalog import mechanisms
from regard.cli.report import print_roles, role_lines
from regard.maps.attention_map import AttentionMap
from regard.maps.changed_map import QuerySample
from regard.stats import roles, shuffle_order
from regard.stats.roles import KINDS, SAMPLE
from regard.stats.statistics import Allowed
from regard.types import RoleTable, TextReading

N, READ = 600, 300


def check_rows(weights):
    """A sample of some rows has these rows of the dense weights, and their statistics."""
    shares = weights if weights.has_shares else weights.shares()
    queries = torch.arange(weights.shape[2])[1::2]
    sample, dense = QuerySample(shares, queries), shares.dense()[:, :, queries]
    torch.testing.assert_close(sample.dense(), dense)
    entropy, allowed = sample.summarize(rg.maps.Entropy(), Allowed(sample))
    torch.testing.assert_close(entropy.double(), -torch.xlogy(dense, dense).sum(-1).double(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(allowed, shares.summarize(Allowed(shares))[0][:, :, queries])
    torch.testing.assert_close(sample.select([0], [0])[0, 0], dense[0, 0])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sample_has_the_rows_of_every_family(name):
    check_rows(FAMILIES[name][0]())


@pytest.mark.parametrize("name", sorted(mechanisms()))
def test_a_sample_has_the_rows_of_every_mechanism(name, small_blocks):
    with torch.no_grad():
        example = mechanisms()[name].example()
        check_rows(example[0](*example[1:], **mechanisms()[name].tensors(*example)).weights)


def drawn_heads(tokens, generator):
    """One head for each of five roles: random parts of its rows on the links, the rest on the token itself."""
    n, same = len(tokens), np.equal.outer(tokens, tokens)
    i, j = np.indices((n, n))
    later, marks = (j > 0) & (j != i), np.isin(tokens, [".", ","])[None]
    follows = np.roll(same, 1, axis=1) & (j < i) & (j > 0)
    links = np.stack([j == i - 1, (j == 0) & (i > 0), marks & later, same & later, follows])
    count = links.sum(-1, keepdims=True)
    part = generator.beta(0.6, 0.2, (len(links), n, 1)) * (count > 0)
    return part * links / np.maximum(count, 1) + (1 - part) * np.eye(n)


@pytest.mark.parametrize("seed", range(3))
def test_scores_of_a_sample_are_within_the_standard_error(seed):
    generator = np.random.default_rng(seed)
    tokens = [str(t) for t in generator.choice(["<s>", ".", ",", *map(str, range(30))], N)]
    other = [tokens[place] for place in shuffle_order(tokens)]
    maps, null = ({"layer": exact(drawn_heads(t, generator))} for t in (tokens, other))
    whole, read = (roles(maps, tokens, null=null, null_tokens=other, sample=size) for size in (N, READ))
    assert whole.sampled is None and read.sampled == (READ, N)
    labels = [[(role.kind, role.head) for role in table.labeled] for table in (whole, read)]
    assert labels[0] == labels[1] and len(labels[0]) == 5
    assert f"{READ} of {N} queries" in read.table() and "queries" not in whole.table()
    for kind in KINDS:
        for head in range(5):
            (one,), (two,) = ([r for r in table.of(kind) if r.head == head] for table in (whole, read))
            assert 0.3 * one.queries < two.queries < 0.7 * one.queries
            five_errors = 5 * 0.5 / math.sqrt(two.queries)
            if one.offset == two.offset:
                for name in ("score", "chance", "null"):
                    assert getattr(two, name) == pytest.approx(getattr(one, name), abs=five_errors), (kind, name)


@pytest.mark.parametrize("sample", [N, N + 1, SAMPLE])
def test_a_short_text_is_read_whole(sample):
    tokens = [str(n % 7) for n in range(N)]
    other = [tokens[place] for place in shuffle_order(tokens)]
    weights = rg.Attention(mask=rg.causal())(*torch.randn(3, 1, 2, N, 4)).weights
    named = roles({"l": weights}, tokens, null={"l": weights}, null_tokens=other, sample=sample)
    assert named.sampled is None and {role.queries for role in named.of("first")} == {N - 1}


class Counted(AttentionMap):
    """Equal weights on the past, which count the pairs that are computed."""

    has_shares = True

    def __init__(self, n):
        self.attention, self.positions = rg.Attention(mask=rg.causal()), rg.types.Positions.aligned_to_end(n, n)
        self.grid, self.pairs = rg.types.Grid.whole(self.positions, 1, 1, n), 0

    def select(self, batch, head):
        raise AssertionError("there is one text with one head")

    def _weights(self, rows, cols):
        grid = self.grid.tile(rows, cols)
        self.pairs += len(grid.query) * len(grid.key)
        return (grid.j <= grid.i) / (grid.i + 1.0)


@pytest.mark.parametrize("n", [1000, 2000, 8000])
def test_the_pairs_that_roles_read_grow_with_the_length(n):
    tokens, maps = [str(place % 50) for place in range(n)], (Counted(n), Counted(n))
    other = [tokens[place] for place in shuffle_order(tokens)]
    named = roles({"l": maps[0]}, tokens, null={"l": maps[1]}, null_tokens=other, sample=100)
    assert [role.kind for role in named.labeled] == ["broad"] and named.sampled == (100, n)
    assert all(0 < weights.pairs <= 100 * n for weights in maps)


def test_by_default_a_bounded_number_of_queries_is_read():
    n = SAMPLE + 500
    tokens = [str(place % 50) for place in range(n)]
    other = [tokens[place] for place in shuffle_order(tokens)]
    maps = Counted(n), Counted(n)
    assert roles({"l": maps[0]}, tokens, null={"l": maps[1]}, null_tokens=other).sampled == (SAMPLE, n)
    assert all(weights.pairs <= SAMPLE * n for weights in maps)


@pytest.mark.parametrize("sampled", [None, (4096, 32000)])
def test_the_command_line_says_that_a_sample_was_read(sampled):
    weights = rg.Attention()(*torch.zeros(3, 1, 1, 4, 4)).weights
    reading = replace(TextReading.of("", {"l": weights}, list("abcd")), roles=RoleTable([], sampled))
    console = Console(file=StringIO(), width=200)
    print_roles(console, reading.roles)
    for said in ("\n".join(line.plain for line in role_lines(reading)), console.file.getvalue()):
        assert ("Roles are means over 4096 of 32000 queries, drawn at random." in said) is (sampled is not None)
