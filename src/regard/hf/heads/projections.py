"""The query, key, value and output matrices of every head of a model, and the composition of its heads."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.base.checks import Count, checked
from regard.base.errors import RegardError, first_few, nearest
from regard.hf.attention_modules import part_of
from regard.hf.heads.model_heads import Heads, ModelHeads, matrix_of
from regard.hf.names import IN_ORDER, NORMS, sides_of
from regard.hf.output_projections import is_norm, language_model_head, num_inputs
from regard.stats.composition import CompositionScores, HeadMatrices, head_composition
from regard.stats.numbering import layer_numbers


@checked
def composition(
    model: nn.Module, kind: str = "K", *, fold_norms: bool = True, rotations: Count = 19, layers: Sequence[int] = ()
) -> CompositionScores:
    """Which heads of a model read what earlier heads write: the scores of Elhage et al. 2021 from its weights alone.

    `kind` is "Q", "K" or "V": whether queries, keys or values of the later head read the output of the earlier one.
    `head_composition` has the formula, the null by random rotations, and what a score does not say. An induction head
    is made by K-composition with a previous-token head.

    With `fold_norms` the scales of the norm before each attention are multiplied into its query, key and value
    matrices, and the mean over channels is taken out if the norm does so, as in TransformerLens. Norms that stand after
    the attention (BERT) are not folded. Biases are left out. Query heads that share a key have it repeated. Norms of
    queries and keys, and rotary positions, are left out. `layers` are the numbers of the layers; by default all.

    The projections must have usual names: q_proj, k_proj and v_proj; query, key and value; c_attn, qkv_proj or
    in_proj with all three one after the other. Of an encoder-decoder the decoder's self-attention is read.

    >>> import torch, transformers, regard as rg
    >>> config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)
    >>> scores = rg.hf.composition(transformers.GPT2Model(config), "K")
    >>> scores.heads, scores.scores.shape
    ([(0, 0), (0, 1), (1, 0), (1, 1)], torch.Size([4, 4]))
    """
    matrices = head_weights(model, fold_norms=fold_norms)
    numbers = [layer.layer for layer in matrices]
    if set(layers) - set(numbers):
        raise RegardError(f"composition(layers={list(layers)}): the model has the layers {first_few(numbers, 40)}.")
    chosen = [layer for layer in matrices if not layers or layer.layer in set(layers)]
    return head_composition(chosen, kind, rotations=rotations)


@checked
def head_weights(model: nn.Module, *, fold_norms: bool = True) -> list[HeadMatrices]:
    """The query, key, value and output matrices of every head, layer by layer: see `composition`.

    With `fold_norms` the scales of the norm before the attention are multiplied into the matrices that read.

    >>> import transformers
    >>> from regard.hf import head_weights
    >>> config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)
    >>> [tuple(layer.query.shape) for layer in head_weights(transformers.GPT2Model(config))]
    [(2, 8, 4), (2, 8, 4)]
    """
    heads = ModelHeads.of(model, "composition")
    modules = dict(model.named_modules())
    parts = {name: part_of(name, one.module) for name, one in heads.by_name.items()}
    part = "decoder" if "cross" in parts.values() else next(iter(parts.values()))
    chosen = {name: one for name, one in heads.by_name.items() if parts[name] == part}
    layers = []
    for number, (name, one) in zip(layer_numbers(chosen), chosen.items(), strict=True):
        norm = _norm_before(modules[name.rpartition(".")[0]]) if fold_norms else None
        layers.append(_of_layer(number, name, one, norm))
    return layers


@checked
@torch.no_grad()
def copying_scores(model: nn.Module, circuit: str = "OV", *, fold_norms: bool = True) -> dict[int, Tensor]:
    """How much each head copies: for each layer (H,), from -1 to 1, from the weights alone (Elhage et al. 2021).

    "OV" reads the matrix W_E W_V W_O W_U from an attended token to the logits, "QK" W_E W_Q W_K^T W_E^T from a token to
    the tokens that it attends to. The score is sum(l) / sum(|l|) of the eigenvalues l: 1 if every token raises its own
    logit, or attends to itself. The eigenvalues other than 0 are those of a small matrix D x D, so no matrix of the
    vocabulary is made. Norms are folded as in `composition`, that before the logits too; positions are left out.

    >>> import transformers, regard as rg
    >>> config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)
    >>> rg.hf.copying_scores(transformers.GPT2LMHeadModel(config))[1].shape
    torch.Size([2])
    """
    if circuit not in ("OV", "QK"):
        raise RegardError(f"copying_scores: there is no circuit {circuit!r}. {nearest(circuit, ('OV', 'QK'))}")
    embedding, head = getattr(model, "get_input_embeddings", lambda: None)(), language_model_head(model)
    if head is None or embedding is None:
        raise RegardError(f"copying_scores: {type(model).__name__} has no language-model head, so no logits.")
    tokens, read = (
        embedding.weight,
        matrix_of(head, "the language-model head") if circuit == "OV" else embedding.weight.mT,
    )
    paths = [name for name, part in model.named_modules() if is_norm(part) and not re.search(r"\.\d+\.", name)]
    if circuit == "OV" and fold_norms and paths:  # the last norm that is in no block stands before the logits
        read = _folded(model.get_submodule(paths[-1]), read)
    between = read.double() @ tokens.double()  # (C, C)
    scores = {}
    for layer in head_weights(model, fold_norms=fold_norms):
        into, out = (layer.value, layer.output) if circuit == "OV" else (layer.query, layer.key.mT)
        values = torch.linalg.eigvals(out.double() @ between @ into.double())
        scores[layer.layer] = values.real.sum(-1) / values.abs().sum(-1)
    return scores


def _of_layer(number: int, name: str, heads: Heads, norm: nn.Module | None) -> HeadMatrices:
    """The matrices of the heads of one layer; those that query heads share are repeated.

    `number` is that of the layer, and `name` the path of its module. Without a `norm` none is folded into the matrices.
    """
    projections = _projections(name, heads)
    sides = {}
    for side in ("query", "key", "value"):
        matrix = projections[side].detach()  # (C, num_heads or num_key_value_heads x head_dim)
        folded = matrix if norm is None else _folded(norm, matrix)
        count = heads.num_heads if side == "query" else heads.num_heads // heads.group
        if folded.shape[1] % count:
            raise RegardError(
                f"composition: the {side} projection of {name} has {folded.shape[1]} outputs, which {count} heads "
                "cannot share equally."
            )
        split = folded.unflatten(1, (count, -1)).movedim(1, 0)
        sides[side] = split.repeat_interleave(heads.num_heads // count, 0)
    return HeadMatrices(number, **sides, output=heads.output_matrices.detach())


def _projections(name: str, heads: Heads) -> dict[str, Tensor]:
    """The matrices (C, outputs) of "query", "key" and "value": of three projections, or parts of a packed one.

    `name` is the path of the attention module, for errors.
    """
    separate, packed = {}, None
    for path, part in heads.module.named_modules():
        last = path.rpartition(".")[2]
        sides = _sides(heads.module, path)
        if part is not heads.output and len(sides) == 1 and _is_linear(part):
            separate.setdefault(next(iter(sides)), matrix_of(part, f"{name}.{path}"))
        elif last in IN_ORDER and _is_linear(part):
            packed = matrix_of(part, f"{name}.{path}")
    if len(separate) == 3:
        return separate
    if packed is None:
        raise RegardError(
            f"composition: the projections of {name} ({type(heads.module).__name__}) have no known names: q_proj, "
            f"k_proj and v_proj; query, key and value; or all in {', '.join(IN_ORDER)}. Give head_composition the "
            "matrices: HeadMatrices(layer, query, key, value, output)."
        )
    query_outputs, key_outputs = heads.num_heads * heads.head_dim, heads.num_heads // heads.group * heads.head_dim
    if packed.shape[1] != query_outputs + 2 * key_outputs:
        raise RegardError(
            f"composition: the packed projection of {name} has {packed.shape[1]} outputs, not {query_outputs} + 2 x "
            f"{key_outputs} for its queries, keys and values. Give head_composition the matrices."
        )
    return dict(zip(("query", "key", "value"), packed.split([query_outputs, key_outputs, key_outputs], 1), strict=True))


def _sides(module: nn.Module, path: str) -> frozenset[str]:
    """What a layer computes, as its name says, or the name of the module that it is the only layer of."""
    above, _, last = path.rpartition(".")
    own = sides_of(last)
    if own or last.isdigit():  # a number: one of several layers
        return own
    is_only = sum(map(_is_linear, module.get_submodule(above).modules())) == 1
    return sides_of(path) if is_only else own


def _is_linear(part: nn.Module) -> bool:
    """Whether a module has a number of inputs, as linear layers do."""
    return num_inputs(part) is not None


def _norm_before(layer: nn.Module) -> nn.Module | None:
    """The norm before the attention of a layer, if its name says so."""
    return next((part for name in NORMS if isinstance(part := getattr(layer, name, None), nn.Module)), None)


@torch.no_grad()
def _folded(norm: nn.Module, matrix: Tensor) -> Tensor:
    """The matrix that reads the stream before a norm: diag(scale) W, without its mean row if the norm centers.

    The scale and whether the norm centers are measured, since some norms store 1 + weight: a norm maps a vector x with
    the mean 0 to scale * x / rms(x), and the vector of ones to 0 if it takes the mean out. Here x is 1, -1, 1, -1, ...;
    with an odd number of channels it ends with 1, 1, -2.
    """
    dtype = next((weight.dtype for weight in norm.parameters()), matrix.dtype)
    ones = torch.ones(matrix.shape[0], device=matrix.device, dtype=dtype)
    x = ones.clone()
    x[1::2] = -1.0
    if len(x) % 2:
        x[-3:] = torch.tensor([1.0, 1.0, -2.0]).to(x)
    offset = norm(torch.zeros_like(ones))
    scale = (norm(x) - offset) / x * x.square().mean().sqrt()
    scaled = scale[:, None] * matrix
    centers = bool((norm(ones) - offset).abs().max() < 1e-3 * scale.abs().max())
    return scaled - scaled.mean(0, keepdim=True) if centers else scaled
