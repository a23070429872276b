"""The plan of a call: the engine that runs it, why others cannot, its cost and its predicted time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from regard.attention import Mechanism
from regard.base.errors import RegardError, nearest
from regard.base.shapes import Sizes
from regard.engine.blocked import Blocked, Work
from regard.engine.convolution import ConvolutionEngine
from regard.engine.dense import Dense
from regard.engine.flex import Flex
from regard.engine.formatting import duration, number, rough, size
from regard.engine.fused import Fused, is_top_left
from regard.engine.fused import block_of as whole_block
from regard.engine.kernel import Kernel, pays
from regard.engine.kernel.chosen import Chosen
from regard.engine.kernel.chosen import pays as choosing_pays
from regard.engine.linear import LinearEngine
from regard.engine.problem import Cost, Engine, Problem, Result, empty_result
from regard.engine.recurrent import RecurrentEngine
from regard.engine.reference import Reference
from regard.engine.speed_model import seconds
from regard.engine.transforms import TRANSFORMED, is_transformed
from regard.pieces.mask import Mask, leaves

_ALL = (
    Reference(),
    Dense(),
    Fused(),
    Kernel(),
    Chosen(),
    Blocked(),
    LinearEngine(),
    ConvolutionEngine(),
    RecurrentEngine(),
    Flex(),
)
ENGINES: dict[str, Engine] = {engine.name: engine for engine in _ALL}

#: Bytes of scores up to which dense runs, if no fused kernel computes blocks. Above, flex or blocked runs.
DENSE_BYTES = 32 << 20
#: Pairs of one head up to which one fused call runs, even if the mask forbids most of them.
SMALL_PAIRS = 512 * 512
#: If more than this share of all pairs is scored, the plan names masks without spans as a reason.
MANY = 0.25
#: Least share of pairs that blocks must save to be chosen instead of one fused call.
WORTH_SKIPPING = 0.3


@dataclass(frozen=True, eq=False)
class ExecutionPlan:
    """How `attend` will run a call: engine, cost and predicted time. `print(plan)` gives it in words.

    `requested`: the caller named the engine. `why` is a sentence that gives the reason of a choice, else "".

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 2, 100, 8)
    >>> plan = rg.plan(x, x, x, attention=rg.Attention(), engine="dense")
    >>> plan.engine, plan.cost.pairs, plan.refused["linear"]  # 2 heads of 100 x 100
    ('dense', 20000, 'it needs a FeatureScore with the SumNormalizer')
    """

    engine: str
    requested: bool
    why: str
    problem: Problem = field(repr=False)

    @cached_property
    def refused(self) -> dict[str, str]:
        """The engines that cannot run this call, each with the reason."""
        if self.problem.is_empty:
            return {}
        reasons = {name: engine.refusal(self.problem) for name, engine in ENGINES.items()}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    @cached_property
    def cost(self) -> Cost:
        """Pairs, operations and bytes of the forward pass."""
        if self.problem.is_empty:
            return Cost(0, 0, 0)
        return ENGINES[self.engine].cost(self.problem)

    @cached_property
    def seconds(self) -> float | None:
        """Predicted seconds of the forward pass on this machine, within a factor of 2; None if there is no model."""
        return 0.0 if self.problem.is_empty else seconds(self.engine, self.problem, self.cost)

    @property
    def parts(self) -> tuple[ExecutionPlan, ...]:
        """The plans of single attentions: this plan alone."""
        return (self,)

    def run(self) -> Result:
        """Compute the output."""
        return empty_result(self.problem) if self.problem.is_empty else ENGINES[self.engine].run(self.problem)

    @cached_property
    def quadratic(self) -> tuple[str, ...]:
        """Why this call takes quadratic time or memory although its pieces look as if it need not."""
        s = self.problem.sizes
        return () if s.I * s.J <= SMALL_PAIRS else tuple(_quadratic(self))

    def __str__(self) -> str:
        s, attention = self.problem.sizes, self.problem.attention
        sharing = "" if s.G == s.H else f" sharing {s.G} key/value heads"
        by = "asked for" if self.requested else "chosen"
        lines = [
            f"{attention!r}",
            f"{number(s.I, 'query', 'queries')}, {number(s.J, 'key')}, {number(s.H, 'head')}{sharing} of width "
            f"{s.D}, batch {s.B}.",
            f"The {self.engine} engine is {by}: it {ENGINES[self.engine].description}. {self.why}",
            self._amounts(),
        ]
        lines += [f"Quadratic: {reason}." for reason in self.quadratic]
        lines += [f"The {name} engine cannot run this: {reason}." for name, reason in self.refused.items()]
        return "\n".join(lines)

    def _amounts(self) -> str:
        """Pairs, operations, bytes and seconds as sentences."""
        s = self.problem.sizes
        all_pairs = s.B * s.H * s.I * s.J
        share = f"{self.cost.pairs:,} of {all_pairs:,} pairs are scored ({self.cost.pairs / max(all_pairs, 1):.2%})"
        pairs = share if self.cost.pairs else "No pair is scored"
        item = self.problem.query.element_size()
        moved = item * s.B * (s.H * s.I * (s.D + s.E) + s.G * s.J * (s.D + s.E))
        at_once = all_pairs * 4 * self.problem.attention.score.floats_per_score
        return (
            f"{pairs}: {rough(self.cost.flops)} floating-point operations. It reads and writes {size(moved)} of "
            f"inputs and output, and holds about {size(self.cost.bytes)} besides. All pairs at once would take "
            f"{size(at_once)}."
            + ("" if self.seconds is None else f" The forward pass should take about {duration(self.seconds)} here.")
        )


@dataclass(frozen=True, eq=False)
class CompositePlan:
    """How `attend` will run a composite: `parts` has the plan of each attention, in the order in which they run.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 2, 100, 8)
    >>> latents = rg.composites.ThroughLatents(num_latents=4, head_dim=8, num_heads=2)
    >>> plan = rg.plan(x, x, x, attention=latents, engine="dense")
    >>> [part.cost.pairs for part in plan.parts]  # 2 heads, 4 latents, 100 tokens
    [800, 800]
    """

    composite: Mechanism
    parts: tuple[ExecutionPlan, ...]
    sizes: Sizes

    @property
    def engine(self) -> str:
        """The engines of the parts, each once."""
        return ", ".join(dict.fromkeys(part.engine for part in self.parts))

    @property
    def seconds(self) -> float | None:
        """The predicted time of all parts; None if that of one is not known."""
        seconds = [part.seconds for part in self.parts]
        return None if None in seconds else sum(seconds)  # type: ignore[arg-type]

    def __str__(self) -> str:
        s = self.sizes
        given = f"{number(s.I, 'query', 'queries')}, {number(s.J, 'key')}, {number(s.H, 'head')} of width {s.D}"
        head = f"{self.composite!r}\n{given}, batch {s.B}. It runs {number(len(self.parts), 'attention')}."
        return "\n\n".join([head, *(f"Attention {n} of {len(self.parts)}: {p}" for n, p in enumerate(self.parts, 1))])


def plan(problem: Problem, engine: object = "auto") -> ExecutionPlan:
    """Choose an engine, or check the given one. If it cannot run the call, a `RegardError` names engines that can."""
    if not isinstance(engine, str) or (engine != "auto" and engine not in ENGINES):
        raise RegardError(f"attend: there is no engine {engine!r}. {nearest(str(engine), [*ENGINES, 'auto', 'ring'])}")
    if problem.is_empty:
        return ExecutionPlan(
            "dense" if engine == "auto" else engine, engine != "auto", "There is nothing to score.", problem
        )
    if engine == "auto":
        return ExecutionPlan(*_choose(problem), problem)
    planned = ExecutionPlan(engine, True, "", problem)
    if ENGINES[engine].refusal(problem) is not None:
        able = ", ".join(name for name in ENGINES if name not in planned.refused) or "none"
        raise RegardError(
            f"attend: the {engine} engine cannot run {problem.attention!r}: {planned.refused[engine]}. "
            f"Engines that can: {able}."
        )
    return planned


def _choose(problem: Problem) -> tuple[str, bool, str]:
    """The first engine in a fixed order that can run and is worth it: its name, False (not requested), and why."""
    family = problem.attention.family
    if (only := family.engine) is not None:
        if (reason := ENGINES[only].refusal(problem)) is not None:
            raise RegardError(f"attend: a transition needs the {only} engine, which cannot run this: {reason}.")
        return only, False, family.purpose
    linear_refusal = ENGINES["linear"].refusal(problem)
    if linear_refusal is None:
        return "linear", False, "It sums feature scores over keys, and scores pairs only inside chunks."
    if ENGINES["convolution"].refusal(problem) is None:
        return "convolution", False, "It computes no single weights, and sums over distances once."
    if problem.state is not None:
        raise RegardError(
            f"attend: a RecurrentCache needs the linear engine, which cannot run this: {linear_refusal}. GrowingCache "
            "keeps all keys, and RingCache(size) those of a window or a short convolution."
        )
    if choosing_pays(problem):
        return "chosen", False, "It computes the chosen keys of each query, and blocks would compute most others too."
    if pays(problem) and ENGINES["kernel"].refusal(problem) is None:
        return "kernel", False, "It is the fastest engine for softmax over this many queries and keys."
    if ENGINES["fused"].refusal(problem) is None and not _worth_skipping(problem):
        return "fused", False, "One call of the kernel is enough: few pairs in all, or blocks would skip few more."
    if is_transformed():
        return "dense", False, f"{TRANSFORMED[0].upper()}{TRANSFORMED[1:]}."
    dense = Dense().cost(problem).bytes
    if Work.of(problem).flash is None and dense <= DENSE_BYTES:
        return "dense", False, f"All scores fit in {size(dense)}."
    if on_gpu(problem) and ENGINES["flex"].refusal(problem) is None:
        return "flex", False, "It computes only the blocks that the spans of the mask allow."
    if (reason := ENGINES["blocked"].refusal(problem)) is not None:
        raise RegardError(
            f"attend: {problem.attention!r} has {size(dense)} of scores, and cannot run in blocks: {reason}. "
            "With engine='dense' it holds all scores at once."
        )
    work = Work.of(problem)
    inside = "The fused kernel runs" if work.flash is not None else "Whole rows of scores are computed, and not kept,"
    return "blocked", False, f"{inside} inside blocks of {work.block_size} queries."


def _quadratic(planned: ExecutionPlan) -> Iterator[str]:
    """The reasons of `ExecutionPlan.quadratic`: feature scores that no sum computes, flex on a CPU, unknown masks.

    Such a normalizer divides by a sum of scores, so its users expect linear time. A mask without spans of its own
    answers "every key may be needed".
    """
    problem, attention = planned.problem, planned.problem.attention
    is_sum = attention.normalizer.needs_nonnegative and planned.engine != "linear"
    if is_sum and (reason := ENGINES["linear"].refusal(problem)) is not None:
        piece = attention.bias or (f"dropout={attention.dropout}" if problem.dropout else attention.mask)
        yield f"all pairs are scored because of {piece!r}, and sums over keys would take linear time: {reason}"
    if planned.engine == "flex" and not on_gpu(problem):
        yield "on CPU FlexAttention holds all scores at once, and the blocked engine does not"
    unknown = {type(leaf).__name__ for leaf in leaves(attention.mask) if type(leaf).any_allowed is Mask.any_allowed}
    if unknown and planned.cost.pairs > MANY * problem.sizes.B * problem.sizes.H * problem.sizes.I * problem.sizes.J:
        yield f"{', '.join(sorted(unknown))} has no spans, so every pair that the other masks allow is scored"


def on_gpu(problem: Problem) -> bool:
    """Whether the call is on a CUDA GPU. On CPU compiled FlexAttention has no backward pass and no row statistic."""
    return problem.query.device.type == "cuda"


def _worth_skipping(problem: Problem) -> bool:
    """Whether blocks save enough pairs to be chosen instead of one fused call.

    They save none if the kernel's causal flag is the mask, or if the mask allows every pair.
    """
    s = problem.sizes
    if is_top_left(problem) or whole_block(problem).full or s.I * s.J <= SMALL_PAIRS:
        return False
    return Blocked().cost(problem).pairs < (1 - WORTH_SKIPPING) * s.B * s.H * s.I * s.J
