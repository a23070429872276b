"""`TextInputs`: the arguments of one call of a model, with its tokens and which of them are padding."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from regard.base.errors import RegardError

#: The names of the arguments of a translator (`Translates`).
SOURCE, TARGET = "source", "target"


@runtime_checkable
class Translates(Protocol):
    """A model that is called with `source` and `target`, as those of `rg.lab`; `logits` turns its output to logits."""

    padding_id: int
    end_id: int

    def logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class TextInputs:
    """The arguments of a call. `ids` (B, n) are the tokens that the model reads, the source of an encoder-decoder.

    `args` and `kwargs` are passed to the model. Only a translator has a `padding_id`; other models have masks. Here and
    below `operation` is the name of the public function, for errors.

    >>> import torch
    >>> inputs = TextInputs.of(torch.nn.Embedding(9, 4), torch.tensor([[3, 1, 4]]))
    >>> inputs.ids.tolist(), inputs.run(torch.nn.Embedding(9, 4)).shape
    ([[3, 1, 4]], torch.Size([1, 3, 4]))
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    padding_id: int | None = None

    @staticmethod
    def of(model: nn.Module, inputs: Any, operation: str = "attribute") -> TextInputs:
        """Token ids (B, n), or the arguments of the model by name, as a tokenizer returns them.

        Of a translator (`Translates`) they are `source` and `target`.
        """
        options = _without_cache(model)
        if isinstance(model, Translates):
            return TextInputs((), _pair(inputs, operation), model.padding_id)
        if isinstance(inputs, Tensor):
            ids = _checked_ids(operation, inputs)
            _check_decoder(model, {}, operation)
            return TextInputs((ids,), options)
        if isinstance(inputs, Mapping):
            given = dict(inputs)
            if isinstance(given.get("input_ids"), Tensor):
                given["input_ids"] = _checked_ids(operation, given["input_ids"])
            _check_decoder(model, given, operation)
            return TextInputs((), options | given)
        kind = type(inputs).__name__
        raise RegardError(
            f"{operation}: inputs is a {kind}; give token ids (B, n), or the arguments of the model by name: "
            "tokenizer(text, return_tensors='pt')."
        )

    @property
    def ids(self) -> Tensor | None:
        """The tokens (B, n), if the model reads token ids."""
        ids = self.args[0] if self.args else self.kwargs.get(self._name)
        return ids if isinstance(ids, Tensor) else None

    @property
    def _name(self) -> str:
        """The name of the keyword argument that holds the tokens: "source" of a translator, else "input_ids"."""
        return SOURCE if SOURCE in self.kwargs and "input_ids" not in self.kwargs else "input_ids"

    @property
    def decoder_ids(self) -> Tensor | None:
        """The tokens (B, n) that the decoder of an encoder-decoder reads."""
        ids = self.kwargs.get(TARGET if self._name == SOURCE else "decoder_input_ids")
        return ids if isinstance(ids, Tensor) else None

    @property
    def batch_size(self) -> int:
        """The number of sequences: the length of the first tensor among the arguments, or 1."""
        tensors = [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor) and x.ndim]
        return len(tensors[0]) if tensors else 1

    def need_ids(self, operation: str) -> Tensor:
        """The tokens; a model that reads none is refused."""
        if self.ids is None:
            raise RegardError(
                f"{operation}: the inputs have no token ids ({', '.join(self.kwargs) or 'nothing'}). Give input_ids."
            )
        return self.ids

    def last_real(self) -> Tensor:
        """The index of the last token of each sequence that is no padding, (B,): of the decoder, if there is one."""
        is_decoder = self.decoder_ids is not None
        ids = self.decoder_ids if is_decoder else self.need_ids("attribute")
        mask = self.kwargs.get("decoder_attention_mask" if is_decoder else "attention_mask")
        assert ids is not None
        if self._name == SOURCE:
            mask = ids != self.padding_id
        if not isinstance(mask, Tensor) or mask.shape != ids.shape:
            return torch.full((len(ids),), ids.shape[1] - 1)
        places = torch.arange(ids.shape[1], device=mask.device)
        return (places * (mask != 0)).amax(1).cpu()  # also right for padding at the left

    def real(self) -> Tensor:
        """Which tokens are no padding, (B, n)."""
        ids, mask = self.need_ids("attribute"), self.kwargs.get("attention_mask")
        if self._name == SOURCE:
            mask = ids != self.padding_id
        fits = isinstance(mask, Tensor) and mask.shape == ids.shape
        return mask != 0 if fits else torch.ones_like(ids, dtype=torch.bool)  # type: ignore[return-value]

    def run(self, model: nn.Module) -> Any:
        """Call the model. For a translator the result is its logits."""
        output = model(*self.args, **self.kwargs)
        return model.logits(output) if isinstance(model, Translates) else output

    def repeated(self, count: int) -> TextInputs:
        """The same single sequence `count` times."""
        args = tuple(_repeated(x, count) for x in self.args)
        return replace(self, args=args, kwargs={name: _repeated(x, count) for name, x in self.kwargs.items()})

    def with_ids(self, ids: Tensor) -> TextInputs:
        """The same call with other tokens."""
        if self.args:
            return replace(self, args=(ids, *self.args[1:]))
        return replace(self, kwargs=self.kwargs | {self._name: ids})

    def with_mask(self, mask: Tensor) -> TextInputs:
        """The same call with another `attention_mask`."""
        return replace(self, kwargs=self.kwargs | {"attention_mask": mask})


def _check_decoder(model: nn.Module, given: Mapping[str, Any], operation: str) -> None:
    """Refuse inputs of an encoder-decoder of transformers that lack the tokens its decoder reads.

    `given` are the inputs by name.
    """
    is_pair = getattr(getattr(model, "config", None), "is_encoder_decoder", False) and takes(model, "decoder_input_ids")
    if is_pair and not isinstance(given.get("decoder_input_ids"), Tensor):
        raise RegardError(
            f"{operation}: {type(model).__name__} is an encoder-decoder, and the inputs do not say what its decoder "
            "has read. Give decoder_input_ids (B, m): the start token and the words so far, as generate() returns them."
        )


def check_tokenizer(model: nn.Module, tokenizer: Any, operation: str) -> None:
    """Refuse one tokenizer for the two vocabularies of a translator."""
    if tokenizer is not None and isinstance(model, Translates):
        raise RegardError(
            f"{operation}: a translator has two vocabularies, and one tokenizer would give its source tokens wrong "
            "names. Leave `tokenizer` out, and give the target by its id: run.target_tokenizer.encode(text)."
        )


def _pair(inputs: Any, operation: str) -> dict[str, Any]:
    """The source and the target of a translator, by name. They are given so, or as a pair of tensors."""
    is_pair = isinstance(inputs, tuple | list) and len(inputs) == 2
    given = dict(zip((SOURCE, TARGET), inputs, strict=True)) if is_pair else inputs
    if (
        not isinstance(given, Mapping)
        or set(given) != {SOURCE, TARGET}
        or not all(isinstance(ids, Tensor) for ids in given.values())
    ):
        raise RegardError(
            f"{operation}: a translator reads two tensors of ids: {{'source': (B, S), 'target': (B, T)}}, where the "
            "target begins with the start of sentence."
        )
    return {name: _checked_ids(operation, ids) for name, ids in given.items()}


def takes(model: nn.Module, name: str) -> bool:
    """Whether the forward of a model has a parameter of this name."""
    try:
        parameters = inspect.signature(without_adapters(model).forward).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters


def without_adapters(model: Any) -> nn.Module:
    """The model inside a PeftModel, whose own class and forward say nothing of it; any other model itself."""
    return getattr(model, "get_base_model", lambda: model)()


def _without_cache(model: nn.Module) -> dict[str, Any]:
    """`use_cache=False` for models that have this option: one call reads the whole text, so no later call needs its
    keys.
    """
    return {"use_cache": False} if takes(model, "use_cache") else {}


def _checked_ids(operation: str, ids: Tensor) -> Tensor:
    """The token ids, if they are integers (B, n) and not empty."""
    if ids.is_floating_point() or ids.ndim != 2 or 0 in ids.shape:
        raise RegardError(
            f"{operation}: token ids are integers (batch, length), at least one; got {ids.dtype} of shape "
            f"{tuple(ids.shape)}. For one sequence: ids[None]."
        )
    return ids


def _repeated(value: Any, count: int) -> Any:
    """A tensor of one batch entry, copied to `count` entries; any other value as it is."""
    if isinstance(value, Tensor) and value.ndim and len(value) == 1:
        return value.expand(count, *value.shape[1:]).contiguous()  # models may call .view on what they read
    return value
