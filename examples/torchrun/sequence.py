"""One sequence over many processes: `torchrun --nproc-per-node 2 examples/torchrun/sequence.py`."""

import torch
import torch.distributed as dist

import regard as rg


def main():
    ring = rg.Ring(layout="zigzag")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 1001, 32) for _ in range(3))  # here each rank makes the whole tensors
    shares = [ring.share(x).requires_grad_() for x in (q, k, v)]  # and keeps its share

    attention = rg.Attention(mask=rg.causal() & rg.window(64), position=rg.RoPE(32))
    plan = rg.plan(*shares, attention=attention, engine=ring)
    seen = attention(*shares, engine=ring)
    seen.output.square().sum().backward()  # on every rank: gradients are sent back to the owner of the keys
    row = seen.weights[0, 3, 700]  # every rank asks for the same row and gets it
    if dist.get_rank() == 0:
        print(plan)
        print(row.nonzero().flatten()[[0, -1]].tolist())


dist.init_process_group("gloo")  # "nccl" on GPUs
main()
dist.barrier()  # gloo aborts a process whose neighbor is gone
dist.destroy_process_group()
