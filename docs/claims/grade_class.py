"""Grade 100 submissions of one exercise: 40 right ones in many styles, and 60 with one planted mistake each."""

import math
import random
import time

import numpy as np
import torch
from torch.nn import functional as F

import regard as rg

STYLES = {
    "names": ["q k v", "Q K V", "query key value", "queries keys values"],
    "product": [
        "{q} @ {k}.transpose(-2, -1)",
        "torch.einsum('...id,...jd->...ij', {q}, {k})",
        "torch.matmul({q}, {k}.mT)",
    ],
    "root": ["math.sqrt({q}.shape[-1])", "{q}.size(-1) ** 0.5", "np.sqrt({k}.shape[-1])"],
    "mask": [
        "s = s.masked_fill(mask == 0, float('-inf'))",
        "s = s.masked_fill(mask == 0, -1e9)",
        "s = torch.where(mask.bool(), s, torch.full_like(s, -1e9))",
    ],
    "softmax": [
        "F.softmax(s, dim=-1)",
        "torch.softmax(s, -1)",
        "F.log_softmax(s, dim=-1).exp()",
        "torch.exp(s - torch.logsumexp(s, -1, keepdim=True))",
    ],
    "context": ["w @ {v}", "torch.einsum('...ij,...jd->...id', w, {v})"],
    "returned": ["o", "o, w", "dict(output=o, weights=w)"],
}
EXP = "torch.exp(s) / torch.exp(s).sum"
#: The part of the code -> what stands there instead, a mistake each.
PLANTED = {
    "product": """{q} @ {q}.mT; {q} @ {v}.mT; {k} @ {v}.mT; {k} @ {q}.mT; ({q}.half() @ {k}.half().mT).to({q}.dtype)
        ({q}.bfloat16() @ {k}.bfloat16().mT).to({q}.dtype); -({q} @ {k}.mT); 2 * {q} @ {k}.mT; ({q} @ {k}.mT).abs()
        {q} @ ({k} - {k}.mean(0)).mT; F.normalize({q}, dim=-1) @ {k}.mT; {q} @ F.normalize({k}, dim=-1).mT""",
    "root": "1; {q}.shape[-1]; {q}.shape[-1] ** -0.5; math.sqrt({k}.shape[-2]); math.sqrt({q}.shape[-2]); 2; 9",
    "mask": """s = s.masked_fill(mask.bool(), -1e9); s = s + mask; s = s * mask; s = s.masked_fill(mask == 0, 1e-9)
        s = s.masked_fill(mask.mT == 0, -1e9); s.masked_fill(mask == 0, -1e9); s = s.masked_fill(mask[:1] == 0, -1e9)
        s = s.masked_fill(mask == 0, -1)""",
    "softmax": f"""F.softmax(s, dim=-2); F.softmax(s, dim=1); torch.softmax(s, 0); F.softmax(F.softmax(s, -1), -1); s
        torch.exp(s); torch.sigmoid(s); F.log_softmax(s, -1); F.softmax(s.flatten(-2), -1).view(s.shape); {EXP}()
        {EXP}(-2, keepdim=True)
        torch.exp(s) / (1 + torch.exp(s).sum(-1, keepdim=True)); {EXP}(-1, keepdim=True); F.softmax(s.clamp(-5, 5), -1)
        F.softmax(torch.tanh(s), -1); F.softmax(s, -1) / math.sqrt({{q}}.shape[-1]); s**2 / (s**2).sum(-1, keepdim=True)
        F.softmax(s.masked_fill(torch.ones_like(s).triu(1) > 0, -1e9), -1); F.one_hot(s.argmax(-1), s.shape[-1]).to(s)
        F.softmax(s.masked_fill(torch.ones_like(s).tril(-16) > 0, -1e9), -1)""",
    "context": """w @ {k}; w.mT @ {v}; {v}.mean(-2, keepdim=True) + 0 * w @ {v}; w @ {v}.roll(1, -2); w @ {v}.flip(-2)
        (w @ {v}).detach(); w.detach() @ {v}; w @ {v} + {q}; F.normalize(w @ {v}, dim=-1); w @ {v} / {v}.shape[-2]
        F.dropout(w, 0.1) @ {v}; w[..., :-1] @ {v}[..., :-1, :]; w[..., 1:] @ {v}[..., 1:, :]""",
}


def written(seed, **parts):
    """The code of a submission in a drawn style, with these parts in place of right ones."""
    draw = random.Random(seed)
    style = {name: draw.choice(options) for name, options in STYLES.items()} | parts
    names = dict(zip("qkv", style["names"].split(), strict=True))
    lines = [f"s = ({style['product']}) / ({style['root']})", f"if mask is not None: {style['mask']}"]
    lines += [f"w = {style['softmax']}", f"o = {style['context']}", f"return {style['returned']}"]
    return f"def answer({', '.join(names.values())}, mask=None):\n    " + "\n    ".join(lines).format(**names)


mistakes = [(part, code.strip()) for part, codes in PLANTED.items() for code in codes.replace("\n", ";").split(";")]
submissions = [(written(n), True) for n in range(40)]
submissions += [(written(100 + n, **dict([mistake])), False) for n, mistake in enumerate(mistakes[:60])]
assert len(submissions) == 100, len(mistakes)

errors, questions, started = [], 0, time.process_time()
for code, is_right in submissions:
    names = {"math": math, "np": np, "torch": torch, "F": F}
    exec(code, names)
    report = rg.check(names["answer"], like="scaled_dot_product", mask="keep", limit=None)
    questions += "axes" in report.open_questions
    if report.ok is not is_right:
        errors.append((code, report.ok, report.mistakes))
for code, ok, found in errors:
    print(f"{code}\n  ok={ok}, mistakes={found}")
print(f"100 submissions: {len(errors)} judged wrongly; {questions} with a question about axes")
print(f"{time.process_time() - started:.0f} s of processor time")
assert len(errors) <= 3
