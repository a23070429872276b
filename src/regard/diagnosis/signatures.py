"""Which argument of a function is the query, the key, the value, the mask: read from the names in its signature."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from regard.base.errors import RegardError

QUERY = {"q", "query", "queries", "x", "input", "inputs", "hidden", "hidden_state", "hidden_states", "decoder_hidden"}
QUERY |= {"decoder_state", "decoder_states", "embeddings", "tokens", "tgt", "target", "src", "seq", "xq", "qs"}
KEY = {"k", "key", "keys", "kv", "xk", "ks"}
OTHER_SEQUENCE = {"context", "memory", "encoder_output", "encoder_outputs", "encoder_states", "encoder_hidden_states"}
OTHER_SEQUENCE |= {"annotations", "source", "y", "encoder_hiddens"}
VALUE = {"v", "value", "values", "xv", "vs"}
CAUSAL = {"is_causal", "causal"}
DROPOUT = {"dropout", "dropout_p", "dropout_rate", "p_dropout", "attn_dropout", "p_drop", "drop"}
TRAINING = {"training", "train", "is_training"}
#: Names of the state of a recurrent decoder, and of the states of its encoder.
RECURRENT = {"decoder_hidden", "decoder_state", "decoder_states", "hidden", "hidden_state", "state", "annotations"}
RECURRENT |= {"encoder_output", "encoder_outputs", "encoder_states", "encoder_hiddens"}
#: Names of a cache of earlier keys and values; the first call has None.
CACHES = {"cache", "kv_cache", "past", "past_kv", "past_key_value", "past_key_values", "layer_past", "past_keys_values"}
#: Such an argument for the keys or the values alone, for example `past_k`, `key_cache` or `cached_values`.
_CACHE_OF_ONE = re.compile("(past|cached?|prev|previous)_(k|v|keys?|values?)|(k|v|keys?|values?)_(cache|past)")
#: Required arguments that are neither inputs nor masks, and their values; "width" stands for the width of the inputs.
OTHERS: dict[str, Any] = {
    **dict.fromkeys(("d_k", "dk", "dim", "d_model", "head_dim", "width", "embed_dim", "d", "hidden_size"), "width"),
    **dict.fromkeys(CAUSAL | TRAINING | {"need_weights", "return_weights"}, False),
    **dict.fromkeys(DROPOUT, 0.0),
}


@dataclass(frozen=True)
class Roles:
    """Names of the arguments of one function: `inputs` in the order query, key, value; then masks and switches.

    `causal`, `dropout` and `training` are the switches of these, None without one. `positional` are those of the inputs
    that cannot be given by name. `required` has the values of the other arguments that a call needs; "width" stands for
    the width of the inputs. `caches` are one argument for keys and values together, or one for each.
    """

    inputs: tuple[str, ...]
    positional: tuple[str, ...]
    masks: tuple[str, ...]
    causal: str | None
    dropout: str | None
    training: str | None
    caches: tuple[str, ...]
    required: dict[str, Any]

    @property
    def is_recurrent(self) -> bool:
        """Whether a recurrent decoder attends to its encoder: then scores have no factor, or that of the width."""
        return len(self.inputs) > 1 and all(name.lower() in RECURRENT for name in self.inputs)

    @property
    def is_self(self) -> bool:
        """Whether the one input is query, key and value."""
        return len(self.inputs) == 1


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The signature; of a built-in function, such as scaled_dot_product_attention, that of its docstring."""
    try:
        return inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        written = re.search(r"\w+\((.*?)\) *->", function.__doc__ or "", re.S)
        with contextlib.suppress(SyntaxError):
            if written is not None:
                return _parsed(written[1])
        raise RegardError(
            f"check: {function!r} has no signature that Python can read. Wrap it: def f(q, k, v): ..."
        ) from None


def _parsed(text: str) -> inspect.Signature:
    """The signature of parameters in a text such as "q, k, scale=None", as Python reads it."""
    (definition,) = ast.parse(f"def f({text}): ...").body
    arguments = definition.args  # type: ignore[attr-defined]
    named = [*arguments.args, *arguments.kwonlyargs]
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults + arguments.kw_defaults
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    empty = inspect.Parameter.empty
    parameters = [
        inspect.Parameter(n.arg, kind, default=empty if d is None else _literal(d))
        for n, d in zip(named, defaults, strict=True)
    ]
    return inspect.Signature(parameters)


def _literal(written: ast.expr) -> Any:
    """The value of a default; of a name such as torch.preserve_format, its text."""
    try:
        return ast.literal_eval(written)
    except ValueError:
        return ast.unparse(written)


def roles_of(function: Callable[..., Any]) -> Roles:
    """The roles of the arguments, by their names, and by their order if the names say nothing.

    A `RegardError` says which role is not known. A required mask is None in calls without one.
    """
    parameters = [p for p in signature_of(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    names = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
    required = [p.name for p in parameters if p.default is p.empty and p.name in names]
    masks = tuple(name for name in names if "mask" in name.lower() or name.lower() in ("valid", "keep", "pad"))
    caches = _caches(names, [name for name in required if name not in masks])
    inputs = _inputs(names, [name for name in required if name not in caches], masks)
    if not inputs and any(p.kind is p.VAR_POSITIONAL for p in parameters):
        inputs = ("q", "k", "v")  # f(*inputs)
    others = [name for name in required if name not in (*inputs, *masks, *caches)]
    unknown = [name for name in others if name.lower() not in OTHERS]
    if not inputs or unknown:
        raise RegardError(_unclear(function, inputs, unknown))
    # of f(*inputs), q, k and v are no names of parameters
    only_positional = {p.name for p in parameters if p.kind is p.POSITIONAL_ONLY} | (set(inputs) - set(names))
    return Roles(
        inputs,
        tuple(name for name in inputs if name in only_positional),
        masks,
        _first(names, CAUSAL),
        _first(names, DROPOUT),
        _first(names, TRAINING),
        caches,
        {name: OTHERS[name.lower()] for name in others} | {m: None for m in (*masks, *caches) if m in required},
    )


def _inputs(names: list[str], required: list[str], masks: tuple[str, ...]) -> tuple[str, ...]:
    """The names of query, key and value, of which key and value may be missing; nothing without a query.

    `names` are those of all arguments, `required` those without a default, and `masks` those of masks.
    """
    by_role = [
        _first(names, QUERY),
        _first(names, KEY) or _first(required, OTHER_SEQUENCE),
        _first(names, VALUE),
    ]
    free = [n for n in required if n not in (*by_role, *masks) and n.lower() not in OTHERS]
    if free and not all(by_role):  # names that say nothing stand for the roles in their order
        for place, role in enumerate(by_role):
            if role is None and free:
                by_role[place] = free.pop(0)
    if by_role[0] is not None and by_role[1] is None and by_role[2] is not None:
        by_role[1:] = [by_role[2], None]  # f(query, values): the values are the keys too
    return tuple(name for name in by_role if name is not None)


def _caches(names: list[str], required: list[str]) -> tuple[str, ...]:
    """The arguments of a cache: one for keys and values together, or one for each.

    In f(query, key_cache, value_cache) the caches are the keys and values.
    """
    if together := _first(names, CACHES):
        return (together,)
    caches = tuple(name for name in names if _CACHE_OF_ONE.fullmatch(name.lower()))
    is_over_them = {name.lower() for name in required if name not in caches} <= {"q", "query", "queries"}
    return () if is_over_them else caches


def _first(names: list[str], known: set[str]) -> str | None:
    """The first of the names that is known, in any case; None if none is."""
    return next((name for name in names if name.lower() in known), None)


def _unclear(function: Callable[..., Any], inputs: tuple[str, ...], unknown: list[str]) -> str:
    """The text of the error for arguments whose role is not known: those in `unknown`, beside the `inputs` found."""
    read = f"has {', '.join(inputs)} as query, key and value, but"
    found = f"{read} what is {', '.join(unknown)}?" if inputs else ""
    return (
        f"check: {name_of(function)}{signature_of(function)}: it {found or 'has no argument for a query'}. An "
        "attention takes (x), (query, keys) or (q, k, v), and optional masks. Wrap it: def f(q, k, v): ..."
    )


def name_of(subject: Any) -> str:
    """The name by which a report calls a function, a module or a piece."""
    return getattr(subject, "__name__", None) or getattr(
        getattr(subject, "func", None), "__name__", type(subject).__name__
    )


#: Arguments of constructors that are the width of a module; of them, those of one head.
WIDTHS = (
    "width", "d_model", "embed_dim", "hidden_size", "hidden_dim", "dim", "emb_dim", "embed_size", "d_in", "n_embd",
    "input_dim", "in_dim", "d_out", "units", "query_dim", "key_dim", "value_dim", "hidden", "model_dim", "d_embed",
    "attention_dim", "attn_dim", "enc_dim", "dec_dim", "encoder_dim", "decoder_dim",
)  # fmt: skip
HEAD_WIDTHS = ("head_size", "head_dim", "d_k", "d_v", "dim_head", "dk", "dv")
HEADS = ("num_heads", "n_heads", "heads", "nhead", "h", "n_head", "num_attention_heads")
LENGTHS = ("max_len", "max_length", "block_size", "context_length", "seq_len", "max_seq_len", "context_len")


def build(kind: type) -> Any:
    """An instance of a class, with sizes for the arguments that its constructor requires."""
    parameters = inspect.signature(kind).parameters.values()
    sizes = dict.fromkeys(WIDTHS, 16) | dict.fromkeys(HEADS, 2) | dict.fromkeys(LENGTHS, 64)
    is_multi_head = any(p.name.lower() in HEADS for p in parameters)
    sizes |= dict.fromkeys(HEAD_WIDTHS, 8 if is_multi_head else 16) | {"dropout": 0.1, "dropout_p": 0.1}
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    unknown = [name for name in needed if name.lower() not in sizes]
    example = f"attention = {kind.__name__}(...), and check this instance"
    if unknown:
        raise RegardError(f"check: {kind.__name__} needs {', '.join(unknown)}. Make an instance: {example}.")
    try:
        return kind(**{name: sizes[name.lower()] for name in needed})
    except Exception as error:  # of the user's constructor
        tried = ", ".join(f"{name}={sizes[name.lower()]}" for name in needed)
        raise RegardError(f"check: {kind.__name__}({tried}) failed: {error}. Make an instance: {example}.") from error
