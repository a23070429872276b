"""`watch` on additive and multiplicative attention written by hand, against the weights that each class returns."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regard as rg
from regard.hf.capture import module_rerun
from watching import assert_identical, watched

#: Texts, keys, steps and channels all differ, so that no axis can stand in for another.
B, J, T, C = 3, 5, 4, 6


@pytest.fixture(params=[0, module_rerun.SMALL], ids=["run again", "small"])
def size(request, monkeypatch):
    monkeypatch.setattr(module_rerun, "SMALL", request.param)


def concat_energy(linear, state, memory):
    """v' tanh(W [state; memory]) without v', for a state (B, C) and a memory (B, J, C)."""
    repeated = state.unsqueeze(1).repeat(1, memory.shape[1], 1)
    return torch.tanh(linear(torch.cat((repeated, memory), dim=2)))


class ConcatAttention(nn.Module):
    """Returns the context and the weights (B, J)."""

    def __init__(self, combine=None):
        super().__init__()
        self.attn, self.v = nn.Linear(2 * C, C), nn.Linear(C, 1, bias=False)
        self.combine = combine or (lambda w, memory: torch.bmm(w.unsqueeze(1), memory).squeeze(1))

    def forward(self, state, memory):
        weights = F.softmax(self.v(concat_energy(self.attn, state, memory)).squeeze(2), dim=1)
        return self.combine(weights, memory), weights


class ConcatWeights(ConcatAttention):
    """Returns the weights alone; the decoder multiplies the encoder's states by them."""

    def forward(self, state, memory):
        energy = concat_energy(self.attn, state, memory)
        return F.softmax(self.v(energy).squeeze(2), dim=1)


class Bahdanau(nn.Module):
    """The sum of two projections; the weights are (B, 1, J)."""

    def __init__(self):
        super().__init__()
        self.Wa, self.Ua, self.Va = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, 1)

    def forward(self, state, memory):
        scores = self.Va(torch.tanh(self.Wa(state.unsqueeze(1)) + self.Ua(memory))).squeeze(2).unsqueeze(1)
        weights = F.softmax(scores, dim=-1)
        return torch.bmm(weights, memory).squeeze(1), weights.squeeze(1)


class OverMiddleAxis(nn.Module):
    """The softmax runs over the second of three axes, and the context is a sum."""

    def __init__(self):
        super().__init__()
        self.W1, self.W2, self.attention_vector = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, 1)

    def forward(self, state, memory):
        weights = self.attention_vector(torch.tanh(self.W1(memory) + self.W2(state.unsqueeze(1)))).softmax(1)
        return (weights * memory).sum(dim=1), weights.squeeze(-1)


class LuongAttn(nn.Module):
    """The three scores of Luong et al., with the sequence first: a state (1, B, C), a memory (J, B, C)."""

    def __init__(self, method):
        super().__init__()
        self.method = method
        width = {"dot": 0, "general": C, "concat": 2 * C}[method]
        self.attn = nn.Linear(width, C) if width else None
        self.v = nn.Parameter(torch.randn(C))

    def scores(self, state, memory):
        if self.method == "dot":
            return (state * memory).sum(2)
        if self.method == "general":
            return (state * self.attn(memory)).sum(2)
        return (self.v * self.attn(torch.cat((state.expand(len(memory), -1, -1), memory), 2)).tanh()).sum(2)

    def forward(self, state, memory):
        return F.softmax(self.scores(state, memory).t(), dim=1).unsqueeze(1)


class RecurrentDecoder(nn.Module):
    """Calls its attention at every step, and keeps the weights that were used."""

    def __init__(self, attention, change=lambda w: w):
        super().__init__()
        self.attention, self.rnn, self.change = attention, nn.GRU(2 * C, C, batch_first=True), change
        self.returns_weights = isinstance(attention, ConcatWeights | LuongAttn)

    def forward(self, embedded, memory):
        state, used = memory.new_zeros(1, len(memory), C), []
        for step in embedded.unbind(1):
            context, weights = self.context(state, memory)
            state = self.rnn(torch.cat((step, context), -1)[:, None], state)[1]
            used.append(weights.detach())
        self.used = torch.stack(used, 1)[:, None]
        return state[0]

    def context(self, state, memory):
        if isinstance(self.attention, LuongAttn):
            weights = self.change(self.attention(state, memory.transpose(0, 1)))
            return weights.bmm(memory).squeeze(1), weights.squeeze(1)
        if self.returns_weights:
            weights = self.change(self.attention(state[0], memory))
            return torch.bmm(weights.unsqueeze(1), memory).squeeze(1), weights
        return self.attention(state[0], memory)


class Translator(nn.Module):
    def __init__(self, attention, **options):
        super().__init__()
        self.encoder, self.decoder = nn.GRU(C, C, batch_first=True), RecurrentDecoder(attention, **options)

    def forward(self, source, target):
        return self.decoder(target, self.encoder(source)[0])


def sentences(num_texts=B, num_keys=J):
    torch.manual_seed(2)
    return {"source": 2 * torch.randn(num_texts, num_keys, C), "target": torch.randn(num_texts, T, C)}


ATTENTIONS = {
    "concat": ConcatAttention,
    "concat, weights alone": ConcatWeights,
    "additive": Bahdanau,
    "over the middle axis": OverMiddleAxis,
    "dot": lambda: LuongAttn("dot"),
    "general": lambda: LuongAttn("general"),
    "luong concat": lambda: LuongAttn("concat"),
}


@pytest.mark.parametrize("lengths", [(B, J), (1, J), (B, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_the_steps_of_a_decoder_form_one_map(kind, lengths, size):
    if kind == "over the middle axis" and lengths == (B, 1):
        lengths = (B, 2)
    model, inputs = Translator(ATTENTIONS[kind]()), sentences(*lengths)
    with torch.no_grad():
        plain = model(**inputs)
    output, seen = watched(model, inputs)
    assert_identical(plain, output)
    assert seen.names == seen.cross.names == ["decoder.attention"] and not seen.missing
    assert len(seen.calls(0)) == 1
    torch.testing.assert_close(seen[0].dense(), model.decoder.used, atol=1e-6, rtol=0)
    torch.testing.assert_close(seen[0].entropy(), torch.special.entr(model.decoder.used).sum(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["concat", "general"])
def test_every_sentence_has_a_map(kind, size):
    """The second sentence has its own encoder states, even if the texts are the same."""
    model, used = Translator(ATTENTIONS[kind]()), []
    with rg.watch(model) as seen, torch.no_grad():
        for inputs in (sentences(), sentences(), sentences(2, 7)):
            model(**inputs)
            used.append(model.decoder.used)
            torch.testing.assert_close(seen[0].dense(), used[-1], atol=1e-6, rtol=0)  # in the middle of the block
    for weights, wanted in zip(seen.calls(0), used, strict=True):
        torch.testing.assert_close(weights.dense(), wanted, atol=1e-6, rtol=0)


def test_steps_read_within_the_loop_have_the_rows_so_far(size):
    attention, memory, states = ConcatAttention(), torch.randn(B, J, C), torch.randn(T, B, C)
    used = []
    with rg.watch(attention) as seen, torch.no_grad():
        for state in states:
            used.append(attention(state, memory)[1])
            torch.testing.assert_close(seen[0].dense(), torch.stack(used, 1)[:, None], atol=1e-6, rtol=0)


def test_a_memory_written_between_two_steps_is_another_one():
    attention, memory = ConcatAttention(), torch.randn(B, J, C)
    with rg.watch(attention) as seen, torch.no_grad():
        attention(torch.randn(B, C), memory)
        memory[:, 0] = 0
        attention(torch.randn(B, C), memory)
    assert [weights.shape for weights in seen.calls(0)] == [(B, 1, 1, J)] * 2


def test_a_memory_of_parameters_joins_no_calls():
    class PooledAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Parameter(torch.randn(J, C))

        def forward(self, state):
            weights = torch.softmax(state @ self.tokens.T, -1)
            return weights @ self.tokens

    model = PooledAttention()
    with rg.watch(model) as seen:
        model(torch.randn(1, C))
        model(torch.randn(1, C))
    assert len(seen.calls(0)) == 2


#: Ways to sum values (B, J, C) by weights (B, J).
COMBINATIONS = {
    "bmm": lambda w, m: torch.bmm(w.unsqueeze(1), m),
    "indexed": lambda w, m: w[:, None] @ m,
    "on the right": lambda w, m: m.transpose(1, 2) @ w.unsqueeze(-1),
    "einsum": lambda w, m: torch.einsum("bj,bjc->bc", w, m),
    "einsum, values first": lambda w, m: torch.einsum("bjc,bj->bc", m, w),
    "sum": lambda w, m: torch.sum(w.unsqueeze(2) * m, dim=1),
    "sum, values first": lambda w, m: (m * w[..., None]).sum(1, keepdim=True),
    "view": lambda w, m: w.view(len(w), 1, -1).bmm(m),
    "dropout": lambda w, m: F.dropout(w, 0.5, training=False).unsqueeze(1).bmm(m),
}


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_any_weighted_sum_shows_the_weights(combination, size):
    model, inputs = ConcatAttention(COMBINATIONS[combination]), {"state": torch.randn(B, C)}
    (_, weights), seen = watched(model, inputs | {"memory": torch.randn(B, J, C)})
    torch.testing.assert_close(seen[0].dense(), weights[:, None, None], atol=1e-6, rtol=0)


class OneText(nn.Module):
    """Self-attention of one text (n, C) without a batch, and its weights."""

    def __init__(self, dim):
        super().__init__()
        self.W_q, self.W_k, self.W_v, self.dim = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C), dim

    def forward(self, x):
        weights = torch.softmax(self.W_q(x) @ self.W_k(x).T / C**0.5, dim=self.dim)
        return weights @ self.W_v(x), weights


def test_a_text_without_a_batch(size):
    (_, weights), seen = watched(OneText(-1), {"x": torch.randn(J, C)})
    torch.testing.assert_close(seen[0].dense(), weights[None, None], atol=1e-6, rtol=0)


def test_the_first_axis_may_be_the_keys(size):
    class SequenceFirstAttention(nn.Module):
        def forward(self, state, memory):
            weights = F.softmax((state * memory).sum(2), dim=0)
            return torch.bmm(weights.t().unsqueeze(1), memory.transpose(0, 1)), weights

    (_, weights), seen = watched(
        SequenceFirstAttention(), {"state": torch.randn(1, B, C), "memory": torch.randn(J, B, C)}
    )
    torch.testing.assert_close(seen[0].dense(), weights.T[:, None, None], atol=1e-6, rtol=0)


def test_a_decoder_that_attends_in_its_own_forward(size):
    """One step a call, with the weights over a fixed number of places."""

    class AttnDecoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.gru, self.out = nn.Linear(2 * C, J), nn.GRU(C, C), nn.Linear(2 * C, 9)

        def forward(self, embedded, state, memory):
            weights = F.softmax(self.attn(torch.cat((embedded[0], state[0]), 1)), dim=1)
            context = torch.bmm(weights.unsqueeze(0), memory.unsqueeze(0))
            output, state = self.gru(embedded, state)
            return F.log_softmax(self.out(torch.cat((output[0], context[0]), 1)), dim=1), state, weights

    model, memory, state, used = AttnDecoder(), torch.randn(J, C), torch.zeros(1, 1, C), []
    with rg.watch(model) as seen, torch.no_grad():
        for embedded in torch.randn(T, 1, 1, C):
            _, state, weights = model(embedded, state, memory)
            used.append(weights)
    assert len(seen.calls(0)) == 1
    torch.testing.assert_close(seen[0].dense(), torch.stack(used, 1)[:, None], atol=1e-6, rtol=0)


# No wrong map


CHANGES = {
    "masked": (lambda w: w * (torch.arange(w.shape[-1]) < 3), "mul"),
    "scaled": (lambda w: w / 2, "div"),
    "in place": (lambda w: w.clamp_(max=0.1), "clamp_"),
    "moved by a place": (lambda w: w.roll(1, -1), "roll"),
    "reordered": (lambda w: w[..., torch.arange(J).flip(0)], "getitem"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["concat, weights alone", "dot"])
def test_weights_changed_by_the_caller_are_refused(kind, change):
    changed, name = CHANGES[change]
    model = Translator(ATTENTIONS[kind](), change=changed)
    with pytest.raises(rg.RegardError, match=rf"changes its weights after the softmax \(.*{name}"):
        watched(model, sentences())


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_weights_changed_in_the_class_are_refused(combination, change):
    changed, name = CHANGES[change]
    model = ConcatAttention(lambda w, m: COMBINATIONS[combination](changed(w), m))
    with pytest.raises(rg.RegardError, match=rf"changes its weights after the softmax \(.*{name}"), torch.no_grad():
        watched(model, {"state": torch.randn(B, C), "memory": torch.randn(B, J, C)})


def test_products_changed_before_their_sum_are_refused():
    model = ConcatAttention(lambda w, m: (w.unsqueeze(2) * m).relu().sum(1))
    with pytest.raises(rg.RegardError, match=r"changes its weights after the softmax \(relu\)"):
        watched(model, {"state": torch.randn(B, C), "memory": torch.randn(B, J, C)})


def test_one_changed_step_refuses_all():
    steps = iter([False, False, True, False])
    model = Translator(ConcatWeights(), change=lambda w: w * 0.5 if next(steps) else w)
    with pytest.raises(rg.RegardError, match="changes its weights"):
        watched(model, sentences())


@pytest.mark.parametrize("dim", [0, -2])
def test_a_softmax_over_the_queries_is_no_map(dim):
    with pytest.raises(rg.RegardError, match="no product with it was found that sums over the same axis"):
        watched(OneText(dim), {"x": torch.randn(J, C)})


def test_weights_that_nobody_multiplies_say_what_to_watch():
    model, inputs = ConcatWeights(), {"state": torch.randn(B, C), "memory": torch.randn(B, J, C)}
    with pytest.raises(rg.RegardError, match="watch the model that multiplies the values by them"):
        watched(model, inputs)


def test_weights_of_one_text_for_values_of_many_are_refused():
    class SharedAttention(nn.Module):
        def forward(self, scores, memory):
            return F.softmax(scores, dim=-1) @ memory

    with pytest.raises(rg.RegardError, match="no product with it was found"):
        watched(SharedAttention(), {"scores": torch.randn(J, J), "memory": torch.randn(B, J, C)})


def test_a_router_beside_an_attention_is_no_attention():
    class Routed(nn.Module):
        """Experts are mixed by a softmax (texts, experts), after an attention."""

        def __init__(self):
            super().__init__()
            self.self_attn, self.router = ConcatAttention(), nn.Linear(C, 2)

        def forward(self, state, memory):
            context, _ = self.self_attn(state, memory)
            experts = torch.stack((context, -context), 1)
            return torch.einsum("be,bec->bc", F.softmax(self.router(context), -1), experts)

    _, seen = watched(Routed(), {"state": torch.randn(B, C), "memory": torch.randn(B, J, C)})
    assert seen.names == ["self_attn"] and not seen.missing


def test_statistics_of_attention_written_by_hand():
    model = Translator(ConcatWeights())
    _, seen = watched(model, sentences(), keep="statistics", reductions=[rg.maps.Entropy()])
    wanted = torch.special.entr(model.decoder.used[:, :, -1:]).sum(-1)
    torch.testing.assert_close(seen.statistics["decoder.attention"].of(rg.maps.Entropy), wanted, atol=1e-5, rtol=0)


def test_an_attention_of_separate_heads_that_is_a_module_of_its_own(size):
    """Its queries have the axes (B, H, I, C), so no input has three."""

    class ScaledDotProductAttention(nn.Module):
        def forward(self, q, k, v):
            weights = F.softmax(q @ k.transpose(-2, -1), dim=-1)
            return weights @ v, weights

    q, k = torch.randn(B, 2, T, C), torch.randn(B, 2, J, C)
    (_, weights), seen = watched(ScaledDotProductAttention(), {"q": q, "k": k, "v": k})
    torch.testing.assert_close(seen[0].dense(), weights, atol=1e-6, rtol=0)


class Hand(nn.Module):
    """Names that say nothing, but variables that say q, k and v."""

    def __init__(self):
        super().__init__()
        self.p = nn.Linear(C, 3 * C)

    def forward(self, x):
        q, k, v = self.p(x).chunk(3, -1)
        return (q @ k.mT / C**0.5).softmax(-1) @ v


class BesideAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.hand = rg.nn.MultiHeadAttention(C, 2), Hand()

    def forward(self, x):
        output, _ = self.attention(x)
        return self.hand(output)


def test_variables_beside_a_softmax_are_as_good_as_names():
    """Alone, and beside attention that is known by its name: nothing is left out without a word."""
    model, x = BesideAttention().eval(), torch.randn(B, J, C)
    with torch.no_grad(), rg.watch(model) as seen:
        output = model(x)
    with torch.no_grad():
        assert_identical(output, model(x))
        inner, _ = model.attention(x)
        q, k, _ = model.hand.p(inner).chunk(3, -1)
    torch.testing.assert_close(seen[1].dense()[:, 0], (q @ k.mT / C**0.5).softmax(-1))
