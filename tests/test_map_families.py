"""What every family of maps has: shares of signed weights, and folds that refuse signs."""

import pytest
import torch

import regard as rg
from regard.attention import Attention
from regard.maps.attention_map import AttentionMap
from regard.maps.indices import indices
from regard.pieces.grid import Grid
from regard.positions import Positions


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
    (mass,) = seen.summarize(rg.SignedMass())
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
