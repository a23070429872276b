"""Gradients beside numerical slopes, large scores, bfloat16, and time beside torch's kernel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.diagnosis.calling import Caller, Inputs, WithoutRounding, copy_of
from regard.diagnosis.failures import short_message
from regard.diagnosis.progress import of_threads
from regard.diagnosis.report import CheckFinding

#: A bfloat16 has 8 bits, so one rounding is off by 0.2 %. A larger share of error than this has another cause.
BFLOAT16_ERROR = 0.25
#: A step of inputs that is small beside the curvature of attention, and large beside one rounding of a bfloat16.
STEP_OF_ROUNDING = 4e-3
#: Shares of the output: float32 rounds by 1e-7, float16 by 2e-4.
ROUNDING = 2e-5
#: Steps of central differences. A function that computes its scores in float32 needs a larger one than float64 does.
STEPS = {torch.float64: (1e-5, 1e-2), torch.float32: (1e-2,)}

_DETACHED = (
    "Look for .detach(), .data, .item(), .numpy(), torch.no_grad() or torch.tensor(...) between input and output."
)


def gradient_finding(caller: Caller) -> CheckFinding:
    """Whether gradients are finite and equal to central differences along a random direction, for each input."""
    if caller.numpy:
        return CheckFinding("gradient", "unknown", "NumPy has no gradients.")
    if not caller.takes_gradients():
        text = "The function does not run with tensors that require a gradient."
        return CheckFinding("gradient", "wrong", text, _DETACHED, "the gradient is detached")
    query, key, value = inputs = [x.requires_grad_() for x in caller.sizes.sample(8, caller.dtype)]
    leaves: dict[str, list[Tensor]] = {name: [x] for name, x in zip(caller.roles.inputs, inputs, strict=False)}
    if isinstance(caller.function, nn.Module):
        learned: list[Tensor] = [
            p for p in caller.function.parameters() if p.requires_grad and p.dtype.is_floating_point
        ]
        leaves |= {"the parameters": learned} if learned else {}

    def loss() -> Tensor:
        output = caller(query, key, value).output
        toward = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        return (output * toward.to(output)).sum()

    return _beside_slopes(leaves, loss)


def _beside_slopes(leaves: dict[str, list[Tensor]], loss: Callable[[], Tensor]) -> CheckFinding:
    """The finding about the gradients of tensors, which are in groups by the names of their arguments.

    `loss` computes a number from the tensors as they are at the time, so that they can be moved.
    """
    value = loss()
    if not value.requires_grad:
        text = "The output has no gradient at all."
        return CheckFinding("gradient", "wrong", text, _DETACHED, "the gradient is detached")
    if not value.isfinite():
        return CheckFinding("gradient", "unknown", "The output itself is not finite.")
    flat = [x for group in leaves.values() for x in group]
    try:
        found = torch.autograd.grad(value, flat, allow_unused=True)
    except RuntimeError as error:
        text = f"torch cannot compute the gradient: {short_message(error)}"
        remedy = "Do not change a tensor in place (x -= y, x.exp_()) that the backward pass needs."
        return CheckFinding("gradient", "wrong", text, remedy, "the gradient cannot be computed")
    by_tensor = dict(zip(map(id, flat), found, strict=True))
    gradients = {name: [by_tensor[id(x)] for x in group] for name, group in leaves.items()}
    for name, group in gradients.items():
        if not all(g is None or bool(g.isfinite().all()) for g in group):
            remedy = "Look for log(0), sqrt(0), 0 / 0 or inf - inf."
            text = f"The gradient of {name} is not finite."
            return CheckFinding("gradient", "wrong", text, remedy, "the gradient is not finite")
    wrong = {name: pair for name, group in leaves.items() if (pair := _unequal_slopes(group, gradients[name], loss))}
    if not wrong:
        text = f"Gradients of {', '.join(leaves)} are finite, and equal to numerical slopes."
        return CheckFinding("gradient", "right", text)
    said = "; ".join(f"{name}: {a:.3g}, numerically {n:.3g}" for name, (a, n) in wrong.items())
    is_cut = all(g is None or not g.any() for name in wrong for g in gradients[name])
    mistake = "the gradient is detached" if is_cut else "the gradient is wrong"
    return CheckFinding("gradient", "wrong", f"Slopes along a random direction: {said}.", _DETACHED, mistake)


def _unequal_slopes(
    group: list[Tensor], gradients: Sequence[Tensor | None], loss: Callable[[], Tensor]
) -> tuple[float, float] | None:
    """Analytic and numerical slope, if they differ for each size of step; else None.

    `group` are the tensors of one argument, `gradients` those of the loss for each, and `loss` computes the loss from
    the tensors as they are at the time.
    """
    slopes = [_slopes(group, gradients, loss, step) for step in STEPS.get(group[0].dtype, (1e-2,))]
    if all(abs(analytic - numeric) > 1e-2 * max(abs(numeric), 1e-2) + 1e-4 for analytic, numeric in slopes):
        return slopes[-1]
    return None


def _slopes(
    group: list[Tensor], gradients: Sequence[Tensor | None], loss: Callable[[], Tensor], step: float
) -> tuple[float, float]:
    """Slopes along a random direction, from gradients and from a central difference of this step.

    `group` are tensors of any shapes, and `gradients` those of `loss` for each, None for 0. The tensors are moved in
    place, since parameters are what the function reads, and then moved back.
    """
    generator = torch.Generator().manual_seed(2)
    directions = [torch.randn(x.shape, dtype=torch.float64, generator=generator).to(x) for x in group]
    analytic = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True) if g is not None)
    ends = []
    with torch.no_grad():
        for sign in (1, -2):  # one step forward, then two back
            for x, d in zip(group, directions, strict=True):
                x.add_(sign * step * d)
            ends.append(float(loss()))
        for x, d in zip(group, directions, strict=True):
            x.add_(step * d)
    return analytic, (ends[0] - ends[1]) / (2 * step)


@torch.no_grad()
def precision_finding(caller: Caller) -> CheckFinding | None:
    """Whether numbers are rounded to half precision inside; None if this cannot be seen."""
    try:
        single = in_dtype(caller, torch.float32)
        noise = _noise(single)
    except Exception:  # of the user's function
        single, noise = caller, _noise(caller)
    if noise is None:
        return None
    if noise < ROUNDING:
        return CheckFinding("precision", "right", "Nothing is rounded to half precision inside.")
    # casts are the cause if the noise goes away with them
    with WithoutRounding() as casts:
        unrounded = _noise(single)
    text = f"Rounding inside is about {100 * noise:.2g} % of the output, for inputs of more digits."
    remedy = (
        "Compute scores and softmax in float32 or in the dtype of the inputs: no .half() and no .to(torch.float16)."
    )
    if not casts.dtypes or unrounded is None or unrounded > noise / 3:
        text = f"Small changes of the inputs change the output irregularly, by {100 * noise:.2g} %."
        return CheckFinding("precision", "unknown", text, f"Right for a threshold inside, such as ReLU. Else: {remedy}")
    names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in casts.dtypes))
    return CheckFinding("precision", "wrong", text, remedy, f"the result is rounded to {names}")


def _noise(caller: Caller) -> float | None:
    """The share of the output that rounding changes; None if the output is not finite, or differs between equal calls.

    A smooth function has fourth differences of about step^4. Those of rounded numbers have the size of the rounding.
    """
    inputs = caller.sizes.sample(12, caller.dtype)
    along = caller.sizes.sample(13, caller.dtype, scale=1.0)
    outputs = []
    for step in (-2, -1, 0, 1, 2, 2):  # the last call is repeated: equal calls must give equal outputs
        query, key, value = (x + step * STEP_OF_ROUNDING * d for x, d in zip(inputs, along, strict=True))
        outputs.append(caller(query, key, value).output.double())
    if not (torch.stack(outputs).isfinite().all() and outputs[0].numel() and torch.equal(outputs[-1], outputs[-2])):
        return None
    fourth = outputs[0] - 4 * outputs[1] + 6 * outputs[2] - 4 * outputs[3] + outputs[4]
    # a quantile, because a threshold inside (top-k, relu) gives few outputs a large difference; fourth differences of
    # independent roundings are sqrt(70), about 8, times as large as one
    return float(fourth.abs().flatten().quantile(0.75) / outputs[2].square().mean().sqrt().clamp(min=1e-12)) / 8


@torch.no_grad()
def large_score_finding(caller: Caller) -> CheckFinding:
    """Whether scores of about 1,000 and more still give numbers, in float32."""
    query, key, value = caller.sizes.sample(9, torch.float32)
    inputs = (60 * query, 60 * key, value)
    try:
        single = in_dtype(caller, torch.float32)
        before, after = single(query, key, value).output, single(*inputs).output
    except Exception as error:  # of the user's function
        return CheckFinding("large scores", "unknown", f"It does not run in float32: {short_message(error)}")
    if before.isfinite().all() and not after.isfinite().all():
        text = "With queries and keys 60 times as large the output has NaN or inf, in float32."
        remedy = "Subtract the maximum of each row before exp, or use torch.softmax, which does."
        return CheckFinding("large scores", "wrong", text, remedy, "large scores overflow")
    return CheckFinding("large scores", "right", "With queries and keys 60 times as large the output stays finite.")


@torch.no_grad()
def bfloat16_finding(caller: Caller) -> CheckFinding:
    """How far the output in bfloat16 is from that of float64 on the same rounded inputs."""
    query, key, value = (x.to(torch.bfloat16) for x in caller.sizes.sample(10))
    if caller.numpy:
        return CheckFinding("bfloat16", "unknown", "NumPy has no bfloat16.")
    try:
        rounded = in_dtype(caller, torch.bfloat16)
        low = rounded(query, key, value).output
        # the parameters of a module are rounded in both calls
        exact = in_dtype(replace(caller, function=rounded.function), torch.float64)
        high = exact(query.double(), key.double(), value.double()).output
    except Exception as error:  # of the user's function
        remedy = "Make constants with dtype=q.dtype, device=q.device; fill with -inf or torch.finfo(q.dtype).min."
        return CheckFinding("bfloat16", "unknown", f"It does not run in bfloat16: {short_message(error)}", remedy)
    if not high.isfinite().all():
        return CheckFinding("bfloat16", "unknown", "The output itself is not finite.")
    error = float((low.double() - high).abs().max() / high.nan_to_num().abs().max().clamp(min=1e-12))
    text = f"The largest error of bfloat16 is {100 * error:.2g} % of the largest output."
    if not low.isfinite().all():
        return CheckFinding("bfloat16", "wrong", "The output in bfloat16 has NaN or inf.", "", "bfloat16 overflows")
    if error > BFLOAT16_ERROR:
        return CheckFinding(
            "bfloat16", "wrong", text, "Compute scores and softmax in float32.", "bfloat16 loses the result"
        )
    return CheckFinding("bfloat16", "right", text)


def in_dtype(caller: Caller, dtype: torch.dtype) -> Caller:
    """The same call in another dtype; a module is copied."""
    function = copy_of(caller.function).to(dtype) if isinstance(caller.function, nn.Module) else caller.function
    return replace(caller, function=function, dtype=dtype)


def speed_finding(caller: Caller, length: int = 256) -> CheckFinding:
    """Time of one call beside torch's kernel on tensors of the same shape, with queries of the keys' width."""
    with of_threads(caller.progress.num_threads), torch.no_grad():
        return _timed(caller, length)


def _timed(caller: Caller, length: int) -> CheckFinding:
    """The finding of `speed_finding`, for `length` tokens in float32.

    16 tokens come first: a call that would take more than a second for all, if time is quadratic, is not made.
    """
    sizes = replace(caller.sizes, queries=length, keys=length) if caller.sizes.queries > 1 else caller.sizes
    caller = in_dtype(replace(caller, sizes=sizes), torch.float32)
    inputs: Inputs = sizes.sample(11, torch.float32)
    try:
        short: Inputs = tuple(x[:, :, :16] for x in inputs)  # type: ignore[assignment]
        if _loops(lambda: caller(*short), (length / 16) ** 2):
            return CheckFinding(
                "speed", "unknown", "It would take more than a second for 256 tokens: it may loop in Python."
            )
        own = _seconds(lambda: caller(*inputs))
    except Exception as error:  # of the user's function
        return CheckFinding("speed", "unknown", f"It does not run with {length} tokens: {short_message(error)}")
    is_grouped = sizes.key_heads is not None
    of_kernel = replace(sizes, width=sizes.key_width or sizes.width).sample(11, torch.float32)
    kernel = _seconds(lambda: functional.scaled_dot_product_attention(*of_kernel, enable_gqa=is_grouped))
    text = f"{1e3 * own:.2g} ms a call for {sizes.queries} queries; scaled_dot_product_attention {1e3 * kernel:.2g} ms."
    return CheckFinding("speed", "right", text)


def _loops(call: Callable[[], object], times: float) -> bool:
    """Whether `times` as much work takes more than a second. A busy machine delays a call: it is repeated for 0.2 s."""
    until = time.perf_counter() + 0.2
    while _seconds(call, 2) * times > 1.0:
        if time.perf_counter() > until:
            return True
    return False


def _seconds(call: Callable[[], object], repeats: int = 3) -> float:
    """The shortest of several times of a call in seconds: other work on the machine does not matter."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)
