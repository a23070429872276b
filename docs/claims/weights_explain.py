"""Two models with equal answers and other weights (Jain & Wallace 2019, arXiv:1902.10186; Wiegreffe & Pinter 2019).

Model A is trained to say which of two letters occurs more often in a word. Model B is trained to give A's answers and
to attend only to the last letter.
"""

import torch
from torch import nn
from torch.nn import functional as F

import regard as rg


class Reader(nn.Module):
    """A recurrent encoder, one query that attends to all its states, and two answers."""

    def __init__(self, width=32):
        super().__init__()
        self.letters = nn.Embedding(6, width)
        self.encoder = nn.GRU(width, width // 2, bidirectional=True, batch_first=True)
        self.query = nn.Parameter(torch.randn(1, 1, 1, width))
        self.answer = nn.Linear(width, 2)

    def forward(self, words):
        states = self.encoder(self.letters(words))[0][:, None]
        marks = torch.eye(words.shape[1]).expand(len(words), 1, -1, -1)  # their weighted mean is the weights
        query = self.query.expand(len(words), -1, -1, -1)
        attended = rg.Attention()(query, states, torch.cat((states, marks), 3))
        context, weights = attended.output[:, 0, 0].split((states.shape[-1], words.shape[1]), 1)
        return F.log_softmax(self.answer(context), -1), weights


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


def imitate(other):
    """A loss: the answers of `other`, and all weight on the last letter."""

    def loss(model, words, _):
        with torch.no_grad():
            target, _ = other(words)
        answer, weights = model(words)
        return 5 * F.kl_div(answer, target, log_target=True, reduction="batchmean") - weights[:, -1].log().mean()

    return loss


for seed in (0, 1, 2):
    torch.manual_seed(seed)
    first = train(Reader(), lambda model, words, labels: F.nll_loss(model(words)[0], labels))
    second = train(Reader(), imitate(first))
    words, labels = draw(2000)
    with torch.no_grad():
        (answer_a, map_a), (answer_b, map_b) = first(words), second(words)
    difference = (answer_a.exp() - answer_b.exp()).abs()[:, 0]
    right_a, right_b = ((answer.argmax(1) == labels).float().mean() for answer in (answer_a, answer_b))
    equal = (answer_a.argmax(1) == answer_b.argmax(1)).float().mean()
    print(f"seed {seed}, right: A {right_a:.1%}, B {right_b:.1%}")
    print(f"  answers: {equal:.1%} equal, probabilities differ by {difference.mean():.3f}")
    print(f"  weight on the last letter: A {map_a[:, -1].mean():.3f}, B {map_b[:, -1].mean():.3f}")
    print(f"  maps: divergence {divergence(map_a, map_b).mean():.2f} of at most 0.69 nats")
    assert equal > 0.95 and difference.mean() < 0.05
    assert divergence(map_a, map_b).mean() > 0.35
