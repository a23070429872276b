"""Tasks of docs/guides/circuits.md in Regard, TransformerLens and nnsight: lines, seconds and largest differences.

`python -m benchmarks.circuits [ROUNDS [TASK ...]]` runs the blocks of the page, and the same tasks in the other
libraries where they are installed, in turn: A B C A B C. All of them run SmolLM2-135M with the same weights, in
float32, in one process and one thread. The lines of Regard are those of the page; the lines of the others are those of
the functions below, without the first and the last.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "circuits.md"
HEADING = re.compile(r"^## (?:\d+\. )?", re.M)
BLOCK = re.compile(r"```python\n(.*?)```", re.S)
#: What the first block below a heading of the page computes: the task, and the result of Regard.
TASKS = {
    "Maps": ("maps", "patterns"),
    "Ablation": ("ablation", "without"),
    "Composition": ("composition", "scores.scores"),
    "Attribution": ("attribution", "effects"),
    "A loss on weights": ("loss", "gradient"),
    "Generation": ("generation", "steps"),
    "Recurrent layers": ("recurrent", "recurrent"),
    "Long texts": ("long", "entropies"),
    "Sweeps": ("sweep", "table.values - table.baseline"),
    "Induction heads": ("induction", "ablated.values - ablated.baseline"),
}
#: The section whose names all tasks use.
ALWAYS = "The sentences"
PEERS = ("transformer_lens", "nnsight")
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
NONE = "-"
#: Seconds after which a task is not run again.
LONG = 60.0


class TransformerLens:
    """The tasks on a bridge of TransformerLens 4."""

    def __init__(self, page: dict[str, Any], tokenizer: Any) -> None:
        from transformer_lens.model_bridge import TransformerBridge

        model = copy.deepcopy(page["model"])
        self.page = page
        self.bridge = TransformerBridge.boot_transformers(NAME, hf_model=model, tokenizer=tokenizer)
        model = copy.deepcopy(page["model"])
        self.folded = TransformerBridge.boot_transformers(NAME, hf_model=model, tokenizer=tokenizer)
        self.folded.enable_compatibility_mode()  # norms are part of the matrices that follow, as in Regard
        self.layers, self.heads = 30, 9

    @torch.no_grad()
    def maps(self) -> Tensor:
        ids = self.page["inputs"]["input_ids"]
        _, cache = self.bridge.run_with_cache(ids, names_filter=lambda name: name.endswith("hook_pattern"))
        return torch.stack([cache["pattern", layer] for layer in range(self.layers)])

    @torch.no_grad()
    def ablation(self) -> Tensor:
        def without(z: Tensor, hook: Any) -> Tensor:
            return z.index_fill(2, torch.tensor(3), 0)  # texts, tokens, heads, channels

        hooks = [("blocks.23.attn.o.hook_in", without)]
        logits = self.bridge.run_with_hooks(self.page["inputs"]["input_ids"], fwd_hooks=hooks)[:, -1]
        rows = torch.arange(len(logits))
        return logits[rows, self.page["right"]] - logits[rows, self.page["wrong"]]

    @torch.no_grad()
    def composition(self) -> Tensor:
        from transformer_lens.utilities.matrix import composition_scores

        left, right = self.folded.OV[16:19], self.folded.QK[16:19].T
        scores = composition_scores(left, right).flatten(0, 1).flatten(1, 2)
        layer = torch.arange(27) // 9
        return scores.where(layer[:, None] < layer, torch.nan)

    @torch.no_grad()
    def attribution(self) -> Tensor:
        _, cache = self.folded.run_with_cache(self.page["inputs"]["input_ids"][:1])
        parts = cache.stack_head_results(layer=-1, pos_slice=-1)
        effects = cache.logit_attrs(
            parts, self.page["right"][:1], incorrect_tokens=self.page["wrong"][:1], pos_slice=-1
        )
        return effects.view(self.layers, self.heads)

    def loss(self) -> Tensor:
        kept = []
        hooks = [("blocks.23.attn.hook_pattern", lambda pattern, hook: kept.append(pattern))]
        self.bridge.run_with_hooks(self.page["inputs"]["input_ids"], fwd_hooks=hooks)
        entropy = -torch.xlogy(kept[0], kept[0].clamp_min(1e-30)).sum(-1).mean()
        (gradient,) = torch.autograd.grad(entropy, self.bridge.blocks[23].attn.q.original_component.weight)
        return gradient

    @torch.no_grad()
    def generation(self) -> Tensor:
        ids = self.page["inputs"]["input_ids"][:1]
        ids = self.bridge.generate(ids, max_new_tokens=20, do_sample=False, verbose=False, return_type="tokens")
        _, cache = self.bridge.run_with_cache(ids[:, :-1], names_filter="blocks.23.attn.hook_pattern")
        return cache["pattern", 23]

    @torch.no_grad()
    def long(self) -> Tensor:
        kept = []

        def entropy(pattern: Tensor, hook: Any) -> None:
            kept.append(-torch.xlogy(pattern, pattern.clamp_min(1e-30)).sum(-1).mean((0, -1)))

        hooks = [(lambda name: name.endswith("hook_pattern"), entropy)]
        self.bridge.run_with_hooks(self.page["long"], fwd_hooks=hooks, logits_to_keep=1)
        return torch.stack(kept)

    @torch.no_grad()
    def sweep(self) -> Tensor:
        _, source = self.bridge.run_with_cache(self.page["others"]["input_ids"])
        return self._patched(self.page["inputs"]["input_ids"], lambda name: source[name], "difference", 1)

    @torch.no_grad()
    def induction(self) -> Tensor:
        _, source = self.bridge.run_with_cache(self.page["repeated"])
        return self._patched(self.page["repeated"], lambda name: source[name].roll(-1, 0), "second_half", 12)

    def _patched(self, ids: Tensor, source: Callable[[str], Tensor], measure: str, keep: int) -> Tensor:
        every, results = torch.arange(len(ids)), torch.zeros(self.layers, self.heads, len(ids), dtype=torch.float64)
        plain = self.page[measure](Logits(self.bridge(ids, logits_to_keep=keep)), every)
        for layer, head in torch.cartesian_prod(torch.arange(self.layers), torch.arange(self.heads)).tolist():
            name = f"blocks.{layer}.attn.o.hook_in"

            def patch(z: Tensor, hook: Any, head: int = head, name: str = name) -> Tensor:
                z = z.clone()
                z[:, :, head] = source(name)[:, :, head]
                return z

            logits = self.bridge.run_with_hooks(ids, fwd_hooks=[(name, patch)], logits_to_keep=keep)
            results[layer, head] = self.page[measure](Logits(logits), every) - plain
        return results


class Nnsight:
    """The tasks in nnsight. Maps need the eager backend, which returns its weights."""

    def __init__(self, page: dict[str, Any], tokenizer: Any) -> None:
        from nnsight import LanguageModel

        self.page = page
        self.plain = LanguageModel(copy.deepcopy(page["model"]), tokenizer=tokenizer)
        eager = copy.deepcopy(page["model"])
        eager.set_attn_implementation("eager")
        self.eager = LanguageModel(eager, tokenizer=tokenizer)

    @torch.no_grad()
    def maps(self) -> Tensor:
        with self.eager.trace(self.page["inputs"]["input_ids"]):
            kept = [].save()
            for layer in self.eager.model.layers:
                kept.append(layer.self_attn.output[1])
        return torch.stack(kept)

    @torch.no_grad()
    def ablation(self) -> Tensor:
        with self.plain.trace(self.page["inputs"]["input_ids"]):
            self.plain.model.layers[23].self_attn.o_proj.input[..., 3 * 64 : 4 * 64] = 0
            logits = self.plain.lm_head.output[:, -1].save()
        rows = torch.arange(len(logits))
        return logits[rows, self.page["right"]] - logits[rows, self.page["wrong"]]

    def loss(self) -> Tensor:
        with self.eager.trace(self.page["inputs"]["input_ids"]):
            weights = self.eager.model.layers[23].self_attn.output[1].save()
        entropy = -torch.xlogy(weights, weights.clamp_min(1e-30)).sum(-1).mean()
        (gradient,) = torch.autograd.grad(entropy, self.eager._module.model.layers[23].self_attn.q_proj.weight)
        return gradient

    @torch.no_grad()
    def long(self) -> Tensor:
        with self.eager.trace(self.page["long"], logits_to_keep=1):
            kept = [].save()
            for layer in self.eager.model.layers:
                weights = layer.self_attn.output[1]
                kept.append(-torch.xlogy(weights, weights.clamp_min(1e-30)).sum(-1).mean((0, -1)))
        return torch.stack(kept)

    @torch.no_grad()
    def sweep(self) -> Tensor:
        with self.plain.trace(self.page["others"]["input_ids"]):
            source = [].save()
            for layer in self.plain.model.layers:
                source.append(layer.self_attn.o_proj.input)
        every = torch.arange(len(self.page["inputs"]["input_ids"]))
        results = torch.zeros(30, 9, len(every), dtype=torch.float64)
        with self.plain.trace(self.page["inputs"]["input_ids"], logits_to_keep=1):
            logits = self.plain.lm_head.output.save()
        plain = self.page["difference"](Logits(logits), every)
        for layer, head in torch.cartesian_prod(torch.arange(30), torch.arange(9)).tolist():
            part = slice(head * 64, (head + 1) * 64)
            with self.plain.trace(self.page["inputs"]["input_ids"], logits_to_keep=1):
                self.plain.model.layers[layer].self_attn.o_proj.input[..., part] = source[layer][..., part]
                logits = self.plain.lm_head.output.save()
            results[layer, head] = self.page["difference"](Logits(logits), every) - plain
        return results


class Logits:
    """An output with logits."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


def blocks() -> Iterator[tuple[str, bool, str]]:
    """The blocks of Python of the page: the heading above, whether it is the first one below, and the code."""
    for section in HEADING.split(PAGE.read_text()):
        for n, code in enumerate(BLOCK.findall(section)):
            yield section.splitlines()[0], n == 0, code


def num_lines(code: str) -> int:
    """The lines of code, without empty lines and comments."""
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in code.splitlines())


def lines_of(task: Callable[..., object]) -> int:
    """The lines inside of a function, and of the helper that it calls; the line that returns is not counted."""
    code = re.sub(r"^.*?def .*?\n", "", inspect.getsource(task), count=1, flags=re.S)
    helper = lines_of(TransformerLens._patched) if "self._patched" in code else 0
    return num_lines(code) + helper - (0 if helper else 1)


def peers(page: dict[str, Any]) -> dict[str, Any]:
    """The other libraries that are installed, ready to run."""
    from transformers import AutoTokenizer

    kinds = zip(PEERS, (TransformerLens, Nnsight), strict=True)
    with tempfile.TemporaryDirectory() as folder:  # a bridge reads the tokenizer again from its folder
        page["model"].config.save_pretrained(folder)
        page["tokenizer"].save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return {name: kind(page, tokenizer) for name, kind in kinds if find_spec(name)}


def measured(runs: dict[str, Callable[[], Tensor]], rounds: int) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The median seconds of processor time of each run, in turn, and what it gave; long runs are not repeated."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    results: dict[str, Tensor] = {}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.process_time()
            results[name] = run().detach()
            seconds[name].append(time.process_time() - start)
        if sum(map(sum, seconds.values())) > LONG:
            break
    return {name: median(values) for name, values in seconds.items()}, results


def row(heading: str, code: str, page: dict[str, Any], others: dict[str, Any], rounds: int) -> str:
    """One line of the table, and of a sweep the heads with the largest effects."""
    task, result = TASKS[heading]

    def ours() -> Tensor:
        exec(compile(code, str(PAGE), "exec"), page)
        return eval(result, page)

    runs = {"regard": ours} | {name: getattr(one, task) for name, one in others.items() if hasattr(one, task)}
    seconds, results = measured(runs, rounds)
    size = results["regard"].double().nan_to_num(0.0).abs().max()
    cells = [task, f"{num_lines(code)} / {seconds['regard']:.2g}"]
    for name in PEERS:
        if name in runs:
            gap = (results[name].double() - results["regard"].double()).nan_to_num(0.0).abs().max()
            cells += [f"{lines_of(runs[name])} / {seconds[name]:.2g}", f"{float(gap):.0e} of {float(size):.2g}"]
        else:
            cells += [NONE if name in others else "not installed", NONE]
    effects = {name: one.mean(-1) for name, one in results.items() if task in ("sweep", "induction")}
    return "\n".join([f"| {' | '.join(cells)} |", *(f"{name}: {strongest(one)}" for name, one in effects.items())])


def strongest(effects: Tensor) -> str:
    """The five heads with the largest effects."""
    best = effects.abs().flatten().argsort(descending=True)[:5].tolist()
    return ", ".join(f"L{n // 9}.H{n % 9} {effects.flatten()[n]:+.2f}" for n in best)


def main(rounds: str = "3", *tasks: str) -> None:
    """Print the table."""
    page: dict[str, Any] = {"__name__": "page"}
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}; lines / seconds of processor time in one thread (median of {rounds})")
    print(f"| task | regard | {' | difference | '.join(PEERS)} | difference |\n|---|---|---|---|---|---|")
    others: dict[str, Any] = {}
    for heading, is_first, code in blocks():
        if tasks and heading != ALWAYS and (heading not in TASKS or TASKS[heading][0] not in tasks):
            continue  # no task needs the blocks of another
        if heading in TASKS and is_first:
            others = others or peers(page)
            if heading == "Sweeps":  # a run of one sentence leaves room for many edits
                given = {name: page[name] for name in ("inputs", "others")}
                page.update({name: {key: x[:1] for key, x in one.items()} for name, one in given.items()})
                print("With one sentence:", row(heading, code, page, others, int(rounds)), flush=True)
                page.update(given)
            print(row(heading, code, page, others, int(rounds)), flush=True)
        else:
            exec(compile(code, str(PAGE), "exec"), page)


if __name__ == "__main__":
    main(*sys.argv[1:])
