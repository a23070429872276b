"""Watches every architecture of transformers that can be built small, and compares every map with an oracle.

    python scripts/architectures.py run            # resumes; one process for each architecture
    python scripts/architectures.py run llama t5   # these again
    python scripts/architectures.py run --state "not run" "not built"   # those with this result again
    python scripts/architectures.py table          # docs/architectures.md, from docs/architectures.jsonl

The oracle is what the module returns itself with attn_implementation="eager" and output_attentions=True. A map without
one is compared with the layer's own output, as `watch` does: recomputed weights times values.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import regard as rg
import small_models
from regard.hf.capture.watcher import UNCALLED

DATA = Path(__file__).parents[1] / "docs" / "architectures.jsonl"
PAGE = DATA.with_suffix(".md")
SECONDS, BYTES = 45, 16 << 30
#: Largest difference from eager that is rounding.
TOLERANCE = 2e-4
STATES = {
    "right": "every module of attention or recurrence that ran has a map, and every map was confirmed",
    "partly": "some modules have a confirmed map, the others a reason",
    "missing": "no map; the reason is given",
    "wrong": "a map that differs from the oracle",
    "none": "no attention and no recurrence, or none that is found",
    "not run": "a small model was built, but none of the drawn inputs ran",
    "not built": "no small model was built",
}
WAYS = {
    "eager": "it equals the weights that the module returns in eager mode",
    "output": "weights times values are the output of the layer",
    "measured": "weights were measured by unit values; weights times values are the output of the layer",
    "softmax": "it is the result of the module's own softmax, followed to its product with the values",
    "unverified": "nothing to compare with",
}
#: Kinds of layers in a table of architectures that are not plain attention.
PLAIN = "attention"


def run(keys: list[str], data: Path) -> None:
    """Examine architectures, each in a process of its own, and append the result of each to `data`."""
    for common in ("llama", "bert", "t5", "clip"):
        examined(common)  # imports what most models import, once for all processes
    for number, key in enumerate(keys):
        start = time.perf_counter()
        result = {"key": key, **_in_process(key), "seconds": round(time.perf_counter() - start, 1)}
        with data.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{number + 1}/{len(keys)} {key}: {result['state']} {result.get('why', '')[:150]}", flush=True)


def _keep_last(data: Path) -> None:
    """Keep the last result of each architecture, where its first one stood."""
    last = {json.loads(line)["key"]: line for line in data.read_text().splitlines()}
    data.write_text("".join(f"{line}\n" for line in last.values()))


def _in_process(key: str) -> dict[str, Any]:
    """The result for one architecture. A crash, too much memory or too much time lose nothing but this one."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_examine, args=(key, sender))
    process.start()
    sender.close()
    try:
        if receiver.poll(SECONDS):
            return receiver.recv()
        return {"state": "not run", "why": f"took longer than {SECONDS} s"}
    except EOFError:
        process.join()
        return {"state": "not run", "why": f"the process ended with code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _examine(key: str, sender: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    sys.stdout = sys.stderr = open("/dev/null", "w")  # noqa: SIM115
    try:
        sender.send(examined(key))
    except MemoryError:
        sender.send({"state": "not run", "why": f"needs more than {BYTES >> 30} GiB"})


def examined(key: str) -> dict[str, Any]:
    """Build, run, watch and compare one architecture."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    problems: list[str] = []
    failures: list[str] = []
    built = ""
    for candidate in small_models.small_models(key):
        if isinstance(candidate, Exception):
            problems.append(small_models.in_one_line(candidate))
            continue
        model, built = candidate
        inputs, problem = _running_inputs(model)
        if inputs is not None:
            shapes = {name: list(getattr(value, "shape", ())) for name, value in inputs.items()}
            return {"built": built, "inputs": shapes, **_watched(model, inputs)}
        failures.append(problem)
    return {"built": built, "state": "not run" if built else "not built", "why": (failures or problems)[0]}


def _running_inputs(model: nn.Module) -> tuple[dict[str, Any] | None, str]:
    """The first drawn inputs that the model runs on, or the first problem."""
    problems, waiting = [], list(small_models.inputs_of(model))
    while waiting:
        inputs = waiting.pop(0)
        if not inputs:
            continue
        try:
            _run(model, inputs)
            return inputs, ""
        except Exception as problem:
            problems.append(small_models.in_one_line(problem))
            filled = small_models.with_placeholders(model, inputs, str(problem))
            if filled is not None and filled["input_ids"].shape != inputs["input_ids"].shape and len(problems) < 20:
                waiting.insert(0, filled)
            if len(problems) <= 2:
                waiting += small_models.with_the_width_of(str(problem), model)
    return None, problems[0] if problems else "no input of its forward is known"


def _run(model: nn.Module, inputs: dict[str, Any], **options: Any) -> Any:
    torch.manual_seed(3)
    with torch.no_grad():
        copies = {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}
        return model(**copies, **options)


def _watched(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Watch the model on its own backend, then in eager mode beside the weights that it returns in the same run."""
    plain = _run(model, inputs)
    try:
        with rg.watch(model) as seen:
            again = _run(model, inputs)
    except rg.RegardError as refusal:
        return _refused(model, refusal)
    eager, oracle = _eager(model, inputs)
    modules = {name: _confirmed(seen, eager, name, oracle) for name in seen.names}
    kinds = dict(model.named_modules())
    uncalled = sum(reason == UNCALLED for reason in seen.missing.values())
    missing = Counter(f"{type(kinds[name]).__name__}: {why}" for name, why in seen.missing.items() if why != UNCALLED)
    notes = Counter(f"{type(kinds[name]).__name__}: {note}" for name, (_, note) in modules.items() if note)
    ways = Counter(way for way, _ in modules.values())
    state = "wrong" if "wrong" in ways else "partly" if missing else "right"
    identical = all(map(_equal, _tensors(plain), _tensors(again)))
    return {
        "state": state,
        "why": "; ".join(missing),
        "ways": ways,
        "kinds": Counter(seen.kinds.values()),
        "missing": missing,
        "notes": notes,
        "uncalled": uncalled,
        "identical": identical,
    }


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _refused(model: nn.Module, refusal: rg.RegardError) -> dict[str, Any]:
    text = " ".join(str(refusal).split())
    has_none = not rg.hf.attention_modules.attention_modules(model)
    kinds = Counter(type(m).__name__ for m in model.modules() if "mixer" in type(m).__name__.lower())
    return {"state": "none" if has_none else "missing", "why": text, "mixers": kinds}


class _Oracle:
    """What eager returned: weights by module and call, and all weights of the model's output."""

    def __init__(self) -> None:
        self.by_module: dict[str, list[list[Tensor]]] = {}
        self.returned: list[Tensor] = []


def _eager(model: nn.Module, inputs: dict[str, Any]) -> tuple[rg.hf.WatchedAttention | None, _Oracle]:
    """The maps of a run in eager mode, and the weights that the model returned in this run."""
    oracle, seen = _Oracle(), None
    with suppress(Exception):  # a class with only its own implementation returns its weights all the same
        model.set_attn_implementation("eager")
    for options in ({"output_attentions": True}, {}):
        oracle.by_module.clear()
        with suppress(Exception):
            with _returned_by_modules(model, oracle), rg.watch(model, verify=False) as seen:
                output = _run(model, inputs, **options)
            oracle.returned = [x for x in _weights_in(output) if x.ndim >= 3]
            return seen, oracle
    return None, oracle


@contextmanager
def _returned_by_modules(model: nn.Module, oracle: _Oracle) -> Iterator[None]:
    def keep(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            parts = output[1:] if isinstance(output, tuple) else ()
            found = [x for x in _tensors(parts) if x.ndim in (3, 4) and x.is_floating_point()]
            oracle.by_module.setdefault(name, []).append(found)

        return hook

    hooks = [module.register_forward_hook(keep(name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _weights_in(output: Any) -> Iterator[Tensor]:
    for name, value in output.items() if hasattr(output, "items") else ():
        if "attention" in name:
            yield from _tensors(value)
        elif hasattr(value, "items"):
            yield from _weights_in(value)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if hasattr(value, "items"):
        value = list(value.values())
    return [x for part in value for x in _tensors(part)] if isinstance(value, tuple | list) else []


def _confirmed(
    seen: rg.hf.WatchedAttention, eager: rg.hf.WatchedAttention | None, name: str, oracle: _Oracle
) -> tuple[str, str]:
    """How the maps of a module were confirmed, and a note.

    "eager": they are the weights that it returns; "output": weights times values are its output; "measured": the same,
    of weights that were measured by unit values; "softmax": they are the result of its own softmax, followed to the
    product with the values.
    """
    check = seen.verify()[name]
    own = "output" if check.ok else "softmax" if "softmax" in check.note else "unverified"
    own = "measured" if check.ok and "measured" in check.note else own
    if eager is None or name not in eager.names:
        return own, ""
    calls, returned = eager.calls(name), oracle.by_module.get(name, [])
    errors = [_error(call.dense(), number, returned, oracle) for number, call in enumerate(calls)]
    if all(error is not None and error <= TOLERANCE for error in errors):
        return "eager", ""
    differs = [error for error in errors if error is not None and error > TOLERANCE]
    if differs and own in ("output", "measured"):
        return own, f"the weights that it returns differ by {max(differs):.2g} from those it computes with"
    return ("wrong", f"differs from eager by {max(differs):.2g}") if differs else (own, "")


def _error(mine: Tensor, number: int, returned: list[list[Tensor]], oracle: _Oracle) -> float | None:
    """The difference from the weights that a call returned; None if it returned none of this form."""
    own = [_shaped(x, mine) for x in returned[number]] if number < len(returned) else []
    others = [_shaped(x, mine) for x in oracle.returned]
    errors = [_difference(mine, x) for x in (*own, *others) if x is not None]
    best = min(errors, default=None)
    is_told = best is not None and (best <= TOLERANCE or any(x is not None and _is_distribution(x) for x in own))
    return best if is_told else None


def _shaped(weights: Tensor, mine: Tensor) -> Tensor | None:
    """The oracle's weights in the form of the map, if it has as many numbers of that form."""
    if weights.shape == mine.shape:
        return weights
    same = weights.ndim == 3 and weights.shape[-2:] == mine.shape[-2:] and weights.numel() == mine.numel()
    return weights.reshape(mine.shape) if same else None


def _is_distribution(weights: Tensor) -> bool:
    return bool((weights >= -1e-6).all() and ((weights.sum(-1) - 1).abs() < 1e-3).all())


def _difference(mine: Tensor, wanted: Tensor) -> float:
    """The largest difference, in rows with any key: eager spreads rows without one evenly."""
    any_key = mine.sum(-1) != 0
    difference = (mine - wanted.to(mine.dtype)).abs().amax(-1)[any_key]
    return float(difference.max()) if difference.numel() else 0.0


def table(data: Path) -> str:
    """The page, from the last result of each architecture."""
    rows = {row["key"]: row for row in map(json.loads, data.read_text().splitlines())}
    counts = Counter(row["state"] for row in rows.values())
    maps: Counter[str] = Counter()
    for row in rows.values():
        maps.update(row.get("ways", {}))
    parts = [
        HEAD.format(version=transformers.__version__, total=len(rows)),
        "| result | architectures | |\n|---|---|---|",
        *(f"| {state} | {counts[state]} | {meaning} |" for state, meaning in STATES.items()),
        f"\n{sum(maps.values()):,} maps were compared:\n\n| confirmed by | maps | |\n|---|---|---|",
        *(f"| {way} | {maps[way]:,} | {meaning} |" for way, meaning in WAYS.items() if maps[way]),
        *(_section(state, [row for row in rows.values() if row["state"] == state]) for state in STATES),
    ]
    return "\n".join(parts) + "\n"


HEAD = """# Every architecture of transformers

A script builds a small model with random weights from each of {total} configuration classes of transformers {version},
runs it on drawn inputs under `rg.watch`, and compares every map with an oracle: the weights that the module returns in
eager mode, or the output of the layer. "Not run" and "not built" are limits of the script: it did not find sizes or
inputs that the class accepts, or a package is not installed. `gemma3n` and `timm_wrapper` ran with timm 1.0.31. A class
that runs by `generate` alone is run by its first part with a forward, such as `BarkModel.semantic`. To run it again:

```text
python scripts/architectures.py run      # resumes; one process for each architecture
python scripts/architectures.py table    # this page
```

Some modules return other weights than they compute with; the notes name them. There weights times values are the output
of the layer for the map of Regard, and not for the returned weights.
"""


def _section(state: str, rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    rows = sorted(rows, key=lambda row: row["key"].lower())
    if state in ("right", "partly"):
        lines = ["| architecture | model | maps | kinds | confirmed by | notes |", "|---|---|---|---|---|---|"]
        return "\n".join([f"\n## {state.capitalize()}\n", *lines, *map(_row, rows)])
    lines = ["| architecture | reason |", "|---|---|", *(f"| {row['key']} | {_reason(row)} |" for row in rows)]
    return "\n".join([f"\n## {state.capitalize()}\n", *lines])


def _row(row: dict[str, Any]) -> str:
    kinds = row.get("kinds") or {PLAIN: sum(row["ways"].values())}
    notes = [row["why"]] if row["why"] else []
    notes += list(row.get("notes", {}))
    if row.get("uncalled"):
        notes.append(f"{row['uncalled']} modules did not run on these inputs")
    of_kinds = ", ".join(kind if len(kinds) == 1 else f"{kind} {count}" for kind, count in kinds.items())
    ways = ", ".join(way if len(row["ways"]) == 1 else f"{way} {count}" for way, count in row["ways"].items())
    model = row["built"].partition(",")[0]
    return f"| {row['key']} | {model} | {sum(row['ways'].values())} | {of_kinds} | {ways} | {_cell('; '.join(notes))} |"


def _reason(row: dict[str, Any]) -> str:
    return _cell(row.get("why", "").partition(" Maps are recorded of attention")[0])


def _cell(text: str) -> str:
    return text[:300].replace("|", "/").replace("<", "&lt;").replace("`", "")


def main() -> None:
    """Run, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("keys", nargs="*")
    parser.add_argument("--state", nargs="*", default=[], choices=STATES, help="run those with this result again")
    parser.add_argument("--data", type=Path, default=DATA)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.action == "run":
        known = {row["key"]: row for row in map(json.loads, given.data.open())} if given.data.exists() else {}
        again = [key for key, row in known.items() if row["state"] in given.state]
        run(given.keys or again or [key for key in sorted(CONFIG_MAPPING_NAMES) if key not in known], given.data)
        _keep_last(given.data)
    else:
        PAGE.write_text(table(given.data))


if __name__ == "__main__":
    main()
