"""What differs between the versions of torch and of transformers, one function each.

"Goes with torch >= 2.9" says that the function can be deleted once older versions are no longer supported. No other
file tests a version. Lower bounds are in pyproject.toml; the table in docs/guides/install.md says what runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.errors import RegardError

#: The oldest transformers whose models are watched and edited, and the oldest for which `register` knows all masks.
WATCHED, REGISTERED = (4, 57), (5, 15)


def numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version, which are compared.

    >>> numbers("2.13.0+cpu"), numbers("5.0.0rc1")
    ((2, 13), (5, 0))
    """
    return tuple(int(part) for part in version.split(".")[:2])


# torch


@cache
def shares_key_heads() -> bool:
    """Whether torch's private kernel for CPUs shares key heads; older ones read past them. Goes with torch >= 2.9."""
    return numbers(torch.__version__) >= (2, 9)


def flex_with_logsumexp(function: Callable[..., Any], *tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of FlexAttention. Goes with torch >= 2.13.

    `function` is `flex_attention`, compiled or not; `tensors` are query, key and value. torch 2.8 has no `AuxRequest`.
    On CPUs, versions before 2.13 are called in float32, because 2.8 rounds half-precision scores there.
    """
    from torch.nn.attention import flex_attention

    if numbers(torch.__version__) < (2, 13) and tensors[0].device.type == "cpu":
        tensors = tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)
    if not hasattr(flex_attention, "AuxRequest"):
        return function(*tensors, **options, return_lse=True)
    output, aux = function(*tensors, **options, return_aux=flex_attention.AuxRequest(lse=True))
    return output, aux.lse


# transformers


def backend_lookup() -> tuple[Any, str] | None:
    """The class of transformers that finds a backend for each call, and its method; None if there is none.

    The method is `__getitem__` before 5.1: goes with transformers >= 5.1. A transformers that was not imported, that
    cannot be imported or that is older, has no models which could be watched.
    """
    module = sys.modules.get("transformers")
    try:
        if module is None or numbers(module.__version__) < WATCHED:
            return None
        from transformers.modeling_utils import AttentionInterface
    except Exception:  # a broken installation may raise anything, and models of torch do not need it
        return None
    return AttentionInterface, "get_interface" if hasattr(AttentionInterface, "get_interface") else "__getitem__"


def hidden_eager(model: nn.Module) -> str:
    """What to say of a model whose eager attention does not look for a backend. Goes with transformers >= 5.1."""
    is_eager = getattr(getattr(model, "config", None), "_attn_implementation", "") == "eager"
    if not is_eager or (lookup := backend_lookup()) is None or lookup[1] == "get_interface":
        return ""
    return " Seeing eager attention needs transformers 5.1 or newer. Load the model with attn_implementation='sdpa'."


def check_model(model: nn.Module, operation: str) -> None:
    """Refuse a model of a transformers whose attention calls cannot be observed."""
    bases = {base.__module__.partition(".")[0] for module in model.modules() for base in type(module).__mro__}
    if "transformers" in bases and backend_lookup() is None:
        version = getattr(sys.modules.get("transformers"), "__version__", "(unknown)")
        raise RegardError(
            f"{operation}: {type(model).__name__} is a model of transformers {version}, whose attention calls cannot "
            "be observed. Upgrade it: pip install 'transformers>=4.57,<6'."
        )


def check_register() -> None:
    """Refuse `register` where the masks are others or models run their own softmax. Goes with transformers >= 5.15."""
    from transformers import __version__

    if numbers(__version__) < REGISTERED:
        raise RegardError(
            f"register: it needs transformers 5.15 or newer, and {__version__} is installed. rg.watch and rg.edit work "
            "with this version. Upgrade it: pip install 'transformers>=5.15,<6'."
        )


def fills_width(kind: type[nn.Module]) -> bool:
    """Whether an attention class reshapes its heads to the width of the model, which fewer heads do not have.

    CLIP, SigLIP and StableLM did. Goes with transformers >= 5.12.
    """
    code = unwrap(kind.forward).__code__
    return "embed_dim" in code.co_varnames or "hidden_size" in code.co_names


def mask_sizes(cache: Any, num_queries: int, layer: int) -> tuple[int, int]:
    """Number of keys and index of the first key of a cache, for a layer and the queries that follow.

    Goes with transformers >= 5.4: older ones take a tensor of positions.
    """
    try:
        return cache.get_mask_sizes(num_queries, layer)
    except AttributeError:  # a number has no shape
        return cache.get_mask_sizes(torch.arange(num_queries), layer)


def check_generation(model: nn.Module, config: Any) -> None:
    """Refuse chunks of a prompt that are read outside of the model's hooks. Goes with transformers >= 5.0."""
    if getattr(config, "prefill_chunk_size", None) is not None and hasattr(model, "_prefill_chunking"):
        raise RegardError("watch: generate(prefill_chunk_size=) needs transformers 5.0 or newer.")


def remapping_function(masking_utils: Any) -> Callable[..., Any] | None:
    """The function that counts the positions of packed documents from their starts; None for versions that have none.

    Goes with transformers >= 5.23, all of which have it.
    """
    return getattr(masking_utils, "remap_positions_for_packed_sequence", None)
