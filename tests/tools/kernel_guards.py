"""Runs the kernels with pages that nobody may touch right before or right behind every tensor of a call.

A read or write outside ends the process, so the tests run this file as one: `kernel_guards.py LEVEL... [--short]`.
With --short the call names one key more than there are.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from contextlib import ExitStack
from ctypes import c_void_p
from unittest import mock

import torch

import regard as rg
from kernel_harness import pointer_offsets
from kernels import additive
from regard.engine.kernel import (
    attention,
    chosen,
    indexer,
    library,
    recurrence,
    rotation,
    running,
    similarity,
    statistics,
    sums,
    transport,
)
from regard.engine.kernel.structures import KernelCall, Pointers
from regard.maps import compiled_reductions
from regard.maps.changed_map import Carried
from regard.maps.reductions import Pyramid
from regard.stats.statistics import Agreement, Offset, Offsets, SameToken, WeightOnKeys

LIBC = ctypes.CDLL(None, use_errno=True)
PAGE = mmap.PAGESIZE
#: Address of guarded memory -> the address of its block with both pages, and its bytes.
BLOCKS: dict[int, tuple[int, int]] = {}
#: The functions that ran with guards.
GUARDED: set[str] = set()
WINDOW = rg.window(30)
LINEAR = {"score": rg.scores.FeatureScore(), "mask": rg.causal(), "normalizer": rg.normalizers.SumNormalizer()}


class HalfCorrected(rg.transitions.Transition):
    """A delta rule with constants."""

    def prepare(self, query, key):
        return rg.transitions.Steps(query, 0.01 * key, log_decay=-0.1 * torch.ones_like(key[..., :1]), address=key)


#: name -> the pieces, and the sizes (B, H, G, I, J, D, E).
CASES = {
    "plain": (lambda: {}, (2, 2, 1, 97, 131, 16, 16)),
    "one of each": (lambda: {}, (1, 1, 1, 1, 1, 1, 1)),
    "odd widths": (lambda: {"mask": rg.causal()}, (1, 2, 2, 33, 33, 3, 17)),
    "window": (lambda: {"mask": rg.causal() & rg.window(20)}, (1, 2, 2, 193, 193, 8, 33)),
    "window of a long text": (lambda: {"mask": rg.causal() & rg.window(20)}, (1, 2, 1, 3200, 3203, 5, 16)),
    "padding": (lambda: {"mask": rg.padding([50, 1])}, (2, 2, 1, 13, 50, 16, 8)),
    "predicate": (lambda: {"mask": rg.mask_mod(lambda b, h, i, j: (i + j + h) % 3 > 0)}, (1, 2, 2, 45, 70, 9, 9)),
    "dilated": (lambda: {"mask": rg.masks.dilated(9, 2)}, (1, 1, 1, 100, 100, 8, 8)),
    "biases": (lambda: {"bias": (rg.biases.T5Bias(2), rg.biases.Softcap(2.0), rg.ALiBi(2))}, (1, 2, 2, 107, 99, 8, 8)),
    "Shaw": (
        lambda: {"bias": (rg.biases.ShawBias(8, reach=5), rg.biases.Softcap(2.0)), "mask": WINDOW},
        (1, 2, 2, 107, 99, 8, 8),
    ),
    "dropout": (lambda: {"dropout": 0.3}, (2, 2, 1, 97, 131, 16, 16)),
    "linear": (lambda: LINEAR, (2, 4, 2, 97, 97, 20, 13)),
    "linear, one of each": (lambda: LINEAR, (1, 1, 1, 1, 1, 1, 1)),
    "recurrent": (lambda: {"transition": rg.transitions.Decay(-0.1)}, (2, 3, 3, 97, 97, 20, 13)),
    "delta rule": (lambda: {"transition": HalfCorrected()}, (1, 2, 2, 50, 50, 17, 33)),
    "delta rule, one of each": (lambda: {"transition": HalfCorrected()}, (1, 1, 1, 1, 1, 1, 1)),
    "rotary positions": (lambda: {"position": rg.RoPE(6)}, (2, 2, 1, 67, 131, 9, 8)),
    "interleaved positions": (lambda: {"position": rg.RoPE(16, interleaved=True)}, (1, 2, 2, 1, 70, 16, 8)),
    "sink": (lambda: {"normalizer": rg.normalizers.LearnedSink(2)}, (1, 2, 1, 7, 300, 64, 5)),
    "additive": (lambda: {"score": additive(3, 3, 5), "mask": rg.causal()}, (1, 2, 1, 33, 40, 3, 17)),
    "additive, far apart": (lambda: {"score": additive(3, 3, 17, size=100.0)}, (2, 2, 2, 5, 9, 3, 1)),
    "chosen keys": (lambda: {"mask": every_third(2, 45, 70, 1, num_heads=4)}, (2, 4, 2, 45, 70, 9, 17)),
    "chosen blocks": (lambda: {"mask": rg.causal() & every_third(1, 120, 120, 33)}, (1, 2, 2, 120, 120, 16, 8)),
    "chosen, one of each": (lambda: {"mask": every_third(1, 1, 1, 1)}, (1, 1, 1, 1, 1, 1, 1)),
}


def every_third(heads, I, J, size, num_heads=None):
    """Every third key or block of the keys, from another one on for each head and query."""
    shifts = torch.arange(heads)[:, None, None] + torch.arange(I)[:, None]
    return rg.masks.chosen_keys(
        (torch.arange(0, -(-J // size), 3) + shifts)[None], size=size, num_heads=num_heads, start=J - I
    )


def guarded(num_bytes: int, at_end: bool) -> int:
    """The address of memory right behind an untouchable page, or right before one."""
    pages = -(-num_bytes // PAGE) + 2
    LIBC.mmap.restype, LIBC.mmap.argtypes = c_void_p, [c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    start = LIBC.mmap(
        None, pages * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )
    for page in (start, start + (pages - 1) * PAGE):
        if LIBC.mprotect(c_void_p(page), ctypes.c_size_t(PAGE), 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    address = start + (pages - 1) * PAGE - num_bytes if at_end else start + PAGE
    BLOCKS[address] = start, pages * PAGE
    return address


def give_back(address: int) -> None:
    """Free what `guarded` returned: the system has room for a limited number of blocks."""
    start, num_bytes = BLOCKS.pop(address)
    LIBC.munmap(c_void_p(start), ctypes.c_size_t(num_bytes))


def guarded_empty(at_end):
    def empty(*shape):
        numbers = torch.Size(shape).numel()
        memory = (ctypes.c_float * numbers).from_address(guarded(4 * numbers, at_end))
        return torch.frombuffer(memory, dtype=torch.float32).view(shape).fill_(torch.nan)

    return empty


def guards(run, at_end, more_keys=0):
    """Stands in for `run` or `run_in`: every tensor of the call moves to guarded memory, and back."""

    def run_there(*given):
        structures = [each for each in given if isinstance(each, Pointers)]
        storages = (t.untyped_storage() for structure in structures for t in structure.tensors)
        sizes = {s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}
        moved = {start: guarded(size, at_end) for start, size in sizes.items()}

        def there(place):
            return next(
                (place + moved[start] - start for start in sizes if start <= place < start + sizes[start]), place
            )

        for start, size in sizes.items():
            ctypes.memmove(moved[start], start, size)
        for structure in structures:
            for offset in pointer_offsets(type(structure)):
                field = c_void_p.from_buffer(structure, offset)
                field.value = there(field.value or 0)
            if isinstance(structure, KernelCall):
                structure.J += more_keys
        GUARDED.update(each for each in given if isinstance(each, str))
        run(*(x._replace(address=there(x.address)) if isinstance(x, running.Workspace) else x for x in given))
        for start, size in sizes.items():
            ctypes.memmove(start, moved[start], size)
            give_back(moved[start])

    return run_there


def results(pieces, sizes, dtype, transposed):
    """Output and gradients; the memory of each input holds nothing besides its numbers."""
    B, H, G, I, J, D, E = sizes
    torch.manual_seed(0)
    mechanism = rg.Attention(**pieces())
    shapes = (B, H, I, D), (B, G, J, D), (B, G, J, E), (B, H, I, E)
    *tensors, along = (torch.randn(shape).to(dtype) for shape in shapes)
    if transposed:
        *tensors, along = (t.mT.contiguous().mT for t in (*tensors, along))
    leaves = [t.requires_grad_() for t in tensors]
    engine = "linear" if isinstance(mechanism.score, rg.scores.FeatureScore) else "kernel"
    engine = engine if mechanism.transition is None else "recurrent"
    engine = "chosen" if "chosen_keys" in repr(mechanism.mask) else engine
    output = mechanism(*leaves, engine=engine).output
    gradients = torch.autograd.grad(output, [*leaves, *mechanism.parameters()], along)
    others = {"kernel": lambda: statistics_of(mechanism, leaves), "recurrent": lambda: rows_of(mechanism, leaves)}
    return output, *gradients, *others.get(engine, lambda: indexed(*leaves))()


@torch.no_grad()
def rows_of(mechanism, tensors):
    """Few rows of the weights of a recurrent layer."""
    return [mechanism(*tensors).weights[:, :, -1:]]


@torch.no_grad()
def indexed(query, key, value):
    """The keys that an indexer chooses, by the same queries, and the greatest numbers of rows."""
    positions = rg.types.Positions.aligned_to_end(query.shape[2], key.shape[2])
    weights = query[..., 0].transpose(1, 2)
    return indexer.indexed(query, key[:, :1], weights, 5, positions, rg.causal(), 1), indexer.greatest(key.float(), 3)


@torch.no_grad()
def statistics_of(mechanism, tensors):
    """The output without gradients, and the states of every reduction that the kernels compute."""
    weights = mechanism(*tensors, engine="blocked").weights
    B, H, I, J = weights.shape
    numbers, few = torch.linspace(0, 1, B * H * J).view(B, H, J), min(I, J, 3)
    reductions = (
        *(
            rg.maps.Entropy(),
            rg.maps.TopLinks(3),
            rg.maps.KeyTotals(),
            rg.maps.Distance(),
            rg.maps.MassOn([0]),
            Carried(numbers),
        ),
        *(rg.maps.Pool(5, 7), Pyramid(2), Offset(-1), Offsets(-3, 3), WeightOnKeys(tuple(range(few)))),
        *(
            rg.maps.MassWhere(~rg.causal()),
            SameToken(torch.arange(J) % 3, torch.arange(I) % 3),
            rg.maps.Similarity(2),
            Agreement(tuple(range(few)), 2),
        ),
    )
    output = mechanism(*tensors, engine="kernel").output  # without gradients few queries have a kernel of their own
    return [output, *(part for state in weights.reduction_states(reductions).values() for part in state)]


#: The modules whose calls and whose new memory are guarded.
CALLING = (attention, rotation, sums, recurrence, statistics, similarity, chosen, indexer, transport)
ALLOCATING = (attention, running, sums, chosen)


def check(level, at_end, more_keys):
    os.environ["REGARD_KERNEL"] = level
    for name, (pieces, sizes) in CASES.items():
        for dtype, transposed in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, True)):
            print(f"{name}, {level}, {dtype}, guard {'behind' if at_end else 'before'}", flush=True)
            expected = results(pieces, sizes, dtype, transposed)
            with ExitStack() as patches:
                run, run_in = (guards(each, at_end, more_keys) for each in (running.run, running.run_in))
                for module in CALLING:
                    patches.enter_context(mock.patch.object(module, "run", run))
                patches.enter_context(mock.patch.object(attention, "run_in", run_in))
                for module in ALLOCATING:
                    patches.enter_context(mock.patch.object(module, "empty", guarded_empty(at_end)))
                found = results(pieces, sizes, dtype, transposed)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    compiled_reductions.FEWEST_PAIRS = library.LOWEST_LEVEL = 0
    short = "--short" in sys.argv
    for level in [argument for argument in sys.argv[1:] if argument != "--short"]:
        for at_end in (True, False):
            check(level, at_end, int(short))
    print(*sorted(GUARDED))
    print("done")
