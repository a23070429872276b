"""Counts of parameters: a six-layer encoder with and without biases of attention, and the scores of two papers."""

import regard as rg

width, hidden = 512, 512


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


plan = rg.nn.TransformerConfig(width, num_heads=8, feed_forward=2048, norm="post", positions="none")
encoder = plan.encoder(6)
biases = sum(p.numel() for name, p in encoder.named_parameters() if "attention" in name and name.endswith("bias"))
whole, without = count(encoder), count(encoder) - biases
print(f"six layers: {whole:,} parameters; {without:,} without the biases of attention, as tutorials write it")
print(f"25,690,112 is {25_690_112 / without:.2f} times as many")
assert (whole, without) == (18_914_304, 18_902_016)

# Scores of a decoder state and an encoder state, both of width d.
build = {name: rg.mechanism(name).build for name in ("luong_dot", "luong_general", "luong_concat", "bahdanau")}
scores = {
    "Luong dot": build["luong_dot"](),
    "Luong general": build["luong_general"](width, width),
    "Luong concat": build["luong_concat"](width, width, hidden=hidden),
    "Bahdanau": build["bahdanau"](width, width, hidden=hidden),
}
counts = {name: count(score) for name, score in scores.items()}
print(f"d = hidden = {width}:", ", ".join(f"{name} {number:,}" for name, number in counts.items()))
assert list(counts.values()) == [0, width**2, 2 * width * hidden + hidden, 2 * width * hidden + hidden]

# Whole translators of the same width: what is around a score has more parameters than the score.
whole = {}
for name in build:
    whole[name] = count(rg.lab.build(name, source_size=1000, target_size=1000, width=128))
    print(f"a translator of width 128 with two vocabularies of 1,000 words, {name}: {whole[name]:,} parameters")
assert whole["luong_dot"] < whole["luong_general"] < whole["luong_concat"]
