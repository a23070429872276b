"""Two models that answer alike and look elsewhere (Jain & Wallace 2019, arXiv:1902.10186; Wiegreffe & Pinter 2019).

Model A is trained to tell which of two letters a word has more of. Model B is trained to give A's answers while it
looks at nothing but the last letter.
"""

import torch
from torch import nn
from torch.nn import functional as F

import regard as rg


class Reader(nn.Module):
    """A recurrent encoder, one query that asks all its states, and two answers."""

    def __init__(self, width=32):
        super().__init__()
        self.letters = nn.Embedding(6, width)
        self.encoder = nn.GRU(width, width // 2, bidirectional=True, batch_first=True)
        self.query = nn.Parameter(torch.randn(1, 1, 1, width))
        self.answer = nn.Linear(width, 2)

    def forward(self, words):
        states = self.encoder(self.letters(words))[0][:, None]
        marks = torch.eye(words.shape[1]).expand(len(words), 1, -1, -1)  # mixed by the weights they are the weights
        query = self.query.expand(len(words), -1, -1, -1)
        mixed = rg.attend(rg.Attention(), query, states, torch.cat((states, marks), 3))
        read, weights = mixed.output[:, 0, 0].split((states.shape[-1], words.shape[1]), 1)
        return F.log_softmax(self.answer(read), -1), weights


def draw(count):
    words = torch.randint(6, (count, 15))
    words = words[(words == 0).sum(1) != (words == 1).sum(1)]
    return words, ((words == 0).sum(1) > (words == 1).sum(1)).long()


def divergence(p, q):
    """Jensen-Shannon divergence of the rows in nats: at most log 2 = 0.693."""
    middle = ((p + q) / 2).clamp_min(1e-12).log()
    return ((p * (p.clamp_min(1e-12).log() - middle)).sum(-1) + (q * (q.clamp_min(1e-12).log() - middle)).sum(-1)) / 2


def train(model, loss, steps=400):
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, *draw(128)).backward()
        optimizer.step()
    return model.eval()


def elsewhere(other):
    """Give the answers of `other`, and look at the last letter whatever it is."""

    def loss(model, words, _):
        with torch.no_grad():
            wanted, _ = other(words)
        told, weights = model(words)
        return 5 * F.kl_div(told, wanted, log_target=True, reduction="batchmean") - weights[:, -1].log().mean()

    return loss


torch.manual_seed(0)
first = train(Reader(), lambda model, words, labels: F.nll_loss(model(words)[0], labels))
second = train(Reader(), elsewhere(first))
words, labels = draw(2000)
with torch.no_grad():
    (one, map_one), (other, map_other) = first(words), second(words)
apart = (one.exp() - other.exp()).abs()[:, 0]
print(f"right: A {(one.argmax(1) == labels).float().mean():.1%}, B {(other.argmax(1) == labels).float().mean():.1%}")
print(
    f"answers: {(one.argmax(1) == other.argmax(1)).float().mean():.1%} the same, probabilities {apart.mean():.3f} apart"
)
print(f"weight on the last letter: A {map_one[:, -1].mean():.3f}, B {map_other[:, -1].mean():.3f}")
print(f"maps: divergence {divergence(map_one, map_other).mean():.2f} of at most 0.69 nats")
assert (one.argmax(1) == other.argmax(1)).float().mean() > 0.95 and apart.mean() < 0.05
assert divergence(map_one, map_other).mean() > 0.35
