"""Plain and causal softmax against torch's fused kernel, with every weight available."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import regard as rg
from benchmarks.case import Aim, BenchSettings, Case, Side, allowed_pairs
from benchmarks.peers import sdpa, transformers
from benchmarks.peers.package import TRANSFORMERS

HEADS, WIDTH = 8, 64
#: The most tokens of the eager peer, and of the dense formula on a GPU.
EAGER, DENSE = 2048, 8192


def cases(setting: BenchSettings) -> Iterator[Case]:
    """Forward at all lengths; forward and backward up to 8,192, with --full at all lengths."""
    gpu = setting.device == "cuda"
    lengths = (2048, 8192, 16_384) if gpu else (512, 2048, 8192, 16_384)
    for name, mask in (("plain", None), ("causal", rg.causal())):
        for learns in (False, True):
            for n in lengths:
                if not learns or n <= 8192 or setting.full or gpu:
                    yield _case(setting, name, mask, n, learns)
    if not gpu:
        yield _case(setting, "plain", None, 8192, learns=False, heads=HEADS // 2, width=2 * WIDTH)


def _case(
    setting: BenchSettings,
    name: str,
    mask: rg.masks.Mask | None,
    n: int,
    learns: bool,
    heads: int = HEADS,
    width: int = WIDTH,
) -> Case:
    kernel = sdpa.sdpa if mask is None else sdpa.causal
    aims = (Aim("time", 1 / 0.99),) if setting.device == "cuda" else _aims(setting, name, n, learns)
    peers = [Side("SDPA", kernel, aims, tolerance=_tolerance(setting))]
    if n <= EAGER and setting.device == "cpu":
        eager = partial(transformers.eager, mask is not None)
        peers.append(Side("transformers, eager", eager, package=TRANSFORMERS))
    if setting.device == "cuda":
        peers += _on_gpu(rg.Attention(mask=mask), n)
    backward = 3.5 if learns else 1.0
    return Case(
        group="softmax",
        work=f"{name}, n = {n:,}, {heads} heads of {width}, {'forward + backward' if learns else 'forward'}",
        inputs=setting.inputs(*[(1, heads, n, width)] * 3),
        mechanism="multi_head" if mask is None else "masked",
        attention=rg.Attention(mask=mask),
        peers=tuple(peers),
        aims=()
        if learns or mask is not None or n < 4096
        else setting.aims("limit", *[82 if width == WIDTH else 87] * 2),
        learns=learns,
        flops=lambda: int(backward * 4 * heads * width * allowed_pairs(mask, n, n)),
        series="" if width != WIDTH else f"{name} softmax, {'forward + backward' if learns else 'forward'}",
        length=n,
        weighs=n < 16_384 or setting.full,
    )


def _on_gpu(attention: rg.Attention, n: int) -> list[Side]:
    """FlexAttention, and the dense formula where it fits."""
    tolerance = _tolerance(BenchSettings("cuda"))
    flex = Side("FlexAttention, compiled", partial(sdpa.flex, attention.mask), tolerance=tolerance, compiles=True)
    formula = Side(
        "the dense formula", partial(sdpa.eager, attention), tolerance=tolerance, needs=8 * HEADS * n * n * 4
    )
    return [flex, formula] if n <= DENSE else [flex]


def _aims(setting: BenchSettings, name: str, n: int, learns: bool) -> tuple[Aim, ...]:
    if learns:
        return setting.aims("faster", 2.2 if name == "plain" and n == 512 else 1.6, 1.1)
    return setting.aims("faster", 2.0, 1.15)


def _tolerance(setting: BenchSettings) -> float:
    return 3e-2 if setting.device == "cuda" else 1e-4
