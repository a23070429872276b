"""Arguments of other libraries, and the way to get the same effect with Regard."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CAUSAL = "a mask is a piece: Attention(mask=regard.causal())"
_TENSOR = "a mask is a piece, with True = may attend: Attention(mask=regard.mask_tensor(tensor))"
_PADDING = "a mask is a piece, with True = real: Attention(mask=regard.padding(real)); torch's means the opposite"
_WINDOW = "a mask is a piece: Attention(mask=regard.causal() & regard.window(size))"
_WEIGHTS = "every weight can be read: regard.attend(...).weights, or regard.watch(model)"
_DROPOUT = "dropout is a number of the container: Attention(dropout=0.1)"
_MODULE = "modules are moved afterwards: module.to(device, dtype)"
_EXTRA_KEY = "a key of zeros is Softmax(sink=0.0); there are no learned extra keys"
_SHARED = "the shapes of queries and keys decide about head sharing; in MultiHeadAttention it is num_key_heads"

#: Arguments of torch, transformers, flash-attn, x-transformers and others -> the same effect with Regard.
OTHER_NAMES = {
    "attn_mask": _TENSOR,
    "attention_mask": _PADDING,
    "key_padding_mask": _PADDING,
    "src_key_padding_mask": _PADDING,
    "mask": _TENSOR,
    "is_causal": _CAUSAL,
    "causal": _CAUSAL,
    "window_size": _WINDOW,
    "sliding_window": _WINDOW,
    "dropout_p": _DROPOUT,
    "dropout": _DROPOUT,
    "scale": "the factor belongs to the score: Attention(regard.Dot(scale=...))",
    "softmax_scale": "the factor belongs to the score: Attention(regard.Dot(scale=...))",
    "softcap": "a bias: Attention(bias=regard.Softcap(50.0))",
    "alibi_slopes": "a bias: Attention(bias=regard.ALiBi(num_heads))",
    "enable_gqa": _SHARED,
    "need_weights": _WEIGHTS,
    "average_attn_weights": _WEIGHTS,
    "output_attentions": _WEIGHTS,
    "past_key_value": "earlier keys are a cache: attend(..., cache=regard.GrowingCache())",
    "past_key_values": "earlier keys are a cache: attend(..., cache=regard.GrowingCache())",
    "backend": "it is called engine",
    "attn_implementation": "it is called engine",
    "embed_dim": "it is called width",
    "d_model": "it is called width",
    "hidden_size": "it is called width",
    "dim": "it is called width",
    "nhead": "it is called num_heads",
    "n_heads": "it is called num_heads",
    "heads": "it is called num_heads",
    "num_attention_heads": "it is called num_heads",
    "num_kv_heads": "it is called num_key_heads",
    "num_key_value_heads": "it is called num_key_heads",
    "kdim": "it is called key_width",
    "vdim": "it is called value_width",
    "dim_feedforward": "it is FeedForward's hidden, and feed_forward of TransformerConfig",
    "norm_first": 'it is norm="pre" or norm="post"',
    "batch_first": "inputs are always (batch, length, width), batch first",
    "add_bias_kv": _EXTRA_KEY,
    "add_zero_attn": _EXTRA_KEY,
    "theta": "it is called base",
    "rope_theta": "it is called base",
    "device": _MODULE,
    "dtype": _MODULE,
}


def explanation(given: Iterable[str], known: Iterable[str]) -> str:
    """A remedy for the first argument that a function does not have; empty if it has all of them.

    >>> explanation(["theta"], ["width", "base"])
    'theta: it is called base. '
    """
    known = list(known)
    name = next((name for name in given if name not in known), None)
    if name is None:
        return ""
    close = difflib.get_close_matches(name, known, n=1)
    return f"{name}: {OTHER_NAMES[name]}. " if name in OTHER_NAMES else f"Did you mean {close[0]!r}? " if close else ""
