"""`faithfulness` removes and inserts tokens in the order of their relevance, and compares with random orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.attribution.inputs import TextInputs, Translates, takes
from regard.attribution.target import Explained, explained, predicts_next
from regard.attribution.traced_run import check_model
from regard.base.checks import Size, checked
from regard.base.errors import MissingPackage, RegardError
from regard.base.shapes import as_tensor

#: Tokens removed in the sentence, at most.
NAMED = 5
#: Sequences of a batch, and tokens of a batch, while the curves are computed.
ROWS, TOKENS = 64, 1 << 14


@dataclass(frozen=True, eq=False)
class FaithfulnessCurves:
    """Deletion and insertion curves of an order of tokens, and those of random orders (Petsiuk et al. 2018).

    `counts` (C,) are numbers of tokens. `deletion[c]` is the score without the first counts[c] tokens of the order,
    `insertion[c]` with these only. `random_deletion` and `random_insertion` (S, C) are those of S random orders.
    `deletion_area` and `insertion_area` are the areas between the curve and the mean of the random ones, per token:
    above 0 the order is better than chance. The score is a probability, or the target itself if it is a function.

    >>> import torch, regard as rg
    >>> falls, rises = torch.tensor([1.0, 0.2, 0.0]), torch.tensor([0.0, 0.8, 1.0])
    >>> line = torch.tensor([[1.0, 0.5, 0.0]])
    >>> test = rg.types.FaithfulnessCurves(torch.tensor([0, 1, 2]), falls, rises, line, line.flip(1), "p")
    >>> round(test.deletion_area, 3), round(test.insertion_area, 3)
    (0.15, 0.15)
    """

    counts: Tensor
    deletion: Tensor
    insertion: Tensor
    random_deletion: Tensor
    random_insertion: Tensor
    measure: str

    @property
    def deletion_area(self) -> float:
        """How much lower the deletion curve is than that of random orders, on average."""
        return _area(self.counts, self.random_deletion.mean(0) - self.deletion)

    @property
    def insertion_area(self) -> float:
        """How much higher the insertion curve is than that of random orders, on average."""
        return _area(self.counts, self.insertion - self.random_insertion.mean(0))

    @property
    def better_than(self) -> tuple[int, int]:
        """The number of random orders with a smaller area: of deletion, and of insertion.

        The area of a random order, too, is that between its curve and the mean of all random ones.
        """
        falls = self.random_deletion.mean(0) - self.random_deletion
        rises = self.random_insertion - self.random_insertion.mean(0)
        return (
            sum(self.deletion_area > _area(self.counts, curve) for curve in falls),
            sum(self.insertion_area > _area(self.counts, curve) for curve in rises),
        )

    @property
    def is_faithful(self) -> bool:
        """Whether both curves are better than those of every random order."""
        return min(self.better_than) == len(self.random_deletion) and min(self.deletion_area, self.insertion_area) > 0

    @property
    def sentences(self) -> list[str]:
        """The result in words: a removal of a few tokens, and the areas."""
        # the place of the number of removed tokens that the sentence names
        at = int((self.counts - num_named(int(self.counts[-1]))).abs().argmin())
        count, before, after = int(self.counts[at]), float(self.deletion[0]), float(self.deletion[at])
        drawn = self.random_deletion[:, at]
        tokens = "tokens" if count != 1 else "token"
        verb = "lowers" if after < before else "raises" if after > before else "leaves"
        first = (
            f"Removing the {count} {tokens} with the largest relevance {verb} {self.measure} from {before:.3g} to "
            f"{after:.3g}; {count} random {tokens} give {float(drawn.mean()):.3g} ({float(drawn.min()):.3g} to "
            f"{float(drawn.max()):.3g} in {len(drawn)} draws)."
        )
        deleted, inserted = self.better_than
        verdict = "faithful" if self.is_faithful else "do not rely on it" if max(deleted, inserted) == 0 else "mixed"
        second = (
            f"Area between its curve and the random mean (above 0 is better): deletion {self.deletion_area:+.3f}, "
            f"insertion {self.insertion_area:+.3f}; better than {deleted} and {inserted} of {len(drawn)} random "
            f"orders: {verdict}."
        )
        return [first, second]

    def figure(self) -> Any:
        """Both curves with the band of the random orders; a matplotlib Figure."""
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            raise MissingPackage("FaithfulnessCurves.figure", "matplotlib", "view") from None
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, curve, drawn, title in (
            (left, self.deletion, self.random_deletion, "tokens removed, the most relevant first"),
            (right, self.insertion, self.random_insertion, "tokens inserted, the most relevant first"),
        ):
            x = self.counts.tolist()
            axes.fill_between(x, drawn.amin(0), drawn.amax(0), color="#999999", alpha=0.3, linewidth=0)
            axes.plot(x, drawn.mean(0), color="#666666", label=f"{len(drawn)} random orders: mean, range")
            axes.plot(x, curve, "o-", color="#0072B2", label="by relevance")
            axes.set(xlabel=title)
        left.set(ylabel=self.measure)
        left.legend()
        return figure

    def __repr__(self) -> str:
        return "\n".join(self.sentences)


def num_named(num_tokens: int) -> int:
    """How many removed tokens the sentence names: 1 to 5, at most half of them, so that random ones differ."""
    return max(1, min(NAMED, num_tokens // 2))


def _area(counts: Tensor, heights: Tensor) -> float:
    """The mean height of a curve over its counts, by trapezoids."""
    total = float(counts[-1] - counts[0])
    return float(torch.trapezoid(heights.double(), counts.double())) / total if total else 0.0


@checked
def faithfulness(
    model: nn.Module,
    inputs: Any,
    relevance: Any,
    target: Any = None,
    *,
    tokenizer: Any = None,
    replacement: int | None = None,
    keep: Sequence[int] = (),
    points: Size = 8,
    seeds: Size = 5,
) -> FaithfulnessCurves:
    """Do the tokens with a large relevance carry the prediction? Deletion and insertion curves beside random orders.

    `relevance` is an `Attribution` or one number for each token, (n,). Tokens are removed in the order of their
    relevance, the largest first, and the probability of the target is computed after each of `points` steps; then they
    are inserted in this order into a text without any. `seeds` random orders show what any tokens would do (Petsiuk et
    al. 2018, arXiv:1806.07421; DeYoung et al. 2020, arXiv:1911.03429).

    A removed token keeps its position, and no query may attend to it (`attention_mask`). With `replacement` its id is
    replaced by this one. Never removed are padding, the token at the target's position, the special tokens of the
    `tokenizer`, and the indices in `keep`. In a language model the first token stays too: most heads rest on it when
    they have nothing to read (Xiao et al. 2023, arXiv:2309.17453), and without it any text falls apart. `inputs` is one
    sequence; `target` is that of `rg.attribute`.

    >>> import torch, transformers, regard as rg
    >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20)
    >>> model = transformers.GPT2LMHeadModel(config).eval()
    >>> test = rg.faithfulness(model, torch.tensor([[3, 1, 4, 1, 5]]), torch.arange(5.0), target=9)
    >>> test.counts.tolist(), test.deletion.shape, test.random_deletion.shape
    ([0, 1, 2, 3], torch.Size([4]), torch.Size([5, 4]))
    """
    check_model(model, "faithfulness")
    text = TextInputs.of(model, inputs, "faithfulness")
    with torch.no_grad():
        question = explained(target, model, text, text.run(model), tokenizer)
    scores = relevance.tokens() if hasattr(relevance, "tokens") else relevance
    return curves(model, text, scores, question, tokenizer, replacement, keep, points, seeds)


def curves(
    model: nn.Module,
    inputs: TextInputs,
    relevance: Any,
    target: Explained,
    tokenizer: Any = None,
    replacement: int | None = None,
    keep: Sequence[int] = (),
    points: Size = 8,
    seeds: Size = 5,
) -> FaithfulnessCurves:
    """The curves of `faithfulness` for a target whose tokens are known; other arguments are those of that function."""
    ids = inputs.need_ids("faithfulness")
    if len(ids) != 1:
        raise RegardError(f"faithfulness: inputs is one sequence, got {len(ids)}. Ask for each: inputs[b : b + 1].")
    scores = _checked_scores(relevance, ids.shape[1])
    candidates = _candidates(model, inputs, target, tokenizer, keep)
    order = candidates[scores[candidates].argsort(descending=True, stable=True)]
    orders = [order, *(_shuffled(candidates, seed) for seed in range(seeds))]
    m = len(order)
    counts = sorted({round(m * step / points) for step in range(points + 1)} | {num_named(m)})
    remove = _remover(model, inputs, replacement, tokenizer)
    # two versions for each order and count: without the first tokens (deletion), with these only (insertion)
    removed = [row for places in orders for count in counts for row in (places[:count], places[count:])]
    values = _scores(model, remove, removed, target).view(len(orders), len(counts), 2)
    deletion, insertion = values[..., 0], values[..., 1]
    return FaithfulnessCurves(
        torch.tensor(counts), deletion[0], insertion[0], deletion[1:], insertion[1:], target.measure
    )


def _checked_scores(relevance: Any, n: int) -> Tensor:
    """The relevance as (n,) in float64 on the CPU; also from (1, n)."""
    try:
        scores = as_tensor(relevance).detach().cpu().double()
    except (TypeError, ValueError, RuntimeError):
        raise RegardError(
            f"faithfulness: the relevance is a {type(relevance).__name__} that holds no numbers; give an Attribution, "
            f"or one number for each of the {n} tokens."
        ) from None
    scores = scores[0] if scores.ndim == 2 and len(scores) == 1 else scores
    if scores.shape != (n,):
        raise RegardError(
            f"faithfulness: the relevance has shape {tuple(scores.shape)}; give one number for each of the {n} tokens."
        )
    if not bool(scores.isfinite().all()):
        raise RegardError("faithfulness: the relevance holds NaN or infinite numbers, which have no order.")
    return scores


def _candidates(model: nn.Module, inputs: TextInputs, target: Explained, tokenizer: Any, keep: Sequence[int]) -> Tensor:
    """The indices of the tokens that may be removed, ascending.

    Kept are padding, special tokens, `keep`, the position of the target, and the first token of a language model.
    """
    ids = inputs.need_ids("faithfulness")[0].cpu()
    allowed = inputs.real()[0].cpu().clone()
    if isinstance(model, Translates):
        allowed &= ids != model.end_id
    elif inputs.decoder_ids is None and target.positions:
        allowed[target.positions[0]] = False
        if predicts_next(model):
            allowed[int(allowed.int().argmax())] = False  # the attention sink
    # -1 is no token id: without special tokens nothing is kept here
    special = torch.tensor(sorted(set(getattr(tokenizer, "all_special_ids", None) or [-1])))
    allowed &= ~torch.isin(ids, special)
    for index in keep:
        if not -len(ids) <= index < len(ids):
            raise RegardError(f"faithfulness(keep=...): {index} is no index of the {len(ids)} tokens.")
        allowed[index] = False
    places = allowed.nonzero().flatten()
    if not len(places):
        raise RegardError(
            f"faithfulness: none of the {len(ids)} tokens may be removed: padding, special tokens, the target's own "
            "position and `keep` stay. Give a longer text."
        )
    return places


def _shuffled(candidates: Tensor, seed: int) -> Tensor:
    """The candidates in the random order of a seed."""
    generator = torch.Generator().manual_seed(seed)
    return candidates[torch.randperm(len(candidates), generator=generator)]


def _remover(
    model: nn.Module, inputs: TextInputs, replacement: int | None, tokenizer: Any
) -> Callable[[list[Tensor]], TextInputs]:
    """A function from lists of indices to a batch of inputs, one for each list, in which these tokens are removed.

    They are hidden by the attention mask, or replaced by the id `replacement`.
    """
    ids, real = inputs.need_ids("faithfulness"), inputs.real()
    replacement = _replacement(model, tokenizer) if replacement is None else replacement

    def remove(rows: list[Tensor]) -> TextInputs:
        """The inputs with one sequence for each entry of `rows`, the indices of the tokens that are removed from it."""
        batch = inputs.repeated(len(rows))
        gone = torch.zeros(len(rows), ids.shape[1], dtype=torch.bool)
        for number, places in enumerate(rows):
            gone[number, places] = True
        gone = gone.to(ids.device)
        if replacement is not None:
            return batch.with_ids(ids.expand(len(rows), -1).masked_fill(gone, replacement))
        return batch.with_mask((real & ~gone).long())

    return remove


def _replacement(model: nn.Module, tokenizer: Any) -> int | None:
    """The id that takes the place of a removed token, in a model that cannot hide it; None if the model can."""
    if isinstance(model, Translates):
        return model.padding_id  # which no query may attend to
    if takes(model, "attention_mask"):
        return None
    for name in ("mask_token_id", "unk_token_id", "pad_token_id"):
        if isinstance(number := getattr(tokenizer, name, None), int):
            return number
    raise RegardError(
        f"faithfulness: the forward of {type(model).__name__} has no attention_mask, so a token cannot be hidden. Give "
        "replacement=, the id of a token that takes its place."
    )


@torch.no_grad()
def _scores(
    model: nn.Module, remove: Callable[[list[Tensor]], TextInputs], removed: list[Tensor], target: Explained
) -> Tensor:
    """The score of each version of the text, (versions,); versions that are equal run once.

    `removed` are the indices that each version lacks. `remove` makes a batch of them.
    """
    keys = [tuple(sorted(places.tolist())) for places in removed]
    unique = list(dict.fromkeys(keys))
    size = max(1, min(ROWS, TOKENS // max(1, remove(removed[:1]).need_ids("faithfulness").shape[1])))
    found: list[Tensor] = []
    for first in range(0, len(unique), size):
        batch = remove([torch.tensor(key, dtype=torch.long) for key in unique[first : first + size]])
        scores = target.score(batch.run(model)).cpu()
        if scores.shape != (len(unique[first : first + size]),):
            raise RegardError(
                "faithfulness: the test runs many sequences at once, so the target function must return one number for "
                "each, (B,), such as output.last_hidden_state[:, 10].norm(dim=-1); it returned shape "
                f"{tuple(scores.shape)} for {len(unique[first : first + size])}."
            )
        found.append(scores)
    by_key = dict(zip(unique, torch.cat(found), strict=True))
    return torch.stack([by_key[key] for key in keys])
