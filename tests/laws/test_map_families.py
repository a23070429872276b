"""What every family of maps has: shares of signed weights, and reductions that refuse signs."""

import pytest
import torch

import regard as rg
from regard.attention import Attention
from regard.base.positions import Positions
from regard.maps.attention_map import AttentionMap
from regard.maps.indices import indices
from regard.maps.stored import load_map, save_map
from regard.pieces.grid import Grid


class Signed(AttentionMap):
    """A map of given weights, which may be negative."""

    is_signed = True

    def __init__(self, weights, batch=None, head=None):
        B, H, I, J = weights.shape
        self.weights, self.positions = weights, Positions.aligned_to_end(I, J)
        self.attention = Attention(mask=rg.causal())
        self.grid = Grid.whole(self.positions, B, H, I)

    def select(self, batch, head):
        b, h = (indices("weights.select", "axis", x, n) for x, n in zip((batch, head), self.shape, strict=False))
        return Signed(self.weights[b][:, h])

    def _weights(self, rows, cols):
        return self.weights[:, :, rows][..., cols]


@pytest.fixture
def weights():
    torch.manual_seed(3)
    drawn = torch.randn(2, 3, 7, 9).tril(2)
    drawn[0, 0, 3] = 0  # a row without any weight
    return drawn


@pytest.mark.usefixtures("small_blocks")
def test_a_new_family_defines_weights_and_has_the_whole_interface(weights):
    seen = Signed(weights)
    torch.testing.assert_close(seen.dense(), weights)
    torch.testing.assert_close(seen[1, 2, [3, 0], 1:4], weights[1, 2, [3, 0], 1:4])
    torch.testing.assert_close(seen.received(), weights.sum(2))
    torch.testing.assert_close(seen.mass([0, 4]), weights[..., [0, 4]].sum(-1))
    (mass,) = seen.summarize(rg.maps.SignedMass())
    torch.testing.assert_close(mass.positive, weights.clamp_min(0).sum(-1))
    torch.testing.assert_close(mass.negative, weights.clamp_max(0).sum(-1))
    assert repr(seen) == "AttentionMap(2 x 3 heads x 7 queries x 9 keys, signed)"


@pytest.mark.usefixtures("small_blocks")
def test_shares_are_the_weights_without_sign_divided_by_their_sum(weights):
    shares = Signed(weights).shares()
    sums = weights.abs().sum(-1, keepdim=True)
    expected = torch.where(sums > 0, weights.abs() / sums, 0.0)
    torch.testing.assert_close(shares.dense(), expected)
    torch.testing.assert_close(shares.entropy(), torch.special.entr(expected).sum(-1))
    torch.testing.assert_close(shares.select([1], [2, 0]).dense(), expected[[1]][:, [2, 0]])
    torch.testing.assert_close(shares.top(2).weights, expected.topk(2).values)
    assert not shares.is_signed


def test_statistics_of_shares_refuse_signed_weights(weights):
    for ask in (AttentionMap.entropy, AttentionMap.distance):
        with pytest.raises(rg.RegardError, match=r"needs shares.*weights.shares\(\).*SignedMass"):
            ask(Signed(weights))


def test_a_saved_map_keeps_its_signs(weights, tmp_path):
    save_map(tmp_path / "map.safetensors", Signed(weights))
    loaded = load_map(tmp_path / "map.safetensors")
    torch.testing.assert_close(loaded.dense(), weights)
    torch.testing.assert_close(loaded.shares().entropy(), Signed(weights).shares().entropy())
    with pytest.raises(rg.RegardError, match="needs shares"):
        loaded.entropy()


def test_a_heatmap_of_signed_weights_has_two_colors(weights):
    figure = rg.heatmap(Signed(weights), head=0, vmax=None)
    image = figure.axes[0].images[0]
    largest = float(weights[0, 0].abs().max())
    assert (image.norm.vmin, image.norm.vmax) == (pytest.approx(-largest), pytest.approx(largest))
    for value in (0.3 * largest, largest):
        red, _, blue, _ = image.to_rgba(value)
        mirrored = image.to_rgba(-value)
        assert red > blue and mirrored[2] > mirrored[0]
    numbers = [text.get_text() for text in figure.axes[0].texts]
    assert any(number.startswith("-") for number in numbers) and "-0.00" not in numbers
    with pytest.raises(rg.RegardError, match="at least 0"):
        rg.heatmap(weights)  # an array with negative numbers may be scores


def test_a_paper_figure_of_signed_weights_shows_shares_and_says_so(weights):
    names = [f"q{n}" for n in range(7)], [f"k{n}" for n in range(9)]
    figure = rg.figure(Signed(weights).select([1], [0, 1, 2]), names, panels=["map"], layer=0, head=1)
    assert "Weights have signs; shares of |weight| are shown" in figure.caption
    shares = weights[1, 1].abs() / weights[1, 1].abs().sum(-1, keepdim=True)
    drawn = {(row[5], row[7]): row[8] for row in figure.rows[1:]}
    assert len(drawn) == 63
    for i in range(7):
        for j in range(9):
            assert drawn[f"q{i}", f"k{j}"] == pytest.approx(float(shares[i, j]), abs=1e-6)
