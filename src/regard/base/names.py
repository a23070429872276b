"""Arguments of other libraries, and the way to get the same effect with Regard."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: In these texts <...> is a mask. `explanation` writes where the function takes it.
_CAUSAL = "a mask is a piece: <regard.causal()>"
_TENSOR = "a mask is a piece, with True = may attend: <regard.mask_tensor(tensor)>"
_PADDING = "a mask is a piece, with True = real: <regard.padding(real)>; torch's means the opposite"
_WINDOW = "a mask is a piece: <regard.causal() & regard.window(size)>"
_WEIGHTS = "every weight can be read: output, weights = attend(...) or module(...), or regard.watch(model)"
_SIZE = "it is called embed_dim or head_dim or hidden_size or width"
_HEADS = "it is called num_heads"
_BIAS = "it is called bias"
_HIDDEN = "it is FeedForward's hidden, and feed_forward of TransformerConfig"
_HEAD_WIDTH = "heads have embed_dim / num_heads channels"
_LENGTH = "masks and sinusoids fit any length; a learned table is regard.encodings.LearnedPositions(length, embed_dim)"
_DROPOUT = "dropout is a number of the container: Attention(dropout=0.1)"
_MODULE = "modules are moved afterwards: module.to(device, dtype)"
_EXTRA_KEY = "a key of zeros is Softmax(sink=0.0); there are no learned extra keys"
_SHARED = "the shapes of queries and keys decide about head sharing; in MultiHeadAttention it is num_key_value_heads"

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
    "softcap": "a bias: Attention(bias=regard.biases.Softcap(50.0))",
    "alibi_slopes": "a bias: Attention(bias=regard.ALiBi(num_heads))",
    "enable_gqa": _SHARED,
    "need_weights": _WEIGHTS,
    "average_attn_weights": _WEIGHTS,
    "return_weights": _WEIGHTS,
    "output_attentions": _WEIGHTS,
    "past_key_value": "earlier keys are a cache: attend(..., cache=regard.GrowingCache())",
    "past_key_values": "earlier keys are a cache: attend(..., cache=regard.GrowingCache())",
    "backend": "it is called engine",
    "attn_implementation": "it is called engine",
    "embed_dim": _SIZE,
    "width": _SIZE,
    "d_model": _SIZE,
    "hidden_size": _SIZE,
    "dim": _SIZE,
    "d_in": _SIZE,
    "d_out": _SIZE,
    "emb_dim": _SIZE,
    "emb_size": _SIZE,
    "embed_size": _SIZE,
    "embedding_dim": _SIZE,
    "hidden_dim": _SIZE,
    "n_embd": _SIZE,
    "nhead": _HEADS,
    "n_head": _HEADS,
    "n_heads": _HEADS,
    "h": _HEADS,
    "heads": _HEADS,
    "num_attention_heads": _HEADS,
    "num_kv_heads": "it is called num_key_value_heads",
    "num_key_heads": "it is called num_key_value_heads",
    "kdim": "it is called key_dim",
    "vdim": "it is called value_dim",
    "head_dim": _HEAD_WIDTH,
    "d_k": _HEAD_WIDTH,
    "d_v": _HEAD_WIDTH,
    "dim_feedforward": _HIDDEN,
    "d_ff": _HIDDEN,
    "qkv_bias": _BIAS,
    "use_bias": _BIAS,
    "out_proj": "it is called output_projection",
    "max_len": _LENGTH,
    "max_seq_len": _LENGTH,
    "max_seq_length": _LENGTH,
    "context_length": _LENGTH,
    "block_size": _LENGTH,
    "norm_first": 'it is norm="pre" or norm="post"',
    "batch_first": "inputs are always (batch, length, embed_dim), batch first",
    "add_bias_kv": _EXTRA_KEY,
    "add_zero_attn": _EXTRA_KEY,
    "theta": "it is called base",
    "rope_theta": "it is called base",
    "device": _MODULE,
    "dtype": _MODULE,
}

#: Arguments of other libraries' figures -> the same with Regard's.
OF_FIGURES = {
    "figsize": "make the figure yourself, and give its axes: axes=pyplot.figure(figsize=...).gca()",
    "annot": "small maps have their numbers in the cells",
    "vmin": "colors go from 0 to vmax",
    "ax": "it is called axes",
    "xticklabels": "labels are tokens=(query tokens, key tokens)",
    "yticklabels": "labels are tokens=(query tokens, key tokens)",
}
#: The beginning of a text that names arguments, of which only those that the function has are said.
_CALLED = "it is called "
#: The slots of `Attention`, which functions and layers take as one mechanism.
_PIECES = ("score", "bias", "position", "normalizer", "transition")


def explanation(given: Iterable[str], known: Iterable[str]) -> str:
    """A remedy for each argument that a function does not have; empty if it has all of them.

    >>> explanation(["theta", "dim"], ["head_dim", "base"])
    'theta: it is called base. dim: it is called head_dim. '
    """
    known = list(known)
    return "".join(_remedy(name, known) for name in given if name not in known)


def _remedy(name: str, known: list[str]) -> str:
    """The remedy for one argument of a function that has the arguments `known`; "" if none is known.

    It is the same argument by its name here, else what `OTHER_NAMES` says, else the argument of the nearest name.
    """
    if "dropout" in name and "dropout" in known:
        return f"{name}: it is called dropout. "
    if "causal" in name and "is_causal" in known:
        return f"{name}: it is called is_causal. "
    if name == "attn_mask" and {"mask", "is_causal"} <= {*known}:
        return f"{name}: it is called mask, with True = may attend. "
    if name in _PIECES and "attention" in known:
        return f"{name}: it is a piece of the mechanism: attention=regard.Attention({name}=...). "
    text = OF_FIGURES.get(name, "") if "vmax" in known else OTHER_NAMES.get(name, "")
    if text.startswith(_CALLED):
        called = [other for other in text.removeprefix(_CALLED).split(" or ") if other in known]
        text = f"{_CALLED}{called[0]}" if called else ""
    if text:
        return f"{name}: {_placed(text, known)}. "
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]!r}? " if close else ""


def _placed(text: str, known: list[str]) -> str:
    """A text with the mask between < and > where a function with these arguments takes it."""
    if "query" in known and "mask" in known:
        before, after = "mask=", ""
    elif "attention" in known and "query" not in known:
        before, after = "attention=regard.Attention(mask=", ")"
    else:
        before, after = "Attention(mask=", ")"
    return text.replace("<", before).replace(">", after)
