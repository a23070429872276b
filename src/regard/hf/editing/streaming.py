"""`streaming` runs a model whose streaming heads see their first and last keys only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from regard.base.checks import checked
from regard.base.errors import RegardError, nearest
from regard.edits.layer_edits import LayerEdit, LayerEdits, Pairs
from regard.edits.values import KnockOut
from regard.edits.where import Indices, Where
from regard.hf.attention_modules import attention_modules
from regard.hf.calls import AttentionCall
from regard.hf.capture.transformers_interface import backend_calls, refuse_compiled
from regard.hf.edited_calls import CallEditor, editors
from regard.hf.editing.places import Place, first_numbers, place_of
from regard.pieces.grid import Grid
from regard.stats.cache_split import KeyHeadSplit


@checked
@contextmanager
def streaming(model: nn.Module, split: KeyHeadSplit) -> Iterator[None]:
    """Run a model whose streaming heads see the first `sinks` and the last `window` keys only.

    The streaming heads are those of `split` (`cache_split`), by module path. Their other keys are knocked out before
    the softmax, as if the cache had dropped them, so the output is that of a model with the smaller cache; keys keep
    their positions. All other heads are as they were. This measures what a split costs. It does not save memory: the
    cache of the model still holds every key. Attention must go through transformers' attention interface, as for
    `edit`. A watch inside shows the weights as they then are.

    >>> import torch, transformers, regard as rg
    >>> config = transformers.LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=20)
    >>> model = transformers.LlamaForCausalLM(config).eval()
    >>> ids = torch.arange(8)[None]
    >>> with torch.no_grad(), rg.watch(model) as seen:
    ...     _ = model(ids)
    >>> split = rg.stats.cache_split(seen.maps, sinks=1, window=2)
    >>> with torch.no_grad(), rg.hf.streaming(model, split.without_full()), rg.watch(model) as streamed:
    ...     _ = model(ids)
    >>> streamed[0][0, 0, 7].gt(0).int().tolist()
    [1, 0, 0, 0, 0, 0, 1, 1]
    """
    refuse_compiled(model, "streaming")
    editor = _StreamingHeads(model, split)
    with ExitStack() as stack:
        stack.enter_context(backend_calls.replaced())
        stack.enter_context(editors.adding(editor))
        for module in editor.heads:
            stack.callback(module.register_forward_pre_hook(editor.keep_place, with_kwargs=True).remove)
        yield
    editor.conclude()


@dataclass(frozen=True)
class FarPairs(Pairs):
    """All pairs of some heads whose key is none of the first `sinks`, and `window` or more positions before the query.

    >>> import torch, regard as rg
    >>> grid = rg.types.Grid.whole(rg.types.Positions.aligned_to_end(4, 4), 1, 1, 4)
    >>> FarPairs(Indices.of(0), sinks=1, window=2).cells(grid)[0, 0].int().tolist()
    [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]]
    """

    sinks: int = 0
    window: int = 1

    def cells(self, grid: Grid) -> Tensor:
        """For each pair of a tile, whether it is selected: (B or 1, H or 1, I, J)."""
        query, key = grid.i + self.query_shift, grid.j + self.key_shift
        return self.rows(grid) & (key >= self.sinks) & (query - key >= self.window)


class _StreamingHeads(CallEditor):
    """Knocks the far keys of the streaming heads out of the calls of one model.

    `heads` are the numbers of the streaming heads of each module, and `places` where its next call stands.
    """

    def __init__(self, model: nn.Module, split: KeyHeadSplit) -> None:
        modules = attention_modules(model)
        self.split, self.heads = split, dict[nn.Module, list[int]]()
        self.names, self.places = {module: name for name, module in modules.items()}, dict[nn.Module, Place | None]()
        self.edited_modules: set[nn.Module] = set()
        for name, layer in split.layers.items():
            if name not in modules:
                raise RegardError(
                    f"streaming: {type(model).__name__} has no attention module {name!r}, which the split has. "
                    f"{nearest(name, modules)}"
                )
            if layer.streaming_heads:
                self.heads[modules[name]] = layer.streaming_heads

    def keep_place(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The hook before a module: keep where its next call stands in the sequence."""
        self.places[module] = place_of(module, args, kwargs)

    def selects(self, module: nn.Module) -> bool:
        """Whether a module has streaming heads."""
        return module in self.heads

    def edited(self, call: AttentionCall) -> AttentionCall:
        """The call with the far keys of its streaming heads knocked out."""
        heads = self.heads.get(call.module)
        if heads is None:
            return call
        num_heads = call.query.shape[1]
        if heads[-1] >= num_heads:
            raise RegardError(
                f"streaming: the split has {heads[-1] + 1} heads in {self.names[call.module]}, which has {num_heads}."
            )
        self.edited_modules.add(call.module)
        pairs = FarPairs(Indices.of(*heads), sinks=self.split.sinks, window=self.split.window)
        added = LayerEdits((LayerEdit(KnockOut(Where(heads=heads)), pairs),))
        return call.with_edits(added, first_numbers(call, self.places.get(call.module)))

    def patched(self, call: AttentionCall, output: Tensor) -> Tensor:
        """The output of the call, which is not patched."""
        return output

    def conclude(self) -> None:
        """Refuse a model of whose modules with streaming heads one ran without the attention interface."""
        ran = [module for module in self.heads if module in self.places]
        missing = [self.names[module] for module in ran if module not in self.edited_modules]
        if missing:
            raise RegardError(
                f"streaming: {', '.join(missing[:5])} did not use the attention interface of transformers, so the "
                "model ran with all its keys there."
            )
