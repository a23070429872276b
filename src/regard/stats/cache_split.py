"""Which heads need the whole cache, and which live from the first and the last tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.base.checks import Count, Size, checked
from regard.base.errors import RegardError, first_few
from regard.maps import AttentionMap, MassWhere
from regard.pieces import mask
from regard.stats.numbering import head_name, layer_numbers
from regard.stats.profile import one_text
from regard.stats.roles import Role
from regard.stats.statistics import Allowed, mean_of_rows


def beyond_cache(sinks: int, window: int) -> MassWhere:
    """The reduction to the weight of every query outside of the first `sinks` and the last `window` keys; (B, H, I)."""
    return MassWhere(mask.causal() & ~mask.window(window) & ~mask.prefix(sinks))


@dataclass(frozen=True, eq=False)
class LayerSplit:
    """The heads of one layer: `beyond` (H,) is the mean weight beyond sinks and window; `group` heads share a key head.

    `needs_all` (key heads,) says which key heads keep all keys: those with a query head of at least `least` beyond, or
    those that `given` (key heads,) names, for example for `KeyHeadSplit.keeping`.

    >>> import torch
    >>> from regard.types import LayerSplit
    >>> LayerSplit(0, torch.tensor([0.0, 0.3, 0.01, 0.02]), group=2, least=0.1).needs_all
    tensor([ True, False])
    """

    number: int
    beyond: Tensor
    group: int
    least: float
    given: Tensor | None = None

    @property
    def needs_all(self) -> Tensor:
        """Which key heads keep all keys; (key heads,)."""
        if self.given is not None:
            return self.given
        return (self.beyond >= self.least).unflatten(0, (-1, self.group)).any(-1)

    @property
    def streaming_heads(self) -> list[int]:
        """The query heads whose keys are the first and the last tokens only."""
        return (~self.needs_all.repeat_interleave(self.group)).nonzero().flatten().tolist()


@dataclass(frozen=True, eq=False)
class KeyHeadSplit:
    """Key heads that need the whole cache, and streaming heads with `sinks` + `window` keys: see `cache_split`.

    `layers` are by module path, `num_tokens` is that of the text.

    >>> import torch
    >>> from regard.types import KeyHeadSplit, LayerSplit
    >>> layer = LayerSplit(0, torch.tensor([0.0, 0.3]), group=1, least=0.1)
    >>> split = KeyHeadSplit(sinks=4, window=60, least=0.1, layers={"layers.0": layer}, num_tokens=256)
    >>> split.share(256), split.num_full_heads, split.num_key_value_heads
    (0.625, 1, 2)
    """

    sinks: int
    window: int
    least: float
    layers: dict[str, LayerSplit]
    num_tokens: int

    @property
    def num_key_value_heads(self) -> int:
        return sum(len(layer.needs_all) for layer in self.layers.values())

    @property
    def num_full_heads(self) -> int:
        """The number of key heads that keep all keys."""
        return sum(int(layer.needs_all.sum()) for layer in self.layers.values())

    @checked
    def share(self, length: Size) -> float:
        """The cache of a text of this length, as a share of the whole cache."""
        return self._cached_tokens(length) / (self.num_key_value_heads * length)

    def bytes(self, length: int, width: int, item_bytes: int = 2) -> int:
        """The bytes of the cache: keys and values of `width` channels a key head, `item_bytes` a number."""
        return 2 * self._cached_tokens(length) * width * item_bytes

    def _cached_tokens(self, length: int) -> int:
        """The number of tokens in the cache of a text of this length, summed over key heads."""
        kept = min(length, self.sinks + self.window)
        return self.num_full_heads * length + (self.num_key_value_heads - self.num_full_heads) * kept

    def keeping(self, heads: Sequence[Role | tuple[int, int]]) -> KeyHeadSplit:
        """The split in which the key heads of these query heads keep all keys, and all other key heads stream.

        Heads are roles or pairs (layer, head):
        `split.keeping([role for role in reader.needles().roles if role.score >= 0.02])` keeps the retrieval heads.
        """
        pairs = [(one.layer, one.head) if isinstance(one, Role) else (int(one[0]), int(one[1])) for one in heads]
        by_number = {layer.number: layer for layer in self.layers.values()}
        chosen = {number: torch.zeros(len(layer.needs_all), dtype=torch.bool) for number, layer in by_number.items()}
        for number, head in pairs:
            if number not in by_number or not 0 <= head < len(by_number[number].beyond):
                raise RegardError(
                    f"KeyHeadSplit.keeping: there is no head {head_name(number, head)}; the split has the layers "
                    f"{first_few(by_number, 40)} with {len(next(iter(by_number.values())).beyond)} heads."
                )
            chosen[number][head // by_number[number].group] = True
        return self._with(torch.cat(list(chosen.values())))

    def at_random(self, seed: int = 0) -> KeyHeadSplit:
        """The same number of key heads with the whole cache, chosen at random: what a split is compared with."""
        order = torch.randperm(self.num_key_value_heads, generator=torch.Generator().manual_seed(seed))
        chosen = torch.zeros(self.num_key_value_heads, dtype=torch.bool)
        chosen[order[: self.num_full_heads]] = True
        return self._with(chosen)

    def without_full(self) -> KeyHeadSplit:
        """The split in which every head streams."""
        return self._with(torch.zeros(self.num_key_value_heads, dtype=torch.bool))

    def _with(self, chosen: Tensor) -> KeyHeadSplit:
        """The split in which the `chosen` key heads keep all keys: booleans (key heads,) for all layers in a row."""
        parts = chosen.split([len(layer.needs_all) for layer in self.layers.values()])
        layers = zip(self.layers.items(), parts, strict=True)
        return replace(self, layers={name: replace(layer, given=part) for (name, layer), part in layers})

    @property
    def sentence(self) -> str:
        """Which heads read far, and the cache that is left."""
        beyond = torch.cat([layer.beyond for layer in self.layers.values()])
        far, length = int((beyond >= self.least).sum()), self.num_tokens
        return (
            f"{far} of {len(beyond)} heads put at least {100 * self.least:.0f} % of their weight beyond the first "
            f"{self.sinks} and the last {self.window} tokens. If {self.num_full_heads} of {self.num_key_value_heads} "
            f"key heads keep all keys, and the others {self.sinks} + {self.window}, the cache of {length:,} tokens "
            f"takes {100 * self.share(length):.0f} %."
        )


@checked
def cache_split(
    maps: Mapping[str, AttentionMap],
    *,
    sinks: Count = 4,
    window: Size = 256,
    least: float = 0.1,
    groups: Mapping[str, int] | None = None,
    batch: Count = 0,
    numbers: Sequence[int] | None = None,
) -> KeyHeadSplit:
    """Split the heads of a causal model: those that need the whole cache, and those that need its ends.

    b_h = mean_i sum_j w_ij over the keys j with j >= sinks and i - j >= window, for the queries i >= sinks + window,
    which have such keys; those that padding leaves no key are left out. A head with b_h >= `least` needs the whole
    cache; the others are streaming heads, which keep the first `sinks` keys (Xiao et al. 2023, arXiv:2309.17453) and
    the last `window`. `groups` is the number of query heads that share a key head, by module path (default 1): a key
    head is kept whole if one of them needs it.

    DuoAttention (Xiao et al. 2024, arXiv:2410.10819) learns this split by training a gate for each head on passkeys;
    here it is read from the weights on one text, so it costs one run, and depends on that text. The weight that a
    head loses says nothing of what it carried: measure the loss with `TextReader.cache_cost`, which compares the split
    with as many heads at random. On SmolLM2 a small cache is better spent on its retrieval heads, `split.keeping(...)`:
    they lose as little with 36 % of the cache as this split with 56 %.

    `batch` is the entry of each map that is read. `numbers` are the numbers of the layers; by default they are read
    from the module paths (`layer_numbers`).

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 2, 40, 4)
    >>> near = torch.stack([torch.zeros(40, 40), torch.eye(40)])[None] * 50          # head 0 is even, head 1 is local
    >>> identity = torch.eye(40).expand(1, 2, 40, 40)
    >>> seen = rg.Attention(score=rg.Dot(scale=1.0), mask=rg.causal())(near, identity, identity)
    >>> print(rg.stats.cache_split({"layers.0": seen.weights}, sinks=1, window=8).sentence)
    1 of 2 heads put at least 10 % of their weight beyond the first 1 and the last 8 tokens. If 1 of 2 key heads
    keep all keys, and the others 1 + 8, the cache of 40 tokens takes 61 %.
    """
    if not maps:
        raise RegardError("cache_split: there are no maps. Watch at least one attention layer.")
    if not 0 < least <= 1:
        raise RegardError(f"cache_split(least={least}): least is a share of the weight, above 0 and at most 1.")
    layers, length = {}, 0
    for number, (name, weights) in zip(layer_numbers(maps, numbers), maps.items(), strict=True):
        length, group = weights.shape[3], (groups or {}).get(name, 1)
        _check(name, weights, sinks + window, group)
        text_map = one_text("cache_split", weights, batch)
        parts = text_map.summarize(beyond_cache(sinks, window), Allowed(text_map))
        mean = mean_of_rows(*(part[0, :, sinks + window :] for part in parts)).cpu()
        layers[name] = LayerSplit(number, mean, group, least)
    return KeyHeadSplit(sinks, window, least, layers, length)


def _check(name: str, weights: AttentionMap, kept: int, group: int) -> None:
    """An error if a map has no cache to split. `kept` is sinks + window; `group` query heads share a key head."""
    _, H, I, J = weights.shape
    if I != J or not mask.sees_no_later_key(weights.attention.mask):
        raise RegardError(
            f"cache_split: the map of {name!r} has {I} queries and {J} keys, with the mask {weights.attention.mask!r}. "
            "A cache belongs to causal self-attention over a whole text."
        )
    if kept >= J:
        raise RegardError(
            f"cache_split: the text has {J} tokens, and sinks + window are {kept}, so no key is beyond them. Give a "
            "longer text, or a smaller window."
        )
    if group < 1 or H % group:
        raise RegardError(f"cache_split: {name!r} has {H} heads, which groups of {group} do not divide.")
