"""The finding about weights that a function returns beside its output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.diagnosis.calling import Caller, Inputs
from regard.diagnosis.report import CheckFinding
from regard.diagnosis.weights import Measurement, close, measure


@torch.no_grad()
def returned_finding(caller: Caller, measurement: Measurement | None) -> CheckFinding | None:
    """Whether returned weights are those that were used, and sum to 1 also with dropout; None if none are returned."""
    inputs = caller.sizes.sample(0, caller.dtype)
    weights = caller(*inputs).weights
    if weights is None:
        return None
    dropped = _weights_with_dropout(caller, inputs)
    if dropped is not None and not close(dropped.sum(-1), weights.sum(-1), 1e-3):
        low, high = dropped.sum(-1).min(), dropped.sum(-1).max()
        text = f"With dropout the rows of the returned weights sum to {low:.2f} ... {high:.2f}."
        text += " nn.MultiheadAttention returns such weights too."
        remedy = "To return them before dropout: dropped = dropout(weights); return dropped @ v, weights."
        return CheckFinding("weights", "unknown", text, remedy)
    if measurement is None:
        return CheckFinding("weights", "unknown", "Returned weights could not be compared with those that were used.")
    return _beside_used(weights, _used_weights(caller, inputs, measurement))


def _used_weights(caller: Caller, inputs: Inputs, measurement: Measurement) -> list[Tensor]:
    """The weights that multiply the values, and those that are meant if a mistake between them is undone."""
    if caller.undone.weights is None:
        return [measurement.weights]
    raw = measure(replace(caller, undone=replace(caller.undone, weights=None)), inputs)
    return [measurement.weights, *([raw.weights] if raw is not None else [])]


def _beside_used(weights: Tensor, used: list[Tensor]) -> CheckFinding:
    """The finding about returned weights beside those that the call used, one of `used` (B, H, I, J).

    The mean over the heads is right too: nn.MultiheadAttention returns it.
    """
    candidates = [w for each in used for w in (each, each.mean(1, keepdim=True))]
    if any(_is_equal(weights, w) for w in candidates):
        mean = ", the mean of the heads" if weights.shape[1] < used[0].shape[1] else ""
        return CheckFinding("weights", "right", f"The returned weights are those used{mean}.")
    text = f"The returned weights {tuple(weights.shape)} are not those that make the output."
    remedy = "Return the tensor that multiplies the values."
    mistake = "the returned weights are not those used"
    if any(_is_equal(weights, w.mT) for w in candidates):
        text = f"The returned weights {tuple(weights.shape)} have the keys before the queries."
        remedy = "Return (..., queries, keys), the tensor that multiplies the values, not its transpose."
        mistake = "the returned weights are transposed"
    return CheckFinding("weights", "wrong", text, remedy, mistake)


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and close(one, other, 1e-3)


def _weights_with_dropout(caller: Caller, inputs: Inputs) -> Tensor | None:
    """Returned weights in training, with dropout if the function has any; None if it does not run so.

    Its argument for dropout may be a probability or a module.
    """
    function, name, training = caller.function, caller.roles.dropout, caller.roles.training
    switches: list[dict[str, Any]] = [{name: 0.5}, {name: nn.Dropout(0.5)}] if name else [{}]
    was_training = isinstance(function, nn.Module) and function.training
    for switch in switches:
        try:
            if isinstance(function, nn.Module):
                function.train()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return caller(*inputs, switch | ({training: True} if training else {}), with_dropout=True).weights
        except Exception:  # the other kind of dropout may be the one it takes
            continue
        finally:
            if isinstance(function, nn.Module):
                function.train(was_training)
    return None
