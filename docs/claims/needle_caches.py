"""How often SmolLM2-135M still finds a needle when its cache keeps a part of the keys: StreamingLLM, H2O, SnapKV.

python docs/claims/needle_caches.py: three minutes on one core. The policies are the code of docs/guides/caches.md.
"""

import random
import re
from copy import deepcopy
from pathlib import Path

import torch
from transformers import DynamicCache

import regard as rg
from regard.base.texts.embedded import passage

PAGE = Path(__file__).parents[1] / "guides" / "caches.md"
LENGTH, BUDGETS, POLICIES = 512, (256, 128, 64), ("StreamingLLM", "H2O", "SnapKV")
NUM_NEEDLES, NUM_DIGITS = 10, 3


def main() -> None:
    policy: dict = {}
    block = next(code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "def evict(" in code)
    exec("import torch\n" + block, policy)
    model, tokenizer = rg.load_model("smollm2")
    model = model.float()
    found = {(name, budget): 0 for name in POLICIES for budget in BUDGETS} | {("whole cache", LENGTH): 0}
    for n in range(NUM_NEEDLES):
        prompt, newest, answer = needle(tokenizer, n)
        cache = DynamicCache(config=model.config)
        with torch.no_grad(), rg.watch(model, verify=False) as seen:
            model(prompt, past_key_values=cache, logits_to_keep=1)
        for name, budget in found:
            small = deepcopy(cache)
            if name in POLICIES:
                kept = [policy["kept_keys"](one, 3, budget, name) for one in seen.maps.values()]
                policy["evict"](small, kept)
            found[name, budget] += continued(model, small, newest, prompt.shape[1], len(answer)) == answer
    for (name, budget), count in found.items():
        print(f"{name} with {budget} of {LENGTH} keys: {count} of {NUM_NEEDLES} needles")
    assert found["whole cache", LENGTH] - found["SnapKV", 256] <= 1
    for budget in BUDGETS:
        assert found["SnapKV", budget] > found["StreamingLLM", budget] > found["H2O", budget]


def needle(tokenizer, number: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """A prompt with a number at one of many depths, its last token, and the tokens that answer it."""
    random.seed(number)
    digits = "".join(random.choices("0123456789", k=NUM_DIGITS))

    parts = (passage(), f" The pass key is {digits}. Remember it.", "\n\nWhat is the pass key? The pass key is")
    filler, fact, question = (tokenizer(part).input_ids for part in parts)
    room = LENGTH + 1 - len(fact) - len(question)
    depth = int(room * (number + 0.5) / NUM_NEEDLES)
    ids = torch.tensor([filler[:depth] + fact + filler[depth:room] + question])
    return ids[:, :-1], ids[:, -1:], tokenizer(f" {digits}").input_ids


@torch.no_grad()
def continued(model, cache, token: torch.Tensor, position: int, count: int) -> list[int]:
    """The most probable next tokens, one after another."""
    answer = []
    for n in range(count):
        logits = model(token, past_key_values=cache, position_ids=torch.tensor([[position + n]])).logits
        token = logits[:, -1:].argmax(-1)
        answer.append(int(token))
    return answer


if __name__ == "__main__":
    main()
