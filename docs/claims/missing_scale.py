"""A small translator with and without the factor 1/sqrt(d): 300 steps on a language with known alignments, 3 seeds."""

import torch
from torch.nn import functional as F

import regard as rg

torch.set_num_threads(1)
width, seeds, steps = 64, (0, 1, 2), 300
pairs = rg.lab.data.synthetic_pairs("grammar", 10_500)
texts = zip(*((pair.source, pair.target) for pair in pairs), strict=True)
words = [rg.lab.data.train_tokenizer(text, kind="words") for text in texts]
ids = rg.lab.data.encode_pairs(pairs, *words)
train, test = ids[:-300], rg.lab.data.Batch.of(ids[-300:])


def percent_right(num_heads, scaled, seed):
    """Percentage of words of the test set that a trained model predicts right."""
    torch.manual_seed(seed)
    sizes = {"source_size": len(words[0]), "target_size": len(words[1]), "width": width, "layers": 1}
    model = rg.lab.build("transformer", **sizes, num_heads=num_heads, scaled=scaled)
    optimizer, batches = (
        torch.optim.Adam(model.parameters()),
        rg.lab.data.Batches(train, sentences=32, seed=seed).start_at(),
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.004, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        batch = next(batches)[1]
        optimizer.zero_grad()
        logits = model.logits(model(batch.source, batch.target_input))
        F.cross_entropy(logits.mT, batch.target_output, ignore_index=rg.lab.data.PAD).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        right = model.eval().logits(model(test.source, test.target_input)).argmax(-1) == test.target_output
    return 100 * float(right[test.target_output != rg.lab.data.PAD].float().mean())


right = {}
for num_heads in (1, 4):
    for scaled in (True, False):
        runs = [percent_right(num_heads, scaled, seed) for seed in seeds]
        right[num_heads, scaled] = runs
        print(
            f"{num_heads} heads of width {width // num_heads},",
            "with the factor:" if scaled else "without it:",
            end=" ",
        )
        print(f"{min(runs):.1f} to {max(runs):.1f} % of words right")
assert min(right[1, True]) > max(right[1, False]) + 20
