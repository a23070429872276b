"""`CrossAttention`: the attention of a recurrent decoder to the states of its encoder, with any mechanism."""

from __future__ import annotations

from torch import Tensor

from regard.attention import Attention
from regard.base.checks import Size, checked
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import Sizes
from regard.masks import Mask
from regard.nn.listener import Attends
from regard.nn.module_output import ModuleOutput
from regard.nn.projected_kv import ProjectedKV, read


@checked
class CrossAttention(Attends):
    """c_i = sum_j w_ij h_j over encoder states h, with the weights w of any attention (Bahdanau et al. 2015,
    arXiv:1409.0473).

    The values are the encoder states. `keys` computes the part of the score that depends on the keys alone (U h_j of
    Bahdanau) once per source. If the next query of a decoder depends on the last context, the decoder gives one query
    per call. Otherwise it gives all queries at once.

    >>> import torch, regard as rg
    >>> bridge = rg.nn.CrossAttention(rg.mechanism("bahdanau").build(8, 6, 16), 8, 6)
    >>> keys = bridge.keys(torch.randn(2, 5, 6), rg.padding([5, 3]))
    >>> context, weights = bridge(torch.randn(2, 1, 8), keys, start=0)
    >>> context.shape, weights.shape
    (torch.Size([2, 1, 6]), (2, 1, 1, 5))
    """

    is_cross_attention = True

    def __init__(self, attention: Attention, query_dim: Size, key_dim: Size) -> None:
        super().__init__()
        sizes = Sizes(B=1, H=1, G=1, I=1, J=1, D=query_dim, E=key_dim)  # one pair: a wrong width is an error here
        attention.check(sizes, Positions.aligned_to_end(1, 1), key_dim)
        self.attention = attention

    def keys(self, states: Tensor, mask: Mask | None = None) -> ProjectedKV:
        """The keys of encoder states (B, J, C). `mask` excludes padding."""
        states = states[:, None]  # one head
        return ProjectedKV(self.attention, states, states, mask)

    def forward(self, query: Tensor, keys: ProjectedKV, start: int = 0) -> ModuleOutput:
        """Decoder states (B, I, D), the first at position `start`, -> contexts (B, I, C), and the weights."""
        if not isinstance(keys, ProjectedKV):
            raise RegardError(
                f"CrossAttention: keys must be the result of attention.keys(states), got {type(keys).__name__}. "
                "Once a source: keys = attention.keys(states); then context, weights = attention(query, keys)."
            )
        if not isinstance(query, Tensor) or query.ndim != 3:
            got = tuple(query.shape) if isinstance(query, Tensor) else type(query).__name__
            raise RegardError(f"CrossAttention: query must be (B, I, D), got {got}. For one state: query[:, None].")
        seen = read(self, query[:, None], keys, start)
        return seen.with_output(seen.output[:, 0])
