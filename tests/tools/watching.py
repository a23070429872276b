"""What tests of `watch` share: the oracle, which is what transformers returns itself, and comparisons."""

from __future__ import annotations

from typing import Any

import torch

import regard as rg
from extras import older_than


def oracle(model: Any, inputs: dict[str, Any]) -> dict[str, tuple[torch.Tensor, ...]]:
    """The weights that eager returns, by part of the model."""
    backend = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = model(**inputs, output_attentions=True)
    model.set_attn_implementation(backend)
    if "encoder_attentions" in outputs:
        return {part: getattr(outputs, f"{part}_attentions") for part in ("encoder", "decoder", "cross")}
    return {"all": outputs.attentions}


def watched(model: Any, inputs: dict[str, Any], **options: Any) -> tuple[Any, rg.hf.WatchedAttention]:
    with rg.watch(model, **options) as seen, torch.no_grad():
        outputs = model(**inputs)
    return outputs, seen


def assert_same_weights(
    seen: rg.hf.WatchedAttention, expected: dict[str, tuple[torch.Tensor, ...]], real: torch.Tensor | None = None
) -> None:
    """Every map is eager's, in the rows of `real` tokens; of padding, SDPA and eager make different things."""
    for part, wanted in expected.items():
        view = seen if part == "all" else getattr(seen, part)
        assert len(view) == len(wanted) > 0
        for weights, weight in zip(view.maps.values(), wanted, strict=True):
            mine = weights.dense()
            if real is not None and real.shape[1] == mine.shape[2]:
                mine, weight = (w.transpose(1, 2)[real.bool()] for w in (mine, weight))
            torch.testing.assert_close(mine, weight, atol=1e-5, rtol=0)


def assert_identical(plain: torch.Tensor, outputs: torch.Tensor) -> None:
    torch.testing.assert_close(plain, outputs, rtol=0, atol=0)


def assert_verified(seen: rg.hf.WatchedAttention) -> None:
    checks = seen.verify()
    assert list(checks) == seen.names
    assert all(is_verified(check) for check in checks.values()), checks


def is_verified(check: Any) -> bool:
    """Whether W . values is the output. Eager attention that is not observed has the weights of its own softmax."""
    return check.ok and check.error <= check.tolerance if check.ok is not None else older_than("5.1")
