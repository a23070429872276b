"""`watch` is the block in which a model is watched: it may be entered again, in several threads, and nested."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from regard.base.checks import Size, checked
from regard.base.errors import RegardError, nearest
from regard.hf.attention_modules import ChosenLayers
from regard.hf.capture.call_watcher import CallWatcher
from regard.hf.capture.generation_steps import StepOptions, WatchedStep
from regard.hf.capture.model_maps import WatchedAttention
from regard.hf.capture.module_hooks import module_calls
from regard.hf.capture.module_statistics import checked_reductions
from regard.hf.capture.transformers_interface import is_compiled
from regard.hf.capture.watcher import ALL, CompiledWatcher, Watcher
from regard.maps import Reduction

QKV = "qkv"
KEEPS = ("qk", QKV, "statistics")
#: Stands for no model.
EVERY_CALL = nn.Module()


@checked
def watch(
    model: nn.Module = EVERY_CALL,
    tokenizer: Any = None,
    *,
    layers: int | str | Iterable[int | str] | None = None,
    keep: str = "qk",
    verify: bool | str = True,
    grad: bool = False,
    reductions: Iterable[Reduction] | None = None,
    on_step: Callable[[WatchedStep], object] | None = None,
    keep_steps: Size | None = None,
    keep_calls: Size | None = None,
) -> AbstractContextManager[WatchedAttention]:
    """Capture every attention map of a model, or of all calls in a block, while they run on their own backend.

    The watch keeps queries and keys, O(n) for each layer. Weights are recomputed from them when you read a map. The
    outputs of the model are bit-identical. `layers` takes layer numbers or module paths (with * and ?).

    With the `tokenizer` of the model, `seen` knows the tokens that the model read: `seen.show()`, `seen.save(path)`,
    `seen.heatmap(layer, head)` and `seen.figure(...)` need no more.

    With `verify` a few rows of every call are recomputed and compared with the output of the kernel; if they differ,
    the block ends with a `RegardError`. With `verify="all"`, and for a backend that you registered, every row is
    verified, in quadratic time but linear memory. For a module that computes softmax itself (Bloom, DeBERTa, your own)
    the inputs are kept, and the module runs once more when you read its map. If the module changes these weights, or
    works in blocks or by hashing (Longformer, BigBird, Reformer, deformable attention), its weights are measured: it
    runs with unit vectors as its values.

    The recurrent layers of transformers (delta rules as in Qwen3-Next and Kimi Linear, Mamba-1 and -2 and their
    hybrids, lightning attention, RWKV, xLSTM, RG-LRU, short convolutions) have maps too: `seen.kinds` says which layer
    is which. Their weights are signed, and W . values is the output of the recurrence. In Mamba-1, RWKV, RG-LRU and
    convolutions each channel is a head.

    With `keep="qkv"` the values (B, G, J, E) and the inputs of output projections are kept, too: `seen[3].value`, and
    what each head adds to the residual stream (`head_part`) or to a logit (`logit_effect`).

    Maps are detached, so that `seen` holds no activations. With `grad=True` they have gradients: weights and statistics
    of them may be a part of a loss. A layer that has none, because it is recurrent or its module must run again, is in
    `missing`. Under `torch.no_grad()` the block raises an error at its start; a call inside of it that runs under
    `torch.no_grad()`, of a teacher perhaps, has a detached map.

    With `keep="statistics"` the `reductions` (by default entropy, strongest link, distance and weight received) are
    computed while the model runs, and queries and keys are discarded: `seen.statistics[name].of(regard.maps.Entropy)`.

    After `generate()`, `seen.generation` has one map of prompt and output for each layer. `on_step` is called after
    each forward pass with a `WatchedStep`: the maps of its new rows, while the model generates. An error in it ends
    the block. With `keep_steps=n` only the last n passes are kept, so a watch can last as long as a server runs.

    You can watch several models at once and nest blocks. A watch sees only the calls of its own thread. If a model
    runs in another thread, begin the watch there, or pass the context to the thread:
    `Thread(target=contextvars.copy_context().run, args=(model.generate, ...))`. A recomputation by activation
    checkpointing does not count as a call. A compiled model is watched if its backend is "regard", whose attention is
    an operator of the graph. Any other compiled model, or one that computes attention in an unknown way, is refused or
    listed in `missing`: it never gets a wrong map.

    Without a model, `watch()` captures every call of `F.scaled_dot_product_attention`, `nn.MultiheadAttention`, torch's
    encoder layers, attention backends of transformers, `rg.attend` and `rg.nn` in the block, by the thread that opened
    it. `seen[0]` is the first call. `print(seen)` shows the file and line of each call, and why one has no map. With
    `keep_calls=n` only the newest n calls are kept, under their numbers. Outputs are bit-identical, except that
    compiled code runs eagerly in the block, in all threads. Functions of TorchScript are not seen.

    >>> import torch, transformers, regard as rg
    >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
    >>> with rg.watch() as seen:
    ...     output = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> seen[0], seen[0][0, 1, 2].gt(0).tolist()
    (AttentionMap(1 x 2 heads x 5 queries x 5 keys), [True, True, True, False, False])
    >>> config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)
    >>> model = transformers.GPT2LMHeadModel(config).eval()
    >>> with rg.watch(model) as seen:
    ...     _ = model(torch.tensor([[3, 1, 4, 1, 5]]))
    >>> seen[1], seen[1].attention.mask
    (AttentionMap(1 x 2 heads x 5 queries x 5 keys), causal())
    """
    _check_options(tokenizer, keep, verify, grad)
    checked = checked_reductions(reductions, keep)
    if model is EVERY_CALL:
        given = {"tokenizer": tokenizer, "layers": layers, "on_step": on_step, "keep_steps": keep_steps}
        _refuse_without_model([name for name, value in given.items() if value is not None])
        return _Watch(lambda: CallWatcher(keep_calls, verify, checked, keep == QKV, _checked_mode(grad)))
    if keep_calls is not None:
        raise RegardError(
            "watch(model, keep_calls=...): keep_calls belongs to watch() without a model. The calls of a model are "
            "bounded by its passes: watch(model, keep_steps=...)."
        )
    if isinstance(layers, list | tuple) and not layers:
        raise RegardError("watch(model, layers=[]): the list of layers is empty. Leave out layers= for all of them.")
    compiled, model = is_compiled(model), getattr(model, "_orig_mod", model)
    chosen = ChosenLayers(layers)
    watcher, steps = CompiledWatcher if compiled else Watcher, StepOptions(on_step, keep_steps)
    if compiled:
        _check_compiled(grad, steps)
    if keep == QKV and keep_steps is not None:
        raise RegardError(
            "watch(keep='qkv', keep_steps=...): the parts of heads are kept for all steps. Watch with keep='qk', or "
            "leave keep_steps out."
        )

    def new_watcher() -> Watcher:
        made = watcher(model, chosen, verify, checked, keep == QKV, steps, _checked_mode(grad))
        made.seen.tokenizer = tokenizer
        return made

    return _Watch(new_watcher)


def _check_options(tokenizer: Any, keep: str, verify: bool | str, grad: bool) -> None:
    """Refuse values that these options of `watch` do not have, and gradients of statistics."""
    if isinstance(tokenizer, int | str | list | tuple):
        raise RegardError(
            f"watch(model, {tokenizer!r}): the second argument is the tokenizer. Give layers by name, watch(model, "
            f"layers={tokenizer!r}), and the tokens of a text later, seen.save(path, tokens=...)."
        )
    if tokenizer is not None and not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise RegardError(
            f"watch: the tokenizer must have convert_ids_to_tokens, as those of transformers, got "
            f"{type(tokenizer).__name__}. Without one, give tokens later: seen.show(tokens)."
        )
    if keep not in KEEPS:
        raise RegardError(f"watch(keep={keep!r}): keep names what is kept. {nearest(str(keep), KEEPS)}")
    if verify not in (True, False, ALL):
        raise RegardError(
            f"watch(verify={verify!r}): verify is True (a few rows), {ALL!r} (every row) or False (none)."
        )
    if grad and keep == "statistics":
        raise RegardError(
            "watch(grad=True, keep='statistics'): these statistics are computed without a graph, since queries and "
            "keys are discarded. Watch with keep='qk', and compute them from the maps: seen[name].summarize(...)."
        )


def _check_compiled(grad: bool, steps: StepOptions) -> None:
    """Refuse what a watch of a compiled model cannot give: graphs (`grad`), and the passes of the model (`steps`)."""
    if grad:
        raise RegardError(
            "watch(grad=True): the attention of a compiled model has no graph outside of it. Watch the model before it "
            "is compiled."
        )
    if steps != StepOptions():
        raise RegardError(
            "watch(on_step=..., keep_steps=...): the passes of a compiled model are not observed, only its attention. "
            "Watch the model before it is compiled."
        )


def _refuse_without_model(names: list[str]) -> None:
    """Refuse arguments that only a model has a meaning for."""
    if names:
        listed = ", ".join(f"{name}=..." for name in names)
        raise RegardError(
            f"watch({listed}): without a model there are no layers, passes and tokens, only calls. Give the model, "
            f"watch(model, {listed}), or bound the calls by watch(keep_calls=...) and give tokens later: "
            "seen.heatmap(0, tokens=tokens)."
        )


def _checked_mode(grad: bool) -> bool:
    """Refuse graphs outside of grad mode, when the block begins."""
    if grad and not torch.is_grad_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise RegardError(
            f"watch(grad=True): torch.{mode} is active, so no weight can have gradients. Enter the block outside of "
            f"torch.{mode}(), or leave grad=True out."
        )
    return grad


@contextmanager
def _watching(watcher: Watcher) -> Iterator[WatchedAttention]:
    """One block of a watch; only if it ends without an error, `conclude` checks what was captured."""
    with watcher.observing():
        yield watcher.seen
    watcher.conclude()


class _Watch(AbstractContextManager[WatchedAttention]):
    """A context manager that can be entered several times: each block captures its own calls.

    Several threads may have open blocks of one watch. Each thread ends its own block, or, if it has none, the last. The
    watcher of an own block is among the observers of this thread (`module_calls.observers`).
    """

    def __init__(self, new_watcher: Callable[[], Watcher]) -> None:
        self._new_watcher = new_watcher
        self._open: list[tuple[Watcher, AbstractContextManager[WatchedAttention]]] = []

    def __enter__(self) -> WatchedAttention:
        watcher = self._new_watcher()
        block = _watching(watcher)
        seen = block.__enter__()
        self._open.append((watcher, block))
        return seen

    def __exit__(self, *error: Any) -> bool | None:
        own = [block for block in self._open if block[0] in module_calls.observers]
        last = (own or self._open)[-1]
        self._open.remove(last)
        return last[1].__exit__(*error)

    def __getitem__(self, key: object) -> NoReturn:
        raise RegardError(
            f"watch(...)[{key!r}]: nothing is captured before the watch is entered. Run the model inside "
            "`with regard.watch(model) as seen:` and read the maps from `seen`."
        )
