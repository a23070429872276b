"""BLEU by source length up to 60 words, with and without attention: three seeds each, equal steps.

The measurements are in sentence_length.json. To make them again, train (15 minutes of a processor) and name the folder:

    regard data en-fr --max-words 60
    regard compare --data bible-en-fr --systems none,luong_dot --seeds 3 --steps 1500 --out runs/long \\
        data.max_words=60 validation.steps=375
    python docs/claims/sentence_length.py runs/long
"""

import json
import sys
from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt

import regard as rg

RECORD = Path(__file__).with_suffix(".json")
TITLES = {"none": "without attention", "luong_dot": "with attention (Luong dot)"}


def measure(folder):
    """The number of test sentences in each bucket of lengths, and the BLEU of every seed in it."""
    evaluations = rg.lab.Comparison.read(folder).evaluations()
    bleu = {
        label: {bucket.label: [run.by_length[n].bleu for run in runs] for n, bucket in enumerate(runs[0].by_length)}
        for label, runs in evaluations.items()
    }
    return {"sentences": {b.label: b.count for b in evaluations["none"][0].by_length}, "bleu": bleu}


if len(sys.argv) > 1:
    RECORD.write_text(json.dumps(measure(sys.argv[1]), indent=1) + "\n")
record = json.loads(RECORD.read_text())
lengths, bleu = list(record["sentences"]), record["bleu"]
mean = {label: {length: fmean(bleu[label][length]) for length in lengths} for label in TITLES}

figure, axes = plt.subplots(figsize=(6.5, 3.8), layout="constrained")
places = range(len(lengths))
for (label, title), color in zip(TITLES.items(), ("tab:gray", "tab:blue"), strict=True):
    low, high = ([choose(bleu[label][length]) for length in lengths] for choose in (min, max))
    axes.fill_between(places, low, high, color=color, alpha=0.25, linewidth=0)
    axes.plot(places, list(mean[label].values()), color=color, marker="o", label=title)
    print(f"{title}:", ", ".join(f"{n} words {fmean(bleu[label][n]):.1f} ({min(bleu[label][n]):.1f} to "
          f"{max(bleu[label][n]):.1f})" for n in lengths))  # fmt: skip
axes.set_xticks(places, [f"{length}\n({count})" for length, count in record["sentences"].items()])
axes.set(xlabel="words of the source (test sentences)", ylabel="BLEU", ylim=(0, None))
axes.set_title(f"BLEU by length: mean and range of {len(bleu['none'][lengths[0]])} seeds", fontsize=10)
axes.legend(frameon=False)
figure.savefig("bleu-by-length.png", dpi=150)

fall = {label: 1 - mean[label]["31-40"] / mean[label]["6-10"] for label in TITLES}
print("lost from 6-10 to 31-40 words:", ", ".join(f"{title} {fall[label]:.0%}" for label, title in TITLES.items()))
assert all(min(bleu["luong_dot"][length]) > max(bleu["none"][length]) for length in lengths)
assert fall["none"] < fall["luong_dot"], "without attention, all lengths are translated badly: little is left to lose"
