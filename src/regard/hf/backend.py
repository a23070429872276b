"""`register` makes Regard a backend of transformers: `attn_implementation="regard"`."""

from __future__ import annotations

import inspect
from functools import wraps
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from regard.attention_output import attend
from regard.checks import checked
from regard.engine.ring import Ring
from regard.errors import MissingPackage, RegardError
from regard.hf.calls import Call, MaskCache, Translation, Untranslatable, translate
from regard.hf.masks.span_masks import OURS, spans_mask

#: Masks and biases that the layers of a model share, read once per forward.
_masks = MaskCache()


@checked
def register() -> None:
    """Run any Hugging Face model on Regard's engines: load it with `attn_implementation="regard"`.

    Masks become spans instead of n x n tensors: causal, windows, chunks, padding, packed sequences. Softcaps, sinks,
    position biases, shared heads, caches, dropout and gradients work as in the model, and outputs equal those of sdpa
    up to rounding. A model that Regard cannot run raises a `RegardError` when it is built or at its first call.
    Calling `register` twice changes nothing. Inside `Ring.as_default` a model runs on the share of each rank, without
    padding and with its `position_ids`.

    >>> import torch, transformers, regard as rg
    >>> rg.register()
    >>> config = transformers.LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=20)
    >>> model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="regard").eval()
    >>> model(torch.tensor([[3, 1, 4, 1, 5]])).logits.shape
    torch.Size([1, 5, 20])
    """
    if find_spec("transformers") is None:
        raise MissingPackage("register", "transformers", "hf")
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, __version__
    from transformers.masking_utils import sdpa_mask

    if not {"q_length", "q_offset", "mask_function"} <= set(inspect.signature(sdpa_mask).parameters):
        raise RegardError(
            f"register: transformers {__version__} has another mask interface; pip install 'transformers>=5.23,<6'."
        )
    if OURS in AttentionInterface():
        return
    from regard.hf.compiled import attention_function, mark_mask_functions, mask_maker

    AttentionInterface.register(OURS, attention_function(run))
    AttentionMaskInterface.register(OURS, mask_maker(spans_mask))
    mark_mask_functions()
    _refuse_models_with_backends_of_their_own(PreTrainedModel)


def run(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The backend function of transformers: (B, H, I, D), (B, G, J, D), (B, G, J, E) -> (B, I, H, E), None."""
    call = Call(module, OURS, run, query, key, value, attention_mask, options, to_run=True)
    if options.get("output_attentions"):
        raise RegardError(
            f"regard: {type(module).__name__} was called with output_attentions, which returns all weights at once. "
            "`with rg.watch(model) as seen` computes any of them on demand."
        )
    try:
        translation = translate(call, _masks)
    except Untranslatable as reason:
        raise RegardError(
            f"regard: the attention of {type(module).__name__} cannot be run: {reason}. "
            "Set attn_implementation='sdpa' or 'eager' for this model."
        ) from None
    if Ring.default() is not None:
        output = _run_share(translation, key, value, options.get("position_ids"))
    else:
        output = attend(translation.attention, translation.query, key, value, positions=translation.positions).output
    return output.transpose(1, 2).contiguous(), None


def _run_share(translation: Translation, key: Tensor, value: Tensor, position_ids: Tensor | None) -> Tensor:
    """The output for this rank's share of the tokens. The ring knows their positions."""
    seen = attend(translation.attention, translation.query, key, value)
    positions = seen.weights.grid.query
    if position_ids is not None and not bool((position_ids == positions).all()):
        raise RegardError(
            f"regard: inside Ring.as_default this rank has the tokens at the positions {int(positions[0])} to "
            f"{int(positions[-1])}, and position_ids are {int(position_ids.min())} to {int(position_ids.max())}. Give "
            "each rank its own: model(ring.share(ids, axis=1), position_ids=ring.share(torch.arange(n)[None], axis=1))."
        )
    return seen.output


def _refuse_models_with_backends_of_their_own(base: Any) -> None:
    """Refuse "regard" for models without the attention interface, which accept any name and run their own code."""
    original = base.get_correct_attn_implementation

    @wraps(original)
    def get_correct_attn_implementation(self: Any, requested_attention: Any, is_init_check: bool = False) -> Any:
        if requested_attention == OURS and not self._can_set_attn_implementation():
            raise RegardError(
                f"regard: {type(self).__name__} computes attention in its own code, without a backend, so "
                "attn_implementation='regard' would change nothing. Load it without; rg.watch may capture its maps."
            )
        return original(self, requested_attention, is_init_check)

    base.get_correct_attn_implementation = get_correct_attn_implementation
