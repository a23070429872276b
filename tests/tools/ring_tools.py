"""What the cases of rings.py share: pieces to draw from, counters, and comparisons with one process."""

from __future__ import annotations

import contextlib
import copy

import torch
import torch.distributed as dist

import regard as rg
from drawn import KEEPING
from regard.base.errors import RegardError
from regard.engine.kernel.library import load
from regard.engine.ring import kv_chunk
from regard.engine.ring.chunk_gradients import ChunkGradients

#: The cases of all files, by name.
CASES = {}
LAYOUTS = ("contiguous", "zigzag")
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
LOOSE = {"rtol": 2**-5, "atol": 2**-5}


def case(function):
    CASES[function.__name__] = function
    return function


class Sent:
    """Bytes that really go out, counted at torch's own door."""

    def __init__(self):
        self.bytes, self.to, self._door = 0, set(), dist.batch_isend_irecv

    def __enter__(self):
        dist.batch_isend_irecv = self._counting
        return self

    def __exit__(self, *error):
        dist.batch_isend_irecv = self._door

    def _counting(self, calls):
        leaving = [call for call in calls if call.op is dist.isend]
        self.bytes += sum(call.tensor.numel() * call.tensor.element_size() for call in leaving)
        self.to |= {call.group_peer for call in leaving}
        return self._door(calls)


def some(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def laid(x, number):
    """The same numbers in another memory layout, as leaves of a graph."""
    layouts = list(KEEPING.values())
    return layouts[(number + sum(x.shape)) % len(layouts)](x.detach()).requires_grad_()


def cut(x, lengths):
    """This rank's tokens where ranks hold so many each."""
    return x.split(lengths, 2)[dist.get_rank()]


def check(attention, q, k, v, ring, share_q=None, share_k=None, **options):
    """Output and all gradients of the ring against those of one process."""
    share_q, share_k = share_q or ring.share, share_k or share_q or ring.share
    attention.zero_grad()
    one = [t.clone().requires_grad_() for t in (q, k, v)]
    with torch.no_grad():
        expected = attention(q, k, v, engine="reference", **options).output
    up = some(*expected.shape, seed=7).to(expected.dtype)
    attention(*one, engine="dense", **options).output.backward(up)
    slopes = [p.grad for p in attention.parameters()]
    attention.zero_grad()
    shares = zip((q, k, v), (share_q, share_k, share_k), strict=True)
    own = [laid(share(t), number) for number, (t, share) in enumerate(shares)]
    seen = attention(*own, engine=ring, **options)
    seen.output.backward(laid(share_q(up), 3).detach())
    torch.testing.assert_close(seen.output, share_q(expected), **CLOSE)
    for mine, whole, share in zip(own, one, (share_q, share_k, share_k), strict=True):
        torch.testing.assert_close(mine.grad, share(whole.grad), **CLOSE)
    for parameter, whole in zip(attention.parameters(), slopes, strict=True):
        added = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(added)
        torch.testing.assert_close(added, torch.zeros_like(added) if whole is None else whole, **CLOSE)


def raises(words, call):
    """Every rank is told."""
    try:
        call()
    except RegardError as error:
        for word in words:
            assert word in str(error), f"{word!r} is missing in: {error}"
        return
    raise AssertionError(f"nobody refused; expected {words}")


@contextlib.contextmanager
def ways(kernel=False):
    """How the gradients of each chunk were computed; with `kernel` the compiled kernels run chunks of every size."""
    used, doors, pays = [], {}, kv_chunk.pays
    for name in ("_of_kernel", "_of_fused", "_from_scores"):
        doors[name] = door = getattr(ChunkGradients, name)
        setattr(ChunkGradients, name, lambda grads, name=name, door=door: used.append(name) or door(grads))
    if kernel:
        kv_chunk.pays = lambda chunk: load() is not None
    try:
        yield used
    finally:
        kv_chunk.pays = pays
        for name, door in doors.items():
            setattr(ChunkGradients, name, door)


def near(own, whole, relative):
    """Errors are small beside the greatest number: sums over many keys have errors of that size."""
    own, whole = own.detach().double(), whole.detach().double()
    torch.testing.assert_close(own, whole, rtol=0, atol=relative * max(1.0, whole.abs().max().item()))


def check_in(dtype, relative, attention, q, k, v, ring, share_q=None, share_k=None):
    """Output and gradients of the ring in a dtype, against float64 in one process with the same numbers."""
    share_q, share_k = share_q or ring.share, share_k or share_q or ring.share
    exact, inputs = copy.deepcopy(attention).double(), [t.to(dtype) for t in (q, k, v)]
    attention.zero_grad()
    one = [t.double().clone().requires_grad_() for t in inputs]
    torch.manual_seed(3)  # of dropout
    expected = exact(*one, engine="dense").output
    up = some(*expected.shape, seed=7).to(dtype)
    expected.backward(up.double())
    shares = [(t, share) for t, share in zip(inputs, (share_q, share_k, share_k), strict=True)]
    own = [laid(share(t), number) for number, (t, share) in enumerate(shares)]
    torch.manual_seed(3 + dist.get_rank())
    output = attention(*own, engine=ring).output
    torch.manual_seed(4)  # pieces that are made later are the same on all ranks
    output.backward(laid(share_q(up), 3).detach())
    assert output.dtype == dtype
    near(output, share_q(expected), relative)
    for mine, whole, (_, share) in zip(own, one, shares, strict=True):
        near(mine.grad, share(whole.grad), relative)
    for parameter, whole in zip(attention.parameters(), exact.parameters(), strict=True):
        added = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(added)
        near(added, torch.zeros_like(whole) if whole.grad is None else whole.grad, 4 * relative)  # sums over pairs


MASKS = {
    "none": lambda n: None,
    "causal": lambda n: rg.causal(),
    "window": lambda n: rg.window(5),
    "causal window": lambda n: rg.causal() & rg.window(4),
    "prefix": lambda n: (rg.causal() & rg.window(3)) | rg.masks.prefix(2),
    "documents": lambda n: rg.causal() & rg.documents([n // 3, n // 4, n - n // 3 - n // 4]),
    "padding": lambda n: rg.padding([n - 3, 2]),
    "holes": lambda n: rg.padding(some(2, n, seed=3) > 0),
    "global": lambda n: rg.window(2) | rg.masks.global_tokens([0, n // 2]),
    "dilated": lambda n: rg.masks.dilated(3, 4),
    "not": lambda n: ~rg.window(3),
    "mask_tensor": lambda n: rg.mask_tensor(some(2, 4, n, n, seed=4) > 0.5),
    "mask_mod": lambda n: rg.mask_mod(lambda b, h, i, j: (i + j + h) % 3 != b),
    "empty": lambda n: rg.causal() & ~rg.window(2),
    "random": lambda n: rg.masks.random_blocks(3, 2, n),
}
BIASES = {
    "none": lambda: (),
    "alibi": lambda: rg.ALiBi(4),
    "t5": lambda: rg.biases.T5Bias(4, num_buckets=8, max_distance=16),
    "shaw": lambda: rg.biases.ShawBias(6, reach=3),
    "transformer_xl": lambda: rg.biases.TransformerXLBias(4, 6),
    "softcap": lambda: (rg.ALiBi(4), rg.biases.Softcap(3.0)),
}
POSITIONS = {"none": lambda: None, "rope": lambda: rg.RoPE(6), "learned": lambda: rg.encodings.LearnedPositions(40, 6)}
NORMALIZERS = {
    "softmax": lambda: rg.normalizers.Softmax(),
    "sink": lambda: rg.normalizers.Softmax(temperature=0.7, sink=0.5),
    "learned sink": lambda: rg.normalizers.LearnedSink(4),
}
