"""The engine `recurrent`: runs attentions with a transition."""

from __future__ import annotations

from regard.engine.problem import Cost, Engine, Problem, Result
from regard.engine.recurrent import chunked
from regard.engine.recurrent.running import FEW, recur
from regard.pieces.transition import with_heads


class RecurrentEngine(Engine):
    """A memory that goes from token to token, or from chunk to chunk."""

    name = "recurrent"
    description = "carries a memory of fixed size over the tokens, in O(n) time and memory"

    def refusal(self, problem: Problem) -> str | None:
        if problem.attention.transition is None:
            return "it needs a transition, such as Attention(transition=GatedDelta())"
        return None

    def run(self, problem: Problem) -> Result:
        steps, state, value, memory = problem.prepared.steps, problem.state, problem.value, problem.memory
        assert steps is not None
        if memory is not None:
            steps, value, state = steps.after(memory.num_tokens), value[:, :, memory.num_tokens :], memory.state
        output, last = recur(steps, with_heads(value, problem.sizes.H), state)
        return Result(output.to(problem.value.dtype), None, last)

    def cost(self, problem: Problem) -> Cost:
        s, steps = problem.sizes, problem.prepared.steps
        assert steps is not None
        chunk = min(chunked.CHUNK, s.J) if s.J > FEW else 1
        products = 2 if steps.address is None else 4  # of pairs, and of states
        pairs = s.B * s.H * s.I * (chunk + 1) // 2
        flops = products * (pairs * (s.D + s.E) // 2 + 2 * s.B * s.H * s.J * s.D * s.E)
        held = min(s.J, chunked.RUN * chunk // max(1, s.B * s.H) + chunk) * s.B * s.H
        return Cost(pairs, flops, 4 * held * (4 * (s.D + s.E) + 2 * chunk + s.D * s.E // chunk))
