"""Does the gradient grow from block to block before training? Every matrix of a block, two initializations, 3 seeds."""

import torch
from torch import nn

import regard as rg

width, num_layers, seeds = 512, 6, (0, 1, 2)
matrices = {
    "self_attention.query": "queries",
    "self_attention.key": "keys",
    "self_attention.value": "values",
    "self_attention.output": "output",
    "feed_forward.inner": "first feed-forward",
    "feed_forward.outer": "second feed-forward",
}


def growth(norm, xavier, seed):
    """Norm of the gradient of each matrix in the last block over that in the first, (6 matrices,)."""
    torch.manual_seed(seed)
    plan = rg.nn.TransformerConfig(width, num_heads=8, feed_forward=2048, norm=norm, positions="none")
    stack = plan.encoder(num_layers)
    for parameter in stack.parameters() if xavier else ():
        if parameter.ndim == 2:
            nn.init.xavier_uniform_(parameter)
    (stack(torch.randn(8, 32, width)) * torch.randn(8, 32, width)).mean().backward()
    first, last = (
        torch.stack([block.get_submodule(name).weight.grad.norm() for name in matrices])
        for block in (stack.layers[0], stack.layers[-1])
    )
    return last / first


grows = {}
for norm in ("post", "pre"):
    for xavier in (False, True):
        runs = torch.stack([growth(norm, xavier, seed) for seed in seeds])
        grows[norm, xavier] = [name for name, lowest in zip(matrices.values(), runs.amin(0), strict=True) if lowest > 1]
        print(f"{norm}-norm, {'Xavier' if xavier else 'default'} initialization, block {num_layers} / block 1:")
        for name, least, most in zip(matrices.values(), runs.amin(0), runs.amax(0), strict=True):
            print(f"  {name:19} {least:.2f} to {most:.2f}")
assert grows["post", False] == grows["post", True] == ["values", "output", "first feed-forward"]
assert grows["pre", False] == []
