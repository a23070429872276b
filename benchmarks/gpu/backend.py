"""The backend of `rg.register()` beside transformers' sdpa: differences to float64, prefill and decoding times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import regard as rg
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.models import SMALL, STACK, llama, text
from benchmarks.gpu.rows import Job, Row

FIELDS = {"regard", "sdpa"}
BACKENDS = ("regard", "sdpa")


def jobs(machine: Machine) -> Iterator[Job]:
    """Differences first: a backend that is wrong needs no time."""
    for dtype in ("bfloat16", "float16", "float32"):
        about = {"work": "error of the logits to float64", "model": SMALL, "dtype": dtype}
        yield Job(about | {"tokens": machine.size(512, 24)}, partial(differences, machine, dtype))
    for shape in (SMALL, STACK):
        for work, measure in (("prefill, ms", prefill), ("a token of decoding, ms", decoding)):
            for length in machine.size((1024, 8192, 32_768), (24,)):
                about = {"work": work, "model": shape, "dtype": "bfloat16", "tokens": length}
                yield Job(about, partial(measure, machine, shape, length))


def on_both(model: Any, run: Callable[[], Any]) -> dict[str, Any]:
    """The result of a run on each backend."""
    found = {}
    for backend in BACKENDS:
        model.set_attn_implementation(backend)
        found[backend] = run()
    return found


@torch.no_grad()
def differences(machine: Machine, dtype: str) -> Row:
    """The largest error of either backend; ours may be twice that of sdpa, which rounds at other places."""
    rg.register()
    length = machine.size(512, 24)
    model = llama(machine, SMALL, dtype)
    ids = text(machine, model, length)
    logits: dict[str, Tensor] = on_both(model, lambda: model(ids).logits.double())
    exact = model.double()
    exact.set_attn_implementation("eager")
    expected = exact(ids).logits
    llama.cache_clear()  # the model is float64 now
    errors = {name: float((found - expected).abs().max()) for name, found in logits.items()}
    largest = float(expected.abs().max())
    limit = 2 * errors["sdpa"] + 1e-6 * largest
    equal = torch.equal(logits["regard"], logits["sdpa"])
    return errors | {"limit": limit, "identical": equal, "holds": errors["regard"] <= limit}


@torch.no_grad()
def prefill(machine: Machine, shape: str, length: int) -> Row:
    rg.register()
    model = llama(machine, shape, "bfloat16")
    ids = text(machine, model, length)

    def run(backend: str) -> None:
        model.set_attn_implementation(backend)
        model(ids)

    return dict(zip(BACKENDS, machine.medians(*(partial(run, name) for name in BACKENDS)), strict=True))


@torch.no_grad()
def decoding(machine: Machine, shape: str, length: int) -> Row:
    """The next tokens after a text that is in the cache."""
    rg.register()
    model, count = llama(machine, shape, "bfloat16"), machine.size(32, 2)
    ids = text(machine, model, length)
    caches = on_both(model, lambda: model(ids, use_cache=True).past_key_values)

    def run(backend: str) -> None:
        model.set_attn_implementation(backend)
        for _ in range(count):
            model(ids[:, -1:], past_key_values=caches[backend], use_cache=True)

    times = machine.medians(*(partial(run, name) for name in BACKENDS), rounds=5)
    return {name: milliseconds / count for name, milliseconds in zip(BACKENDS, times, strict=True)}
