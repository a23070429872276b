"""Whether watching, editing, generating and attributing leave the bits of a model, on each kernel of SDPA."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard as rg
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.models import SMALL, STACK, Call, head_outputs, llama, recorded, text
from benchmarks.gpu.rows import Job, Row, is_without_kernel
from regard.attribution.traced_run import ROUNDINGS

FIELDS = {"identical", "difference", "limit", "holds"}
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
DTYPES = ("bfloat16", "float16", "float32")
#: The layer, head and key that edits change.
LAYER, HEAD, KEY = 1, 1, 3
#: The math kernel holds all scores.
LONGEST_MATH = 8192


@dataclass(frozen=True)
class BenchSettings:
    """A model and a kernel."""

    machine: Machine
    shape: str
    length: int
    dtype: str
    kernel: str
    own_keys: bool = False

    @property
    def model(self) -> Any:
        return llama(self.machine, self.shape, self.dtype, self.own_keys)

    @property
    def ids(self) -> Tensor:
        return text(self.machine, self.model, self.length)

    @property
    def eps(self) -> float:
        return torch.finfo(getattr(torch, self.dtype)).eps

    def chosen(self) -> AbstractContextManager[Any]:
        return sdpa_kernel(KERNELS[self.kernel])

    def logits(self) -> Tensor:
        with self.chosen():
            return self.model(self.ids).logits


def jobs(machine: Machine) -> Iterator[Job]:
    """Layers of 8B first, because their lengths are what people ask for."""
    for length in machine.size((1024, 8192, 32_768), (24,)):
        for dtype in DTYPES[:2]:
            for kernel in KERNELS:
                if kernel != "math" or length <= LONGEST_MATH:
                    setting = BenchSettings(machine, STACK, length, dtype, kernel)
                    yield from (_job(setting, name) for name in ("watch", "knock-out"))
    for dtype in DTYPES:
        for kernel in KERNELS:
            setting = BenchSettings(machine, SMALL, machine.size(512, 24), dtype, kernel)
            yield from (_job(setting, name) for name in CHECKS)


def _job(setting: BenchSettings, name: str) -> Job:
    about = {"model": setting.shape, "tokens": setting.length, "dtype": setting.dtype, "kernel": setting.kernel}
    return Job(about | {"check": name}, partial(_with_keys_that_fit, CHECKS[name], setting))


def _with_keys_that_fit(check: Callable[[BenchSettings], Row], setting: BenchSettings) -> Row:
    """The check; with a key head for each query head if the kernel has no shared ones."""
    try:
        return {"key_heads": "shared"} | check(setting)
    except RuntimeError as error:
        if not is_without_kernel(error):
            raise
        return {"key_heads": "own"} | check(replace(setting, own_keys=True))


def rows_of(setting: BenchSettings) -> list[slice]:
    """The queries that are compared: some in the middle, and the last."""
    n, count = setting.length, setting.machine.size(32, 4)
    return [slice(n // 2, n // 2 + count), slice(n - count, n)]


@torch.no_grad()
def watch(setting: BenchSettings) -> Row:
    """Logits with and without a watch; weights beside the formula in float64, and beside eager attention."""
    plain, calls = recorded(setting.logits)
    repeats = torch.equal(plain, setting.logits())
    with rg.watch(setting.model) as seen:
        watched = setting.logits()
    difference, to_eager = 0.0, 0.0
    for weights, call in zip(seen.maps.values(), calls, strict=True):
        for rows in rows_of(setting):
            ours = weights[0, :, rows]
            difference = max(difference, _apart(ours, call.scores(rows, torch.float64).softmax(-1)[0]))
            eager = call.scores(rows, call.query.dtype).softmax(-1, torch.float32).to(call.query.dtype)
            to_eager = max(to_eager, _apart(ours, eager[0]))
    limit = max(call.rounding() for call in calls)
    verified = all(check.ok for check in seen.verify().values())
    found = _row(torch.equal(plain, watched), difference, limit)
    found["holds"] &= verified and not seen.missing
    return found | {"to_eager": to_eager, "verified": verified, "repeats": repeats}


@torch.no_grad()
def edit(edits: rg.edits.AttentionEdit, is_knocked_out: bool, setting: BenchSettings) -> Row:
    """The heads of a layer with and without an edit of one head: the others keep their bits."""
    model, limit, difference = setting.model, 0.0, 0.0
    with head_outputs(model, LAYER) as outputs:
        plain, calls = recorded(setting.logits)
        with rg.edit(model, edits):
            setting.logits()
        after = setting.logits()
    before, edited, _ = outputs
    others = [head for head in range(before.shape[2]) if head != HEAD]
    call = _head(calls[LAYER], HEAD)
    for rows in rows_of(setting):
        scores = call.scores(rows, torch.float64)
        if is_knocked_out:
            scores[..., KEY] = -torch.inf
        expected = call.output(scores.softmax(-1))[0, 0]
        difference = max(difference, _apart(edited[0, rows, HEAD], expected))
    limit = (2 * setting.eps + call.rounding()) * float(call.value.abs().max())
    found = _row(torch.equal(before[:, :, others], edited[:, :, others]), difference, limit)
    restored, changed = torch.equal(plain, after), not torch.equal(before, edited)
    found["holds"] &= restored and (changed or not is_knocked_out)
    return found | {"changed": changed, "restored": restored}


@torch.no_grad()
def generate(static: bool, setting: BenchSettings) -> Row:
    """Greedy tokens and their logits with and without a watch; a static cache is not compiled."""
    model, ids = setting.model, setting.ids[:, : setting.machine.size(128, 8)]
    options: dict[str, Any] = {"max_new_tokens": setting.machine.size(32, 3), "min_new_tokens": 3, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    if static:
        options |= {"cache_implementation": "static", "disable_compile": True}
    runs = []
    for context in (nullcontext(), rg.watch(model)):
        with context, setting.chosen():
            runs.append(model.generate(ids, attention_mask=torch.ones_like(ids), **options))
    plain, watched = (torch.stack(run.logits) for run in runs)
    is_same = torch.equal(plain, watched) and torch.equal(runs[0].sequences, runs[1].sequences)
    return _row(is_same, _apart(plain, watched), 0.0) | {"new_tokens": len(plain)}


def attribute(setting: BenchSettings) -> Row:
    """Weight x gradient beside that of eager attention. In half precision each layer rounds some 20 times."""
    model, ids, token = setting.model, setting.ids[:, : setting.machine.size(64, 12)], 7
    with torch.no_grad(), setting.chosen():
        plain = model(ids).logits
    with setting.chosen():
        found = rg.attribute(model, ids, target=lambda outputs: outputs.logits[:, -1, token], test=False)
        with torch.no_grad():
            after = model(ids).logits
    model.set_attn_implementation("eager")
    try:
        outputs = model(ids, output_attentions=True)
    finally:
        model.set_attn_implementation("sdpa")
    slopes = torch.autograd.grad(outputs.logits[:, -1, token].sum(), outputs.attentions)
    expected = [(w * g).detach() for w, g in zip(outputs.attentions, slopes, strict=True)]
    largest = max(float(x.abs().max()) for x in expected)
    difference = max(_apart(mine.dense(), x) for mine, x in zip(found.maps.values(), expected, strict=True)) / largest
    limit = max(1e-3, setting.eps / 2 * math.sqrt(ROUNDINGS * len(found.maps)))
    return _row(torch.equal(plain, after), difference, limit)


def _row(identical: bool, difference: float, limit: float) -> Row:
    return {
        "identical": identical,
        "difference": difference,
        "limit": limit,
        "holds": identical and difference <= limit,
    }


def _head(call: Call, head: int) -> Call:
    """One query head with its key head."""
    shared = head // (call.query.shape[1] // call.key.shape[1])
    return Call(*(x[:, h : h + 1] for x, h in ((call.query, head), (call.key, shared), (call.value, shared))))


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())


CHECKS: dict[str, Callable[[BenchSettings], Row]] = {
    "watch": watch,
    "edit that changes nothing": partial(edit, rg.edits.ScaleWeights(rg.Where(layers=LAYER, heads=HEAD), 1.0), False),
    "knock-out": partial(edit, rg.KnockOut(rg.Where(layers=LAYER, heads=HEAD, keys=KEY)), True),
    "generate": partial(generate, False),
    "generate, static cache": partial(generate, True),
    "attribute": attribute,
}
