"""Names of other libraries, and what to call here. A missing name of Regard answers with them, or with the nearest."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from regard.base.upper_layers import upper_layer

_WATCH = "with rg.watch(model, tokenizer) as seen: model(**inputs)"
_READ = f"{_WATCH}, then seen[3]"
_PAGE = f"{_WATCH}, then seen.show()"
_SAVE = f'{_WATCH}, then seen.save("attention.html")'
_EFFECT = (
    'with rg.watch(model, tokenizer, keep="qkv") as seen: model(**inputs), then seen.logit_effect(3, token="word")'
)
_CALL = "rg.Attention(mask=rg.causal())(query, key, value)"
_PATCH = (
    'with rg.watch(model, keep="qkv") as clean: model(**others), then with rg.edit(model, rg.edits.ActivationPatch('
    'rg.Where.parse("L3.H2"), source=clean)): model(**inputs)'
)
_KNOCK = 'with rg.edit(model, rg.KnockOut(rg.Where.parse("L3.H2"))): model(**inputs)'
_GRADIENT = "rg.attribute(model, inputs, target)"
_INTEGRATED = 'rg.attribute(model, inputs, target, "integrated-gradients")'
_RELEVANCE = 'rg.attribute(model, inputs, target, "attn-lrp")'
_CACHE = "rg.Attention(mask=rg.causal())(query, key, value, cache=rg.GrowingCache())"
_LAYER = "rg.nn.TransformerConfig(embed_dim, num_heads).encoder(layers=6)"

#: Names of torch, transformers, BertViz, TransformerLens, nnsight, captum, inseq and flash-attn -> code with rg.
CALLS = {
    # BertViz, and other pictures
    "head_view": _PAGE,
    "model_view": _PAGE,
    "neuron_view": _PAGE,
    "attention_patterns": _PAGE,
    "view": _PAGE,
    "viz_attention": _PAGE,
    "render": _PAGE,
    "html": _SAVE,
    "to_html": _SAVE,
    "save": _SAVE,
    "plot": "rg.heatmap(weights, tokens, head=0)",
    "imshow": "rg.heatmap(weights, tokens, head=0)",
    "plot_attention": "rg.heatmap(weights, tokens, head=0)",
    "visualize": _PAGE,
    # TransformerLens and nnsight
    "HookedTransformer": "model, tokenizer = rg.load_model(name)",
    "HookedEncoder": "model, tokenizer = rg.load_model(name)",
    "TransformerBridge": "model, tokenizer = rg.load_model(name)",
    "LanguageModel": "model, tokenizer = rg.load_model(name)",
    "AutoModel": "model, tokenizer = rg.load_model(name)",
    "from_pretrained": "model, tokenizer = rg.load_model(name)",
    "NNsight": _READ,
    "trace": _READ,
    "hook": _READ,
    "add_hook": _READ,
    "run_with_cache": _READ,
    "ActivationCache": _READ,
    "output_attentions": _READ,
    "attentions": _READ,
    "attention_pattern": _READ,
    "get_attention": _READ,
    "get_attentions": _READ,
    "register_hook": _READ,
    "tokens": f"{_WATCH}, then seen.tokens_read()",
    "to_df": f"{_WATCH}, then seen[3].dense()",
    "capture": _READ,
    "differentiable": "with rg.watch(model, grad=True) as seen: model(**inputs)",
    "run_with_hooks": _KNOCK,
    "ablate": _KNOCK,
    "ablation": _KNOCK,
    "ablate_head": _KNOCK,
    "mask_head": _KNOCK,
    "head_mask": _KNOCK,
    "prune_heads": "rg.prune(model, {3: [0, 2]})",
    "head_importance": "rg.importance(model, loss, batches)",
    "activation_patching": _PATCH,
    "path_patching": _PATCH,
    "patching": _PATCH,
    "intervene": _PATCH,
    "logit_lens": _EFFECT,
    "logit_attribution": _EFFECT,
    "direct_logit_attribution": _EFFECT,
    "attention_rollout": "rg.rollout(seen, rows=[0])",
    "induction_heads": "rg.TextReader(model, tokenizer).read(text)",
    "detect_heads": "rg.TextReader(model, tokenizer).read(text)",
    "head_detector": "rg.TextReader(model, tokenizer).read(text)",
    # names that Regard had
    "seq2seq": "rg.lab",
    "data": "rg.lab.data",
    "Fold": "rg.maps.Reduction",
    "explain": "rg.plan(query, key, value)",
    "KernelScore": "rg.scores.FeatureScore()",
    "Patch": 'rg.edits.ActivationPatch(rg.Where.parse("L3.H2"), source=clean)',
    "Steer": 'rg.edits.AddToScores(rg.Where.parse("L3.H2"), 2.0)',
    "Edits": "rg.edits.EditSequence()",
    "Links": "rg.maps.RowLinks",
    "MatrixMap": "rg.maps.DenseMap(matrix)",
    "Beyond": "rg.maps.MassWhere(mask)",
    "Position": "rg.encodings.Encoding",
    "differences": "rg.stats.text_differences(readings)",
    # captum and inseq
    "IntegratedGradients": _INTEGRATED,
    "LayerIntegratedGradients": _INTEGRATED,
    "Saliency": _GRADIENT,
    "InputXGradient": _GRADIENT,
    "LayerGradientXActivation": _GRADIENT,
    "GradientShap": _INTEGRATED,
    "DeepLift": _RELEVANCE,
    "LRP": _RELEVANCE,
    "LayerLRP": _RELEVANCE,
    "FeatureAblation": 'rg.attribute(model, inputs, target, "value-zeroing")',
    "AttributionModel": _GRADIENT,
    "load_attribution_model": _GRADIENT,
    "attributions": _GRADIENT,
    "explain_prediction": _GRADIENT,
    # functions of attention
    "flash_attn_func": _CALL,
    "flash_attn_varlen_func": "rg.Attention(mask=rg.causal() & rg.documents(lengths))(query, key, value)",
    "flash_attn_with_kvcache": _CACHE,
    "flash_attn_qkvpacked_func": _CALL,
    "flash_attention": _CALL,
    "paged_attention": "rg.AttentionMap.of(rg.Attention(), query, key, logsumexp)",
    "memory_efficient_attention": _CALL,
    "dot_product_attention": _CALL,
    "sdpa": _CALL,
    "multi_head_attention_forward": _CALL,
    "flex_attention": 'rg.Attention(mask=rg.causal())(query, key, value, engine="flex")',
    "score_mod": 'rg.Attention(bias=rg.ALiBi(num_heads))(query, key, value, engine="flex")',
    "create_block_mask": "rg.mask_mod(lambda b, h, i, j: i >= j)",
    "BlockMask": "rg.mask_mod(lambda b, h, i, j: i >= j)",
    "ring_attention": 'rg.Attention(mask=rg.causal())(query, key, value, engine="ring")',
    "context_parallel": 'rg.Attention(mask=rg.causal())(query, key, value, engine="ring")',
    "linear_attention": "rg.Attention(rg.scores.FeatureScore(), normalizer=rg.normalizers.SumNormalizer())(query, "
    "key, value)",
    # masks and positions
    "causal_mask": "rg.causal()",
    "look_ahead_mask": "rg.causal()",
    "generate_square_subsequent_mask": "rg.causal()",
    "LowerTriangularMask": "rg.causal()",
    "causal_lower_right": "rg.causal()",
    "to_local": "rg.causal() & rg.window(size)",
    "BlockDiagonalMask": "rg.documents(lengths)",
    "LocalAttention": "rg.causal() & rg.window(size)",
    "local_window": "rg.causal() & rg.window(size)",
    "padding_mask": "rg.padding(real)",
    "key_padding_mask": "rg.padding(real)",
    "attention_mask": "rg.padding(real)",
    "attn_mask": "rg.mask_tensor(tensor)",
    "RotaryEmbedding": "rg.RoPE(head_dim)",
    "RotaryPositionalEmbedding": "rg.RoPE(head_dim)",
    "apply_rotary_pos_emb": "rg.Attention(position=rg.RoPE(head_dim))(query, key, value)",
    "RelativePositionBias": "rg.biases.T5Bias(num_heads)",
    # caches
    "KVCache": _CACHE,
    "DynamicCache": _CACHE,
    "StaticCache": _CACHE,
    "SlidingWindowCache": "rg.caches.RingCache(size)",
    # modules
    "MHA": "rg.nn.MultiHeadAttention(embed_dim, num_heads)",
    "GroupedQueryAttention": "rg.nn.MultiHeadAttention(embed_dim, num_heads, num_key_value_heads=2)",
    "GQA": "rg.nn.MultiHeadAttention(embed_dim, num_heads, num_key_value_heads=2)",
    "MultiQueryAttention": "rg.nn.MultiHeadAttention(embed_dim, num_heads, num_key_value_heads=1)",
    "MQA": "rg.nn.MultiHeadAttention(embed_dim, num_heads, num_key_value_heads=1)",
    "SelfAttention": "rg.nn.MultiHeadAttention(embed_dim, num_heads)",
    "CausalSelfAttention": "rg.nn.MultiHeadAttention(embed_dim, num_heads, is_causal=True)",
    "TransformerEncoder": _LAYER,
    "TransformerEncoderLayer": _LAYER,
    "TransformerDecoder": "rg.nn.TransformerConfig(embed_dim, num_heads).decoder(layers=6)",
    "TransformerDecoderLayer": "rg.nn.TransformerConfig(embed_dim, num_heads).decoder(layers=6)",
    "MLP": "rg.nn.FeedForward(embed_dim, hidden)",
}
#: Names that a watched run does not have -> code with `seen`, the run.
OF_WATCHED = {
    "attentions": "list(seen.maps.values())",
    "attention": "seen[3]",
    "attn": "seen[3]",
    "weights": "seen[3]",
    "pattern": "seen[3]",
    "patterns": "list(seen.maps.values())",
    "cache": "seen[3]",
    "cache_dict": "seen.maps",
    "activations": "seen.head_output(3)",
    "output": "seen.head_output(3)",
    "outputs": "seen.head_output(3)",
    "z": "seen.head_output(3)",
    "result": "seen.head_part(3)",
    "keys": "seen.names",
    "items": "seen.maps.items()",
    "values": "seen.maps.values()",
    "q": "seen[3].query",
    "query": "seen[3].query",
    "k": "seen[3].key",
    "key": "seen[3].key",
    "v": "seen[3].value",
    "value": "seen[3].value",
    "logits": 'seen.logit_effect(3, token="word")',
    "layers": "seen.names",
    "modules": "seen.names",
    "heads": "seen[3].shape[1]",
    "head": "seen[3][:, 2]",
    "tokens": "seen.tokens_read()",
    "cross_attentions": "list(seen.cross.maps.values())",
    "encoder_attentions": "list(seen.encoder.maps.values())",
    "decoder_attentions": "list(seen.decoder.maps.values())",
    "plot": "seen.heatmap(3, head=2)",
    "head_view": "seen.show()",
    "model_view": "seen.show()",
    "to_html": 'seen.save("attention.html")',
    "write": 'seen.save("attention.html")',
}
#: Names that a map does not have -> code with `weights`, the map.
OF_MAPS = {
    "carries_gradients": "weights.requires_grad",
    "q": "weights.query",
    "queries": "weights.query",
    "k": "weights.key",
    "keys": "weights.key",
    "v": "weights.value",
    "attentions": "weights.dense()",
    "weights": "weights.dense()",
    "pattern": "weights.dense()",
    "matrix": "weights.dense()",
    "tensor": "weights.dense()",
    "data": "weights.dense()",
    "T": "weights.mT",
    "H": "weights.mT",
    "plot": "rg.heatmap(weights, tokens, head=0)",
    "heatmap": "rg.heatmap(weights, tokens, head=0)",
    "imshow": "rg.heatmap(weights, tokens, head=0)",
    "figure": "rg.figure(weights, tokens, head=0)",
    "head": "weights[:, 3]",
    "heads": "weights.shape[1]",
    "row": "weights[0, 3, 10]",
    "strongest": "weights.top(1)",
    "column_sums": "weights.received()",
}
#: Rooms, whose names are not in `regard` itself: `rg.masks.prefix`.
ROOMS = (
    *("masks", "scores", "encodings", "biases", "normalizers", "selections", "transitions"),
    *("composites", "caches", "maps", "edits", "stats", "hf", "types"),
    *("nn", "viewer", "lab"),
)
#: Rooms inside of rooms: `rg.lab.data.load_corpus`.
INNER_ROOMS = ("lab.data",)


def missing_here(room: str, name: str, public: Iterable[str]) -> AttributeError:
    """The error for a name that `regard` or one of its rooms does not have."""

    def known() -> Iterator[str]:
        """The public names as one writes them after `rg.`; those of this room come first."""
        yield from (f"{room}.{own}".removeprefix("regard.") for own in public)
        yield from upper_layer("api").__all__
        for other in (*ROOMS, *INNER_ROOMS):
            yield from (f"{other}.{each}" for each in upper_layer(other).__all__)
        if room == "regard":
            yield from (f'mechanism("{each}")' for each in upper_layer("api").mechanisms())

    return missing(f"module {room!r}", name, known, CALLS, "rg.")


def answers_for(room: str, public: Iterable[str]) -> Callable[[str], Any]:
    """The `__getattr__` of a room: a missing name is an error that says where it is, or what it is called here.

    >>> answers_for("regard.masks", ["causal"])("Causal")
    Traceback (most recent call last):
        ...
    AttributeError: module 'regard.masks' has no attribute 'Causal'. Did you mean rg.masks.causal?
    """

    def __getattr__(name: str) -> Any:
        raise missing_here(room, name, public)

    return __getattr__


def missing(
    owner: str, name: str, known: Callable[[], Iterable[str]], calls: Mapping[str, str] | None = None, of: str = ""
) -> AttributeError:
    """The error for a name that `owner` does not have: what to call instead, or the nearest of the `known` names.

    `calls` has the names of other libraries with the code to call here. `of` is put before a known name, "rg." for
    example. `known` is not called for names that begin with _: Python itself asks for these.

    >>> missing("module 'regard'", "Causal", lambda: ["causal", "window"], of="rg.")
    AttributeError("module 'regard' has no attribute 'Causal'. Did you mean rg.causal?")
    """
    text = f"{owner} has no attribute {name!r}"
    if name.startswith("_"):
        return AttributeError(text)
    same_calls = {_plain(other): code for other, code in (calls or {}).items()}
    names = [other for other in dict.fromkeys(known()) if not other.startswith("_")]
    by_plain: dict[str, str] = {}  # by the last part of a name: RoPE of rg.RoPE, bigbird of mechanism("bigbird")
    for other in names:
        by_plain.setdefault(_plain(re.sub(r'.*[."](\w)', r"\1", other.rstrip('")'))), other)
    plain = _plain(name)
    if plain in same_calls:
        return AttributeError(f"{text}. Here: {same_calls[plain]}")
    if plain in by_plain:
        return AttributeError(f"{text}. Did you mean {of}{by_plain[plain]}?")
    close = [f"{of}{by_plain[each]}" for each in difflib.get_close_matches(plain, by_plain, n=3, cutoff=0.7)]
    if close:
        return AttributeError(f"{text}. Did you mean {' or '.join(close)}?")
    near = difflib.get_close_matches(plain, same_calls, n=1, cutoff=0.8)
    return AttributeError(f"{text}. Here: {same_calls[near[0]]}" if near else text)


def _plain(name: str) -> str:
    """A name without case and underscores: RoPE is rope, multi_head_attention is MultiHeadAttention."""
    return name.replace("_", "").lower()
