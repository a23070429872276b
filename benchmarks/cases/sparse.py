"""Sparse masks: Longformer, BigBird, dilated windows, blocks, prefixes, trees, images and videos."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from importlib.util import find_spec

import regard as rg
from benchmarks.case import Aim, BenchSettings, Build, Case, Side, allowed_pairs
from benchmarks.cases.packed import small
from benchmarks.peers import sdpa, transformers
from benchmarks.peers.package import TRANSFORMERS

HEADS, WIDTH, LENGTH, BLOCK = 8, 64, 8192, 64
#: The window of Longformer as transformers counts it (both sides), and the number of global tokens.
BOTH_SIDES, NUM_GLOBAL = 512, 16


def cases(setting: BenchSettings) -> Iterator[Case]:
    """Each mask against a dense mask, with --full also against compiled FlexAttention."""
    if setting.device == "cuda":
        return
    longformer = rg.window(BOTH_SIDES // 2 + 1) | rg.masks.global_tokens(range(NUM_GLOBAL))
    build = partial(transformers.longformer, BOTH_SIDES, NUM_GLOBAL)
    for learns in (False, True):
        aims = (Aim("faster", 1.5),) if learns else _faster(setting)
        theirs = Side("transformers' Longformer", build, aims, TRANSFORMERS)
        yield _case(setting, "longformer", "Longformer, window 257 + 16 global", longformer, (theirs,), learns)
    yield _bigbird(setting)
    yield _case(setting, "dilated", "dilated, 64 on each side, every second", rg.masks.dilated(64, 2))
    yield _case(setting, "block_local", "block-local, blocks of 256", rg.masks.block_local(256))
    yield from _branches_and_pictures(setting)
    prefix = rg.causal() | rg.masks.prefix(512)
    yield _case(setting, "prefix", "prefix of 512, then causal", prefix, example=small_prefix)


def _branches_and_pictures(setting: BenchSettings) -> Iterator[Case]:
    """Trees, continuations of one prefix, an image and a video."""
    trunk, branch = 2048, 96
    parents = [-1 if token % branch == 0 else token - 1 for token in range(LENGTH - trunk)]
    yield _case(setting, "tree", "tree, 64 branches of 96 after 2,048", rg.masks.tree(parents, context=trunk))
    continuations = rg.masks.shared_prefix(trunk, [256] * 24)
    yield _case(setting, "shared_prefix", "shared prefix of 2,048, 24 continuations of 256", continuations)
    image = rg.masks.neighborhood((64, 128), 13)
    yield _case(setting, "neighborhood", "neighborhood of 13 x 13 in an image of 64 x 128", image, aim=2)
    video = rg.masks.sliding_tiles((16, 16, 32), 4, (3, 3, 3))
    yield _case(setting, "sliding_tiles", "sliding tiles, 3 x 3 x 3 of 4 x 4 x 8 tiles", video)


def _faster(setting: BenchSettings) -> tuple[Aim, ...]:
    return setting.aims("faster", 8, 5)


def small_prefix():
    """A prefix of five tokens."""
    return small(rg.causal() | rg.masks.prefix(5))


def _case(
    setting: BenchSettings,
    mechanism: str,
    what: str,
    mask: rg.masks.Mask,
    peers: tuple[Side, ...] = (),
    learns: bool = False,
    example=None,
    aim: float = 4,
) -> Case:
    backward = 3.5 if learns else 1.0
    sides = [*peers]
    if not learns:
        sides.insert(0, Side("SDPA, dense mask", partial(sdpa.dense, mask), (Aim("faster", aim),)))
        if setting.full:
            build = partial(sdpa.flex, mask)
            sides.append(Side("FlexAttention, compiled", build, (Aim("faster", 1.2),), compiles=True))
    return Case(
        group="sparse",
        work=f"{what}, n = {LENGTH:,}, {HEADS} heads of {WIDTH}{', forward + backward' if learns else ''}",
        inputs=setting.inputs(*[(1, HEADS, LENGTH, WIDTH)] * 3),
        mechanism=mechanism,
        attention=rg.Attention(mask=mask),
        peers=tuple(sides),
        learns=learns,
        example=example,
        flops=lambda: int(backward * 4 * HEADS * WIDTH * allowed_pairs(mask, LENGTH, LENGTH)),
    )


def _bigbird(setting: BenchSettings) -> Case:
    """BigBird with the random blocks of transformers if it is installed; there the last block is global, too."""
    if find_spec("transformers") is None:
        mask = rg.masks.bigbird(LENGTH, BLOCK)
        return _case(setting, "bigbird", "BigBird, blocks of 64", mask)
    mask = _bigbird_mask()
    build: Build = partial(transformers.bigbird, BLOCK, mask.left.right.table)  # type: ignore[attr-defined]
    side = Side("transformers' BigBird", build, _faster(setting), TRANSFORMERS)
    return _case(setting, "bigbird", "BigBird, blocks of 64, 3 near, 2 global, 3 random", mask, (side,))


@cache
def _bigbird_mask() -> rg.masks.Mask:
    mask = rg.masks.bigbird(LENGTH, BLOCK) | rg.masks.global_tokens(range(LENGTH - BLOCK, LENGTH))
    random = mask.left.right  # type: ignore[attr-defined]
    random.__dict__["table"] = transformers.bigbird_table(BLOCK, LENGTH, random.count)
    return mask
