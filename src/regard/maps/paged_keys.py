"""Keys in pages, as serving engines keep them: a pool of pages, and for each text the numbers of its pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.errors import RegardError


@dataclass(frozen=True, eq=False)
class PagedKeys:
    """The keys of B texts in pages of S tokens: token t of text b is row t % S of page `table[b, t // S]`.

    `pages` is (P, S, G, D), the cache of one layer as vLLM, SGLang and FlashInfer keep it (PagedAttention, Kwon et al.
    2023, arXiv:2309.06180). `table` is (B, most pages of a text), the block table; entries that no token needs may hold
    any number. `lengths` (B,) are the numbers of tokens. Transformers' continuous batching has pages of one token:
    `cache.key_cache[layer][:, None]` and the slots of each text.

    >>> import torch, regard as rg
    >>> keys = rg.maps.PagedKeys(torch.arange(6.0).view(3, 2, 1, 1), torch.tensor([[2, 0]]), torch.tensor([3]))
    >>> keys.gathered()[0].flatten().tolist()  # page 2, then page 0
    [4.0, 5.0, 0.0]
    """

    pages: Tensor
    table: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        for name, axes in (("pages", 4), ("table", 2), ("lengths", 1)):
            tensor = getattr(self, name)
            if not isinstance(tensor, Tensor) or tensor.ndim != axes:
                got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise RegardError(
                    f"PagedKeys: pages are (pages, tokens of a page, heads, width), table is (texts, pages of a text), "
                    f"lengths are (texts,); got {name} {got}."
                )
            if name != "pages" and tensor.dtype not in (torch.int32, torch.int64):
                raise RegardError(f"PagedKeys: {name} holds integers, got {tensor.dtype}.")
        if len(self.table) != len(self.lengths):
            raise RegardError(f"PagedKeys: {len(self.table)} rows of the table for {len(self.lengths)} lengths.")
        self._check_lengths()

    def _check_lengths(self) -> None:
        """Refuse lengths below 0, and those that need more pages than the table has for a text."""
        size, most = self.pages.shape[1], self.table.shape[1]
        longest = int(self.lengths.max()) if len(self.lengths) else 0
        if len(self.lengths) and int(self.lengths.min()) < 0:
            raise RegardError(f"PagedKeys: a length is {int(self.lengths.min())}; lengths are at least 0.")
        if longest > size * most:
            raise RegardError(
                f"PagedKeys: a text of {longest} tokens needs {-(-longest // max(size, 1))} pages of {size} tokens, "
                f"and the table has {most} for each text."
            )

    def gathered(self) -> tuple[Tensor, Tensor | None]:
        """The keys (B, G, J, D), aligned to the end, and which of them are real, (B, J); None if all are.

        J is the length of the longest text. Shorter texts are padded at the start.
        They are a copy: a serving engine gives the pages of a finished text to the next one.
        """
        size, device = self.pages.shape[1], self.pages.device
        lengths = self.lengths.to(device).long()
        longest = int(lengths.max()) if len(lengths) else 0
        if not longest:
            return self.pages.new_zeros(len(lengths), self.pages.shape[2], 0, self.pages.shape[3]), None
        token = torch.arange(longest, device=device) - (longest - lengths[:, None])  # (B, J), negative in the padding
        real = token >= 0
        token = token.clamp_min(0)
        page = self.table.to(device).long().gather(1, token // size)
        self._check_pages(page[real])
        keys = self.pages[page.masked_fill(~real, 0), token % size]  # (B, J, G, D)
        return keys.transpose(1, 2), None if bool(real.all()) else real

    def _check_pages(self, used: Tensor) -> None:
        wrong = used[(used < 0) | (used >= len(self.pages))]
        if len(wrong):
            raise RegardError(
                f"PagedKeys: the table names page {int(wrong[0])}, and there are pages 0 to {len(self.pages) - 1}. "
                "Only entries after the last token of a text may hold other numbers."
            )
