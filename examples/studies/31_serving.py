"""
# Look into a server while it runs

A server with continuous batching keeps the keys of all requests in pages, and packs the queries of a step into one
call. `rg.AttentionMap.of` makes a map from these: queries, pages and the table of pages. The kernel stays as it is.
"""

import matplotlib.pyplot as plt
import torch
from transformers import AttentionInterface, ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import regard as rg

LAYER, steps = 1, []


# %%
# The backend of the server is that of transformers. Beside its call we note, for one layer: the queries of each
# request, and the slots of its keys in the cache of pages. A slot is a page of one token.
def looked(module, query, key, value, attention_mask, **options):
    output = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if module.layer_idx == LAYER and "cache" in options:
        steps.append(maps_of_requests(module, query, options))
    return output


def maps_of_requests(module, query, options):
    pages = options["cache"].layer_to_allocator[LAYER]
    keys = pages.get_cache_for_block_table(LAYER)[0].flatten(0, 1)[:, None]
    written, read = options["write_index"][pages.index], options["read_index"][pages.index]
    first, key_first = options["cu_seq_lens_q"].tolist(), options["cu_seq_lens_k"][pages.layer_type].tolist()
    slots = read if len(read) else written  # a step without earlier keys reads what it wrote
    maps = []
    for begin, end, key_begin, key_end in zip(first, first[1:], key_first, key_first[1:], strict=False):
        table, length = slots[None, key_begin:key_end], torch.tensor([key_end - key_begin])
        if length:
            attention = rg.Attention(rg.Dot(module.scaling), mask=rg.causal())
            maps.append(rg.AttentionMap.of(attention, query[:, :, begin:end], rg.maps.PagedKeys(keys, table, length)))
    return maps


# %%
# Two requests of different lengths are generated together.
AttentionInterface.register("sdpa", looked)
torch.manual_seed(0)
sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
config = LlamaConfig(**sizes, vocab_size=100, initializer_range=0.5)  # large random weights: the maps have contrast
model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()
prompts = [[5, 17, 5, 17, 23], [42, 8, 15]]
settings = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
serving = ContinuousBatchingConfig(auto_switch_to_flash=False, page_size=8, num_blocks=8, max_batch_tokens=64)
results = model.generate_batch(prompts, settings, continuous_batching_config=serving, progress_bar=False)
AttentionInterface.register("sdpa", sdpa_attention_forward)
print(f"{len(steps)} steps; the requests of the last one: {steps[-1]}")

# %%
# Each row equals that of a whole pass over the text. Nothing of the server was changed for it.
fig, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
for number, (prompt, result, axis) in enumerate(zip(prompts, results.values(), axes, strict=True)):
    text = torch.tensor([prompt + result.generated_tokens[:-1]])
    with torch.no_grad(), rg.watch(model) as seen:
        model(text)
    maps = [part for late, step in enumerate(steps) for part in step if part.shape[3] == len(prompt) + late]
    rows = torch.cat([torch.nn.functional.pad(part[0], (0, text.shape[1] - part.shape[3])) for part in maps], 1)
    gap = (rows - seen[LAYER][0]).abs().max()
    print(f"request {number}: {rows.shape[1]} rows of 4 heads, largest difference from a whole pass {gap:.0e}")
    assert gap < 1e-4
    rg.heatmap(rows, head="mean", title=f"request {number}: mean of 4 heads", axes=axis)
    axis.axhline(len(prompt) - 0.5, color="#D55E00", linewidth=1)
fig.suptitle("Above the line: the prompt. Below: one row for each generated token.")
rg.drawing.show_or_save("31_serving.png")
