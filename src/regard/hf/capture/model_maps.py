"""`WatchedAttention`, the result of `watch`: a map for each attention module, and why other modules have none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import index
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor

from regard.base.checks import HoldsMaps, explained
from regard.base.errors import RegardError, nearest
from regard.base.other_libraries import OF_WATCHED, missing
from regard.base.upper_layers import upper_layer
from regard.hf.capture.captured_calls import ATTENTION, ModuleCalls, NotCaptured
from regard.hf.capture.head_parts import CallParts, KeptParts
from regard.hf.capture.kept_calls import Check, KeptCall, NoValues, values_reader
from regard.hf.capture.model_inputs import ModelInputs, ReadTexts
from regard.hf.capture.module_statistics import Statistics
from regard.hf.output_projections import UnreadableMatrix
from regard.hf.token_labels import token_labels
from regard.maps.attention_map import AttentionMap
from regard.maps.changed_map import ValueWeightedMap
from regard.maps.indices import Index, axis_index, indices
from regard.stats.numbering import layer_number

#: A module by its number or path, or a token by its id or text.
Name = int | str


def token_id(token: Any, tokenizer: Any = None, call: str = "token_id") -> int:
    """The id of a token; a text must be an entry of the vocabulary, or be one token. Errors begin with `call`.

    >>> token_id(7)
    7
    """
    if isinstance(token, str):
        return _of_text(token, tokenizer, call)
    try:
        number = -1 if isinstance(token, bool) else index(token)
    except TypeError:
        number = -1
    if number < 0:
        raise RegardError(f"{call}: a token is an id of the vocabulary, or its text.")
    return number


def _of_text(token: str, tokenizer: Any, call: str) -> int:
    """The id of a text, as an entry of the vocabulary, or else as the one token that the tokenizer makes of it.

    `tokenizer` is that of transformers, or None. Errors begin with `call`.
    """
    if tokenizer is None:
        raise RegardError(
            f"{call}: a text needs its tokenizer. Watch with it, rg.watch(model, tokenizer), give tokenizer=, or give "
            "the id of the token."
        )
    vocabulary = tokenizer.get_vocab()
    if token in vocabulary:
        return vocabulary[token]
    ids = tokenizer(token, add_special_tokens=False)["input_ids"]
    if not ids:
        raise RegardError(f"{call}: the tokenizer makes no token of this text. Give the text of a token, or its id.")
    if len(ids) != 1:
        pieces = " ".join(map(repr, tokenizer.convert_ids_to_tokens(ids)))
        raise RegardError(
            f"{call}: this text is {len(ids)} tokens: {pieces}. Give one of them; a word inside a sentence often "
            "begins with a space."
        )
    return ids[0]


def check_steps(calls: ModuleCalls, path: str) -> None:
    """Refuse calls that read whole texts one after the other: the number of a token does not say which call is meant.

    `path` is the module, for the error.
    """
    if any(I == J > 1 for _, _, I, J in (call.map.shape for call in calls.calls[1:])):
        raise RegardError(
            f"ActivationPatch(source=seen): {path} read a whole text {len(calls.calls)} times (layers that share a "
            "module, several runs, or a generation without a cache), so it is not known which of them is meant. Watch "
            "one run, or give a tensor, such as seen.head_output(layer, call=n)."
        )


@torch.no_grad()
def queries_or_keys(calls: ModuleCalls, part: str, path: str) -> Tensor:
    """The queries (B, H, n, D) of all calls of a module, or the keys (B, G, n, D) of the last one, as `part` says."""
    tensors = [call.read(part) for call in calls.calls]
    known = [tensor for tensor in tensors if tensor is not None]
    if len(known) < len(tensors):
        raise RegardError(
            f"ActivationPatch(part={part!r}): the watch kept no {part} of {path}, only its weights. Give a tensor."
        )
    return known[-1] if part == "key" else torch.cat(known, 2)


#: What to do if nothing was captured.
REMEDY = "Run the model inside the with-block of watch."
#: The map of each call, while the program holds a reference to it.
_SHOWN: WeakKeyDictionary[Any, ReferenceType[AttentionMap]] = WeakKeyDictionary()


class WatchedAttention(HoldsMaps):
    """The attention maps of a watched model, in its order: `seen[3]`, `seen["layers.3.attention"]`, `for map in seen`.

    A number counts the maps from 0. After `watch(model, layers=[1, 3])` it is the number of the layer in the model, as
    in `rg.Where(layers=3)`. Negative numbers count from the last map. `seen[1:3]` is a list of maps. `names` are the
    module paths, and `maps` is the dict from path to map. The tensors of a call are `seen[3].query`, `.key` and, after
    `watch(keep="qkv")`, `.value`.

    A module that was called several times (generation, shared layers) has one map for each call: `seen[name]` is the
    last, `seen.calls(name)` returns all. The decoding steps of a `regard.nn` module form one map, and so do calls with
    one head and one query each over the same values (the decoder of a recurrent translator). `encoder`, `decoder`
    and `cross` have the maps of one part of the model. `model` is the name of the model. `missing` names the attention
    modules without a map, with the reason. `verify()` compares recomputed weights @ values with the output of the
    kernel.

    Rows without any allowed key (padding) are zeros, whatever the backend returns there.

    A watcher makes it, and fills its arguments while the model runs: `parts`, the calls of each module by path; the
    reasons of `missing`; and `order`, the paths in the order of the model. `verified` says whether calls are verified.

    >>> import torch, regard as rg
    >>> encoder = rg.nn.TransformerConfig(8, num_heads=2).encoder(layers=2).eval()
    >>> with rg.watch(encoder) as seen:
    ...     states = encoder(torch.randn(1, 5, 8))
    >>> seen.names, seen[1].shape
    (['layers.0.self_attention', 'layers.1.self_attention'], (1, 2, 5, 5))
    >>> [weights.shape for weights in seen], seen[1].query.shape
    ([(1, 2, 5, 5), (1, 2, 5, 5)], torch.Size([1, 2, 5, 4]))
    """

    def __init__(
        self,
        parts: dict[str, ModuleCalls],
        missing: dict[str, str],
        order: list[str],
        verified: bool,
        model: str = "",
    ) -> None:
        self._parts, self._missing, self._order, self._verified = parts, missing, order, verified
        self.model = model
        #: Whether watch(layers=...) chose layers: then numbers are those of the layers in the model.
        self.has_chosen_layers = False
        self.inputs, self.texts, self.tokenizer = ModelInputs(), ReadTexts(), None
        self.kept: KeptParts | None = None
        self._generations: list[Callable[[WatchedAttention], Any]] = []
        self._joined: dict[int, Any] = {}

    @property
    def names(self) -> list[str]:
        """Module paths in the order of the model."""
        return [name for name in self._order if name in self._parts]

    @overload
    def __getitem__(self, name: str | int) -> AttentionMap: ...

    @overload
    def __getitem__(self, name: slice) -> list[AttentionMap]: ...

    def __getitem__(self, name: str | int | slice) -> AttentionMap | list[AttentionMap]:
        """The map of the last call of a module, by its path or the number of its layer; a list of maps for a slice."""
        if not isinstance(name, slice):
            return self._map(self._part(name).calls[-1])
        try:
            return [self[chosen] for chosen in self._sliced(name)]
        except (TypeError, ValueError):
            raise NotCaptured(f"seen[{name!r}]: the parts of a slice are integers, and its step is not 0.") from None

    def __iter__(self) -> Iterator[AttentionMap]:
        return (self[name] for name in self.names)

    def __reversed__(self) -> Iterator[AttentionMap]:
        return (self[name] for name in reversed(self.names))

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, weights: object) -> bool:
        if not isinstance(weights, AttentionMap):
            raise RegardError("in seen: seen holds maps. seen.names has the module paths: 'layers.3' in seen.names.")
        return any(weights is own for own in self)

    def calls(self, name: str | int) -> list[AttentionMap]:
        """The maps of all calls of a module, in order. With a cache they grow."""
        return [self._map(call) for call in self._part(name).calls]

    def _map(self, call: KeptCall) -> AttentionMap:
        """The map of a call, with its values if they are kept; the same object while the program holds a reference."""
        weights, last = call.map, _SHOWN.get(call)
        if (known := None if last is None else last()) is not None and known.shape == weights.shape:
            return known
        if self.kept is not None and weights._values is None:
            weights._values = values_reader(call)
        _SHOWN[call] = ref(weights)
        return weights

    def value_weighted(self, name: str | int, projected: bool | None = None, call: int = -1) -> ValueWeightedMap:
        """The map of |w_ij| ||v_j W_h||: what a key sends to a query, not only how much the query looks at it.

        W_h is the part of the output projection for head h, where it is found: then the weights are the norms of the
        vectors f(x_j) of Kobayashi et al. (2020, arXiv:2004.10102). With `projected=False`, or without a projection,
        they are |w_ij| ||v_j||. A key with a large weight and a small value, such as a first token that nobody needs,
        has a small number. Rows may have any sum; `shares()` divides them.

        >>> import torch, regard as rg
        >>> encoder = rg.nn.TransformerConfig(8, num_heads=2).encoder(layers=2).eval()
        >>> with rg.watch(encoder, keep="qkv") as seen:
        ...     states = encoder(torch.randn(1, 5, 8))
        >>> seen.value_weighted(0).shares().entropy().shape
        torch.Size([1, 2, 5])
        """
        with _explained(f"seen.value_weighted({name!r})"):
            return self._call(name, call).value_weighted(projected)

    def head_output(self, name: str | int, head: Index = None, call: int = -1) -> Tensor:
        """The output W . values of a head, (B, I, E); of a list of heads, or of all, (B, H', I, E).

        It is computed tile by tile, in O(n) memory. Of a recurrent layer it is the output of the recurrence, before the
        norm, gate and projection that follow it.

        >>> import torch, regard as rg
        >>> attention = rg.nn.MultiHeadAttention(8, 2, output_projection=False).eval()
        >>> with rg.watch(attention, keep="qkv") as seen:
        ...     output, _ = attention(torch.randn(1, 5, 8))
        >>> torch.allclose(seen.head_output(0, 1), output[..., 4:], atol=1e-6)
        True
        """
        return self._of_heads("head_output", name, head, call, CallParts.output)

    def head_part(self, name: str | int, head: Index = None, call: int = -1) -> Tensor:
        """What a head adds to the residual stream, (B, I, C); of a list of heads, or of all, (B, H', I, C).

        It is the input of the output projection in the channels of this head, times these rows of its matrix (Elhage
        et al. 2021, "A mathematical framework for transformer circuits"). Gates and norms between the weighted values
        and the projection are in that input. The sum over all heads and `seen.bias_part(name)` is the output of the
        attention.

        >>> import torch, regard as rg
        >>> attention, x = rg.nn.MultiHeadAttention(8, 2).eval(), torch.randn(1, 5, 8)
        >>> with rg.watch(attention, keep="qkv") as seen:
        ...     output, _ = attention(x)
        >>> torch.allclose(seen.head_part(0).sum(1) + seen.bias_part(0), output, atol=1e-6)
        True
        """
        return self._of_heads("head_part", name, head, call, CallParts.part)

    def bias_part(self, name: str | int) -> Tensor:
        """What the bias of the output projection adds to the residual stream of every token, (C,)."""
        with _explained(f"seen.bias_part({name!r})"):
            return self._call(name, -1).bias()

    def logit_effect(
        self, name: Name, token: Name, head: Index = None, call: int = -1, *, against: Any = None, tokenizer: Any = None
    ) -> Tensor:
        """What heads add to the logit of a token directly, (B, H', I) for the next token after each query.

        The logit is u . norm(x), where x is the residual stream and u the row of the token in the language-model head.
        With the scale of the final norm held as it was in this call, the logit is a sum over the parts of x: each head
        adds u . (gain * (part - mean)) * scale; an RMSNorm has no mean. The sum over all heads, biases, MLPs and the
        embedding, with u . bias of the norm and the bias of the head, is the logit. This is direct logit attribution:
        the logit lens (nostalgebraist 2020) of one part, as in Elhage et al. (2021) and Wang et al. (2022,
        arXiv:2211.00593). It counts no effect through later layers. The logit is the result of the head, before a soft
        cap or a factor that some models apply to it.

        `token` is an id, or a text of one token; `tokenizer` is by default that of `watch(model, tokenizer)`. Models
        whose layers do not add their results to one stream (a norm after attention, as in BERT and Gemma 2) are
        refused. With `against`, a second token, it is the effect on the difference of the two logits.

        >>> import torch, transformers, regard as rg
        >>> config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> with torch.no_grad(), rg.watch(model, keep="qkv") as seen:
        ...     logits = model(torch.tensor([[3, 1, 4, 1, 5]])).logits
        >>> seen.logit_effect(1, token=9).shape, seen.logit_effect(1, token=9, head=0)[0, -1].shape
        (torch.Size([1, 2, 5]), torch.Size([]))
        """
        tokens = self._token_ids("logit_effect", token, against, tokenizer)
        return self._of_heads("logit_effect", name, head, call, lambda parts, h: parts.logit_effect(tokens, h))

    def logit_map(
        self, name: Name, token: Name, head: Index = None, call: int = -1, *, against: Any = None, tokenizer: Any = None
    ) -> AttentionMap:
        """`logit_effect` by source token: a signed map (B, H', I, J) whose rows sum to it.

        A weight times what the value of its key adds to the logit, w_ij (v_j W_h . d) scale_i: by which tokens a head
        raises the logit. It is a map as any other: rows, tiles and sums are computed on demand.

        >>> import torch, transformers, regard as rg
        >>> config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> with torch.no_grad(), rg.watch(model, keep="qkv") as seen:
        ...     logits = model(torch.tensor([[3, 1, 4, 1, 5]])).logits
        >>> by_token = seen.logit_map(1, token=9, against=7)
        >>> torch.allclose(by_token.sum(-1), seen.logit_effect(1, token=9, against=7), atol=1e-6)
        True
        """
        tokens = self._token_ids("logit_map", token, against, tokenizer)
        heads = None if head is None else axis_index("head", head)
        heads = [heads] if isinstance(heads, int) else heads  # a map keeps its axis of heads
        return self._of_heads("logit_map", name, heads, call, lambda parts, h: parts.logit_map(tokens, h))

    def _token_ids(self, caller: str, token: Name, against: Name | None, tokenizer: Any) -> list[int]:
        """The id of a token, and that of the token against which it is measured, if there is one.

        `caller` is the name of the public method, for errors.
        """
        named = {"token": token} | ({} if against is None else {"against": against})
        tokenizer = self.tokenizer if tokenizer is None else tokenizer
        return [token_id(one, tokenizer, f"seen.{caller}({name}={one!r})") for name, one in named.items()]

    def _of_heads(
        self, caller: str, name: str | int, head: Any, call: int, read: Callable[[CallParts, Tensor], Any]
    ) -> Any:
        """What `read` returns for some heads (None: all), which are on axis 1; an integer `head` drops the axis.

        `caller` is the name of the public method, for errors, and `call` the number of the call of the module.
        """
        with _explained(f"seen.{caller}({name!r})"):
            parts = self._call(name, call)
            head = axis_index("head", head) if head is not None else None
            result = read(parts, indices(f"seen.{caller}({name!r})", "head", head, parts.weights.shape[1]))
        return result[:, 0] if isinstance(head, int) else result

    def _call(self, name: str | int, call: int) -> CallParts:
        """One call of a module with its values; `NoValues` if they are not kept, or if there is no such call."""
        if self.kept is None:
            raise NoValues("values are not kept. Watch again with watch(model, keep='qkv')")
        part = self._part(name)
        if not -len(part.calls) <= call < len(part.calls):
            raise NoValues(f"call {call} is out of range: the module was called {len(part.calls)} times")
        path = next(path for path, known in self._parts.items() if known is part)
        return CallParts(path, part, call, self.kept)

    def patch_source(self, part: str, name: str | int) -> Tensor:
        """The "query", "key", "value" or "output" of all heads of a module over its calls, for
        `regard.edits.ActivationPatch`.

        Outputs (B, H, n, E) are those of heads, before the output projection.
        """
        calls = self._part(name)
        check_steps(calls, str(name))
        if part == "value":
            return self[name].value.detach()
        if part != "output":
            return queries_or_keys(calls, part, str(name))
        outputs = torch.cat([self.head_output(name, call=n) for n in range(len(calls.calls))], 2)
        return outputs.to(self[name].value.dtype)

    @property
    def maps(self) -> dict[str, AttentionMap]:
        """Module path -> the map of its last call."""
        return {name: self[name] for name in self.names}

    @property
    def kinds(self) -> dict[str, str]:
        """Module path -> what the layer is: attention, delta rule, state space, linear attention, convolution, ..."""
        return {name: self._parts[name].kind for name in self.names}

    @property
    def statistics(self) -> Statistics:
        """Module path -> the results of the reductions, after watch(keep="statistics")."""
        statistics = {name: self._parts[name].statistics for name in self.names}
        kept = {name: of_module for name, of_module in statistics.items() if of_module is not None}
        if len(kept) < len(statistics):
            raise RegardError(
                "seen.statistics: queries and keys were kept, not statistics. Compute them from a map, "
                "seen[name].summarize(*reductions), or watch again with watch(model, keep='statistics')."
            )
        return Statistics(kept)

    @property
    def missing(self) -> dict[str, str]:
        """Attention modules without a map -> why."""
        return dict(self._missing)

    @property
    def encoder(self) -> WatchedAttention:
        """The self-attention of the encoder."""
        return self._view(lambda part: part == "encoder")

    @property
    def decoder(self) -> WatchedAttention:
        """The self-attention of the decoder."""
        return self._view(lambda part: part == "decoder")

    @property
    def cross(self) -> WatchedAttention:
        """The attention of the decoder to the encoder."""
        return self._view(lambda part: part == "cross")

    @property
    def generation(self) -> Any:
        """The `generate()` that was watched, as one `Generation`: a map of prompt and output for each layer."""
        if len(self._generations) != 1:
            count = len(self._generations)
            remedy = (
                f"{count} calls of generate() were watched. seen.generations has all of them; seen.generations[0] is "
                "the first."
                if count
                else "no generate() was watched. Call model.generate(...) of a model of transformers inside the "
                "with-block of watch, before it is compiled; seen.calls(name) has the map of each call of a module."
            )
            raise NotCaptured(f"seen.generation: {remedy}")
        return self.generations[0]

    @property
    def generations(self) -> list[Any]:
        """Every `generate()` that was watched, in order, as a `Generation`."""
        for number, generation_of in enumerate(self._generations):
            if number not in self._joined:
                self._joined[number] = generation_of(self)
        return [self._joined[number] for number in range(len(self._generations))]

    def _forget_generations(self) -> None:
        """Drop all generations: a watch that keeps only some steps lasts, and would hold every one."""
        self._generations.clear()
        self._joined.clear()

    def verify(self) -> dict[str, Check]:
        """Module path -> the worst check of its calls.

        Checks are made while the model runs, since values are not kept: `watch(model, verify=True)`.
        """
        if not self._verified:
            raise RegardError("verify: values are not kept after a call. Watch again with watch(model, verify=True).")
        return {name: self._parts[name].check for name in self.names}

    def tokens_read(self, batch: int = 0) -> tuple[list[str] | None, list[str] | None]:
        """The tokens that the model read, and those that its decoder read; None where they are not known.

        They are made of the ids that the watched model was called with, by the tokenizer of `watch(model, tokenizer)`.
        """
        return tuple(  # type: ignore[return-value]
            None if ids is None or self.tokenizer is None else token_labels(self.tokenizer, ids[batch].tolist())
            for ids in (self.texts.ids, self.texts.target_ids)
        )

    @torch.no_grad()
    def show(
        self,
        tokens: Sequence[str] | None = None,
        targets: Sequence[str] | None = None,
        batch: int = 0,
        *,
        image: Any = None,
        grid: Any = None,
    ) -> Any:
        """Show every head in a notebook; needs `pip install 'regard[view]'`.

        `tokens` are the tokens that the model read, `targets` the tokens of the decoder if there is one. By default
        they are those of `watch(model, tokenizer)`.

        A model that read an image, a video or a sound is shown with it, under the weights. `image` is the image as
        the model read it, after resizing and cropping: a PIL image, an array (H, W, 3), a tensor (3, H, W), or a list
        of them. By default it is made from `pixel_values`. `grid` is (rows, columns) of the patches; for most models of
        transformers it is inferred.
        """
        widget = upper_layer("widget")
        return widget.show_texts(self._texts(widget, tokens, targets, batch, image, grid))

    @torch.no_grad()
    def save(
        self,
        path: str | PathLike[str],
        tokens: Sequence[str] | None = None,
        targets: Sequence[str] | None = None,
        batch: int = 0,
        *,
        image: Any = None,
        grid: Any = None,
    ) -> Path:
        """Write the page of every head to one file, "attention.html", which opens without a network.

        The other arguments are those of `show`. Needs `pip install 'regard[view]'`. A path without .html is a folder
        for `regard view`, which shows texts of any length exactly.

        >>> import tempfile, torch, regard as rg
        >>> encoder = rg.nn.TransformerConfig(8, num_heads=2).encoder(layers=2).eval()
        >>> with rg.watch(encoder) as seen:
        ...     states = encoder(torch.randn(1, 3, 8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     seen.save(f"{folder}/attention.html", ["a", "short", "text"]).name
        'attention.html'
        """
        widget = upper_layer("widget")
        return widget.save_texts(path, self._texts(widget, tokens, targets, batch, image, grid))

    @explained
    def heatmap(self, layer: str | int, head: Any = None, **options: Any) -> Any:
        """The heatmap of a layer, `rg.heatmap(seen[layer], tokens, head)`, with the tokens that the model read.

        Without a `title`, the title names the layer.
        """
        weights, batch = self[layer], options.get("batch", 0)
        options.setdefault("tokens", self.names_of(weights, batch))
        options.setdefault("title", heatmap_title(self._title_of(layer), head))
        return upper_layer("drawing").heatmap(weights, head=head, **options)

    def _title_of(self, layer: str | int) -> str:
        """The name of a layer in the title of a heatmap."""
        if isinstance(layer, str):
            return layer
        number = _number(layer)
        return f"layer {number}" if number >= 0 else self._name(number)

    def figure(self, *, layer: int | None = None, **options: Any) -> Any:
        """A figure for a paper, `rg.figure(seen, tokens, layer=layer)`, with the tokens that the model read."""
        weights = self[next(iter(self.names), 0) if layer is None else layer]
        options.setdefault("tokens", self.names_of(weights, 0))
        return upper_layer("drawing").figure(self, layer=layer, **options)

    def _texts(self, widget: Any, tokens: Any, targets: Any, batch: int, image: Any, grid: Any) -> Any:
        """The texts of a page, with the tokens given, or else those that the model read."""
        if not self.names:
            raise NotCaptured(f"watch: there is no text to show or to save: {self._captured()}")
        if tokens is None and targets is None:
            tokens, targets = self.tokens_read(batch)
        return widget.watched_texts(self, tokens, targets, batch, image, grid)

    def names_of(self, weights: AttentionMap, batch: int = 0) -> Any:
        """The tokens of a map of one text, or a pair, those of the queries and those of the keys.

        Queries may be fewer than the tokens of the decoder: then they are the last ones. None if the model read another
        number of tokens.
        """
        token_names = [names for names in self.tokens_read(batch) if names is not None]
        keys = next((names for names in token_names if len(names) == weights.shape[3]), None)
        queries = next(
            (names[-weights.shape[2] :] for names in reversed(token_names) if len(names) >= weights.shape[2]), None
        )
        if keys is None or queries is None:
            return None
        return keys if weights.shape[2] == weights.shape[3] and len(token_names) == 1 else (queries, keys)

    @property
    def mismatched(self) -> dict[str, Check]:
        """The checks that failed: these maps do not match the output of the kernel."""
        checks = self.verify() if self._verified else {}
        return {name: check for name, check in checks.items() if check.ok is False}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing("WatchedAttention", name, lambda: dir(WatchedAttention), OF_WATCHED, "seen.")

    def _repr_svg_(self) -> str | None:
        numbers = self._numbers or range(len(self))
        maps = {str(n): self.maps[name] for n, name in zip(numbers, self.names, strict=True) if name in self.maps}
        return (
            upper_layer("drawing").maps_svg(maps, f"{len(self)} attention modules down, heads across") if maps else None
        )

    def __repr__(self) -> str:
        numbers = self._numbers or range(len(self))
        kinds, lines = self.kinds, []
        for n, name in zip(numbers, self.names, strict=True):
            calls = self._parts[name].calls
            B, H, I, J = calls[-1].shape
            of_calls = f", call {len(calls)}" if len(calls) > 1 else ""
            of_kind = f", {kinds[name]}" if set(kinds.values()) != {ATTENTION} else ""
            lines.append(f"  {n}: {name} ({B} x {H} heads x {I} x {J}{of_calls}){of_kind}")
        lines += [f"  missing: {name}: {reason}" for name, reason in self._missing.items()]
        return "\n".join([f"WatchedAttention({len(self)} attention modules)", *lines])

    def _view(self, belongs: Callable[[str], bool]) -> WatchedAttention:
        """The modules whose part of the model, such as "encoder", belongs to the view."""
        parts = {name: part for name, part in self._parts.items() if belongs(part.part)}
        view = WatchedAttention(parts, self._missing, self._order, self._verified, self.model)
        view._take(self)
        view._generations = self._generations
        return view

    def _take(self, other: WatchedAttention) -> None:
        """Take over what another watch knows of its model, its inputs and its values."""
        self.inputs, self.texts, self.tokenizer, self.kept = other.inputs, other.texts, other.tokenizer, other.kept
        self.has_chosen_layers = other.has_chosen_layers

    def _part(self, name: str | int) -> ModuleCalls:
        """The calls of a module, by its path or number; `NotCaptured` says why there are none, or what is near."""
        if not isinstance(name, str | tuple):
            name = self._name(_number(name))
        names = self.names
        if name in self._parts:
            return self._parts[name]
        if name in self._missing:
            remedy = "" if self.names else f". {REMEDY}"
            raise NotCaptured(f"seen[{name!r}]: not captured: {self._missing[name]}{remedy}")
        inside = [own for own in names if f".{name}." in f".{own}."]  # h.1 is a part of transformer.h.1.attn
        if name in self._order and not inside:
            raise NotCaptured(f"seen[{name!r}]: this module was not watched. {self._captured()} See watch(layers=...).")
        kind = str(name[0] if isinstance(name, tuple) and name else name).rpartition(".")[2].removeprefix("hook_")
        call = f"Here: {OF_WATCHED[kind]}. " if kind in OF_WATCHED else ""
        near = f"Did you mean {inside[0]!r}? Known names: {', '.join(names)}." if inside else nearest(name, names)
        known = f"there is no such attention module. {call}{near}" if names else self._captured()
        raise NotCaptured(f"seen[{name!r}]: {known}")

    def _name(self, number: int) -> str:
        """The path of a module by its number: that of its layer if layers were chosen, else its place among the maps.

        A negative number counts from the last map in both cases. A layer that is missing gives its path, so that the
        error can say why.
        """
        names, numbers = self.names, self._numbers
        if number >= 0 and numbers is not None:
            paths = [name for name, own in zip(names, numbers, strict=True) if own == number]
            paths = paths or [name for name in self._missing if layer_number(name) == number][:1]
            if not paths:
                raise NotCaptured(f"seen[{number}]: layer {number} was not watched. {self._captured()}")
            if len(paths) > 1:
                raise NotCaptured(
                    f"seen[{number}]: layer {number} has several maps, {' and '.join(paths)}. Give one of these paths, "
                    f"or name the part: seen.encoder[{number}], seen.decoder[{number}] or seen.cross[{number}]."
                )
            return paths[0]
        if not -len(names) <= number < len(names):
            raise NotCaptured(f"seen[{number}]: {self._captured()}")
        return names[number]

    def _sliced(self, part: slice) -> list[str]:
        """The paths of a range of layers, such as seen[1:3]."""
        names, numbers = self.names, self._numbers
        if numbers is None:
            return names[part]

        def bound(number: int | None) -> int | None:
            """The layer that an end of the slice means; a negative one counts from the last chosen layer.

            An open end, None, stays open.
            """
            if number is None or number >= 0:
                return number
            return numbers[number] if number >= -len(numbers) else 0

        wanted = range(max(numbers) + 1)[bound(part.start) : bound(part.stop) : part.step]
        return [name for n in wanted for name, own in zip(names, numbers, strict=True) if own == n]

    @property
    def _numbers(self) -> list[int] | None:
        """The numbers of the layers in the model, if layers were chosen; None if maps are counted."""
        numbers = [layer_number(name) for name in self.names] if self.has_chosen_layers else []
        layer_numbers = [number for number in numbers if number is not None]
        return layer_numbers if layer_numbers and len(layer_numbers) == len(numbers) else None

    def _captured(self) -> str:
        """How many modules were captured; if none, the reasons and the remedy."""
        if self.names:
            numbers = self._numbers
            of = (
                "; they are numbered from 0"
                if numbers is None
                else f", of layers {', '.join(map(str, sorted({*numbers})))}"
            )
            return f"{len(self)} attention modules were captured{of}."
        reasons = "".join(f" {name}: {reason}." for name, reason in list(self._missing.items())[:3])
        return f"nothing was captured. {REMEDY}{reasons}"


def _number(name: Any) -> int:
    """The number of a layer, as a Python integer."""
    try:
        if not isinstance(name, bool):
            return index(name)
    except TypeError:
        pass
    raise NotCaptured(
        f"seen[{name!r}]: a layer is a number, such as seen[3], or a module path, one of seen.names. seen[1:3] is a "
        "list of maps."
    )


def heatmap_title(name: str, head: Any) -> str:
    """The title of a heatmap: the name of a layer, and the head if there is one."""
    if head is None or isinstance(head, list | tuple | range):
        return name
    return f"{name}, mean of heads" if head == "mean" else f"{name}, head {head}"


@contextmanager
def _explained(caller: str) -> Iterator[None]:
    """Raise a reason why there are no values as an error that names the call."""
    try:
        yield
    except (NoValues, UnreadableMatrix) as reason:
        raise RegardError(f"{caller}: {reason}.") from None
