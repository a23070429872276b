"""The files that the commands of pages read: those that a reader brings."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path

from regard.lab.data import load_corpus

ROOT = Path(__file__).parents[2]
ATTENTION = """
import math
import torch

def attention(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v

class SelfAttention(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(width, width) for _ in range(3))

    def forward(self, x, mask=None):
        return attention(self.q(x), self.k(x), self.v(x), mask)
"""


def bring_files(folder):
    """The files that a reader brings: a text, a corpus, sentence pairs, a function of attention."""
    shutil.copytree(brought().name, folder, symlinks=True, dirs_exist_ok=True)


@cache
def brought():
    """A folder with these files. Making them takes seconds, so each process makes them once."""
    made = tempfile.TemporaryDirectory(prefix="brought", ignore_cleanup_errors=True)
    folder = Path(made.name)
    pairs = load_corpus("grammar").train[:120]
    for name, chosen in (("my", pairs), ("new", pairs[:3])):
        (folder / f"{name}.en").write_text("".join(f"{pair.source}\n" for pair in chosen))
        (folder / f"{name}.fr").write_text("".join(f"{pair.target}\n" for pair in chosen))
    sentences = [
        f"The {animal} sat near the {place}, because it was tired."
        for animal in ("cat", "dog")
        for place in ("door", "wall")
    ]
    (folder / "article.txt").write_text(" ".join(sentences))
    (folder / "corpus.txt").write_text("\n".join(sentences[:3]))
    (folder / "submissions").mkdir()
    for name in ("attention.py", "submissions/anna.py", "submissions/ben.py"):
        (folder / name).write_text(ATTENTION)
    (folder / "examples").symlink_to(ROOT / "examples")
    bring_gpt2(folder / "gpt2")
    return made


def bring_gpt2(folder):
    """A random model and tokenizer in the place where transformers looks first for the name "gpt2"."""
    try:
        import transformers
        from tokenizers import ByteLevelBPETokenizer
    except ModuleNotFoundError:
        return
    words = ByteLevelBPETokenizer()
    words.train_from_iterator([ATTENTION, "The animal didn't cross the street because it was too tired."] * 4, 400)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words._tokenizer).save_pretrained(folder)
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=400, n_embd=48, n_layer=12, n_head=12, **ids)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
