"""Record what the library computes, and compare it with another commit: equal to the last bit, or named.

`python scripts/replay.py record FILE` computes a fixed set of small problems: every mechanism of the catalog with
several dtypes, masks, engines and grouped heads, decoding through caches, a Transformer of `regard.nn`, and three
training steps of every translator. FILE keeps one digest for each output, weight, row statistic and gradient, and the
plan without its prose. `compare FILE` computes all of it again and names every difference. The ring is left out,
because it needs several processes.

Use it around a change that must not change a number: record before the change, compare after it. Record and compare
on one machine: the last bits differ between processors and versions of torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import regard as rg
from regard.engine import ENGINES
from regard.engine.blocked import Work
from regard.lab import SYSTEMS, build
from regard.lab.models.loss import translation_loss

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
BATCH, LENGTH, LONG, VOCABULARY = 2, 24, 300, 20

Record = dict[str, Any]


def digest(value: Any) -> Any:
    """A hash of the numbers, dtype and shape of a tensor, or of nested tuples of tensors."""
    if value is None:
        return None
    if isinstance(value, tuple | list):
        return [digest(item) for item in value]
    value = value.detach().cpu().contiguous()
    numbers = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return hashlib.sha256(f"{value.dtype} {tuple(value.shape)}".encode() + numbers).hexdigest()[:16]


def masks(length: int) -> dict[str, Callable[[], rg.masks.Mask | None]]:
    """Masks that are combined with the mechanism's own."""
    coins = torch.rand(BATCH, 1, length, length, generator=torch.Generator().manual_seed(3)) < 0.7
    return {
        "own mask": lambda: None,
        "causal": rg.causal,
        "window": lambda: rg.causal() & rg.window(5),
        "padding": lambda: rg.padding([length, length // 3]),
        "documents": lambda: rg.documents([length // 2, length - length // 2]) & rg.causal(),
        "tensor": lambda: rg.mask_tensor(coins),
        "predicate": lambda: rg.mask_mod(lambda b, h, i, j: (i + j + h) % 3 != b),
        "composed": lambda: (rg.causal() | rg.masks.global_tokens([1])) & ~rg.masks.dilated(2, 2),
    }


def plan_structure(plan: Any) -> Record:
    """The plan in numbers: without prose, names of classes and seconds."""
    record: Record = {
        "engine": plan.engine,
        "requested": plan.requested,
        "refused": sorted(plan.refused),
        "quadratic": len(plan.quadratic),
        "cost": [plan.cost.pairs, plan.cost.flops, plan.cost.bytes],
    }
    if plan.engine == "blocked" and not plan.problem.is_empty:
        work = Work.of(plan.problem)
        record["block_size"] = work.block_size
        record["blocks"] = [
            [b.start, b.stop, [list(span) for span in b.columns.intervals], b.full, b.mask is None, b.batch]
            for b in work.blocks
        ]
        record["runs"] = [run.count for run in work.runs]
    return record


def explained(attention: rg.Attention, inputs: tuple[Tensor, ...], engine: str, **options: Any) -> Record:
    """The plan of a call, or that the engine refuses it."""
    try:
        return plan_structure(rg.plan(*inputs, attention=attention, engine=engine, **options))
    except rg.RegardError:
        return {"refused": True}


def attended(attention: rg.Attention, inputs: tuple[Tensor, ...], engine: str) -> Record:
    """Digests of one call: output, gradients, row statistic, weights and statistics; or that it is refused."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    wanted = [*leaves, *(p for p in attention.parameters() if p.requires_grad)]
    try:
        result = attention(*leaves, engine=engine)
    except rg.RegardError:
        return {"refused": True}
    direction = torch.randn(result.output.shape, generator=torch.Generator().manual_seed(1)).to(result.output.dtype)
    gradients = torch.autograd.grad(result.output, wanted, direction, allow_unused=True)
    return {
        "output": digest(result.output),
        "gradients": digest(gradients),
        "row statistic": digest(result.weights.row_statistic),
        "weights": digest(result.weights.dense()),
        "tile": digest(result.weights[0, -1, 3:7, 2:9]),
        "entropy": digest((result.weights if result.weights.has_shares else result.weights.shares()).entropy()),
    }


def catalog_cases() -> Iterator[tuple[str, Record]]:
    """Every mechanism with scores: dtypes, masks, engines and grouped heads."""
    for name, mechanism in rg.mechanisms().items():
        if mechanism.family != "scored":
            continue
        for dtype in DTYPES:
            for engine in ("auto", *ENGINES):
                attention, *inputs = mechanism.example(seed=5, dtype=dtype)
                case = f"{name}, {dtype}, {engine}"
                yield f"{case}, call", attended(attention, tuple(inputs), engine)
                yield f"{case}, plan", explained(attention, tuple(inputs), engine)
        yield from masked_cases(name, mechanism)
        yield from long_cases(name, mechanism)
        yield from decoding_cases(name, mechanism)


def masked_cases(name: str, mechanism: rg.types.CatalogEntry) -> Iterator[tuple[str, Record]]:
    """Other masks, and heads that share keys."""
    for mask_name, make in masks(LENGTH).items():
        for key_heads in (4, 2):
            try:
                attention, *inputs = mechanism.example(
                    seed=6, dtype=torch.float32, queries=LENGTH, keys=LENGTH, heads=4, key_heads=key_heads
                )
                mask = make()
                if mask is not None:
                    attention = attention.with_mask(mask if attention.mask is None else attention.mask & mask)
            except rg.RegardError:
                continue
            for engine in ("auto", "blocked"):
                case = f"{name}, {mask_name}, {key_heads} key heads, {engine}"
                yield f"{case}, call", attended(attention, tuple(inputs), engine)
                yield f"{case}, plan", explained(attention, tuple(inputs), engine)


def long_cases(name: str, mechanism: rg.types.CatalogEntry) -> Iterator[tuple[str, Record]]:
    """A length of several blocks; what a mechanism of a fixed length refuses is recorded as refused."""
    for mask_name in ("own mask", "window", "padding"):
        attention, *inputs = mechanism.example(seed=7, dtype=torch.float32, queries=LONG, keys=LONG)
        mask = masks(LONG)[mask_name]()
        if mask is not None:
            attention = attention.with_mask(mask if attention.mask is None else attention.mask & mask)
        yield f"{name}, {LONG} tokens, {mask_name}, call", attended(attention, tuple(inputs), "blocked")
        yield f"{name}, {LONG} tokens, {mask_name}, plan", explained(attention, tuple(inputs), "blocked")


def decoding_cases(name: str, mechanism: rg.types.CatalogEntry) -> Iterator[tuple[str, Record]]:
    """A prompt, then single tokens, through each cache."""
    caches = {
        "growing": rg.GrowingCache,
        "ring": lambda: rg.caches.RingCache(6, sinks=1),
        "recurrent": rg.caches.RecurrentCache,
    }
    for cache_name, make in caches.items():
        attention, query, key, value = mechanism.example(seed=8, dtype=torch.float32, queries=12, keys=12)
        mask = rg.causal() if attention.mask is None else attention.mask & rg.causal()
        attention, cache, outputs, plans = attention.with_mask(mask), make(), [], []
        try:
            for step in (slice(0, 5), *(slice(n, n + 1) for n in range(5, 12))):
                inputs = tuple(t[:, :, step] for t in (query, key, value))
                plans.append(explained(attention, inputs, "auto", cache=cache))
                with torch.no_grad():
                    result = attention(*inputs, cache=cache)
                outputs.append(digest(result.output))
                cache = result.cache
        except rg.RegardError:
            outputs.append("refused")
        yield f"{name}, decoding with the {cache_name} cache", {"outputs": outputs, "plans": plans}


def transformer_cases() -> Iterator[tuple[str, Record]]:
    """Transformers of `regard.nn`: output, gradients, and a decoder token by token."""
    for positions in ("sinusoidal", "learned", "rope", "alibi", "t5", "none"):
        torch.manual_seed(0)
        make = rg.nn.TransformerConfig(
            16, num_heads=4, num_key_value_heads=2, positions=positions, norm="pre", activation="swiglu"
        )
        model = rg.nn.Transformer(make.encoder(2, vocab_size=VOCABULARY), make.decoder(2, vocab_size=VOCABULARY))
        source, target = torch.randint(1, VOCABULARY, (2, 9)), torch.randint(1, VOCABULARY, (2, 7))
        mask = rg.padding([9, 4])
        output = model(source, target, mask)
        output.square().sum().backward()
        keys, past, steps = model.decoder.keys(model.encoder(source, mask), mask), None, []
        with torch.no_grad():
            for token in target.unbind(1):
                step, past = model.decoder.advance(token[:, None], keys, past)
                steps.append(step)
        yield (
            f"Transformer, {positions} positions",
            {
                "output": digest(output),
                "gradients": digest([p.grad for p in model.parameters()]),
                "steps": digest(steps),
            },
        )


def translator_cases() -> Iterator[tuple[str, Record]]:
    """Three training steps of every translator, then its logits token by token."""
    for name in SYSTEMS:
        torch.manual_seed(0)
        model = build(name, source_size=VOCABULARY, target_size=VOCABULARY, width=16, num_heads=2)
        source = torch.tensor([[5, 6, 7, 8, 3], [9, 3, 0, 0, 0]])
        target = torch.tensor([[2, 4, 9, 3, 0], [2, 7, 5, 6, 3]])
        optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = translation_loss(model, source, target, smoothing=0.1).smoothed
            loss.backward()
            optimizer.step()
            losses.append(loss)
        yield (
            f"translator {name}",
            {
                "losses": digest(losses),
                "gradients": digest([p.grad for p in model.parameters()]),
                "parameters": digest(list(model.parameters())),
                "logits": digest(decoded(model.eval(), source, target)),
            },
        )


@torch.no_grad()
def decoded(model: Any, source: Tensor, target: Tensor) -> list[Tensor]:
    """Logits of each step."""
    memory = model.encode(source)
    state, logits = model.start(memory), []
    for token in target[:, :-1].unbind(1):
        step, state = model.step(memory, state, token)
        logits.append(step)
    return logits


def record() -> dict[str, Record]:
    """All cases by name."""
    torch.set_num_threads(1)
    cases: dict[str, Record] = {}
    for family in (catalog_cases, transformer_cases, translator_cases):
        cases.update(family())
    return cases


def machine() -> dict[str, str]:
    """What decides the last bits besides the library."""
    return {
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }


def differences(before: dict[str, Record], after: dict[str, Record]) -> list[str]:
    """One line for each value that differs, and for each case that only one side has."""
    lines = [f"{case}: only in the recorded file" for case in before if case not in after]
    lines += [f"{case}: not in the recorded file" for case in after if case not in before]
    for case in (case for case in before if case in after):
        old, new = before[case], after[case]
        lines += [f"{case}: {key} differs" for key in {**old, **new} if old.get(key) != new.get(key)]
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Record into a file, or compare with one; the exit status is 1 where something differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    asked = parser.parse_args(arguments)
    if asked.action == "record":
        cases = record()
        asked.file.write_text(json.dumps({"machine": machine(), "cases": cases}, indent=0))
        print(f"{asked.file}: {len(cases)} cases recorded")
        return 0
    kept = json.loads(asked.file.read_text())
    if kept["machine"] != machine():
        print(f"{asked.file} was recorded on {kept['machine']}, and this is {machine()}: last bits may differ.")
    cases = record()
    found = differences(kept["cases"], json.loads(json.dumps(cases)))
    print(*found, f"{len(cases)} cases compared, {len(found)} differences", sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
