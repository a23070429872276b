"""Linear attention and the Performer: sums over keys in place of all pairs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

import regard as rg
from benchmarks.case import Aim, BenchSettings, Case, Side
from benchmarks.peers import packages, sdpa
from benchmarks.peers.package import FLA, LINEAR_TRANSFORMER, PERFORMER

HEADS, WIDTH, FEATURES = 8, 64, 256
#: The note of SDPA as a peer of linear mechanisms.
SOFTMAX = "softmax attention, another function, which linear attention replaces"


@dataclass(frozen=True)
class SoftmaxAndExp(rg.scores.FeatureMap):
    """phi(q) = softmax(q), phi(k) = exp(k): the features of linear-attention-transformer."""

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query.softmax(-1), key.exp()


def cases(setting: BenchSettings) -> Iterator[Case]:
    """Causal at 16,384 tokens, with --full also at 65,536."""
    gpu = setting.device == "cuda"
    plain = rg.Attention(
        rg.scores.FeatureScore(rg.scores.EluPlusOne()), mask=rg.causal(), normalizer=rg.normalizers.SumNormalizer()
    )
    for n in (16_384, 65_536) if gpu else (4096, 16_384, 65_536) if setting.full else (4096, 16_384):
        yield _linear(setting, plain, n)
    if gpu:
        return
    softmax = rg.Attention(
        rg.scores.FeatureScore(SoftmaxAndExp()), mask=rg.causal(), normalizer=rg.normalizers.SumNormalizer()
    )
    side = Side(
        "linear-attention-transformer",
        partial(packages.linear_transformer, 64),
        (Aim("faster", 2),),
        LINEAR_TRANSFORMER,
        witness=partial(packages.linear_transformer, 1),
        differs="its buckets of 64 attend only to earlier buckets; compared with buckets of one token",
        needs=8 << 30,
    )
    yield _case(setting, "linear", "linear, softmax(q) and exp(k)", softmax, 16_384, (side,))
    performer = rg.Attention(
        rg.scores.FeatureScore(rg.scores.RandomFeatures(WIDTH, FEATURES)),
        mask=rg.causal(),
        normalizer=rg.normalizers.SumNormalizer(),
    )
    theirs = Side(
        "performer-pytorch",
        partial(packages.performer, performer),
        (Aim("faster", 3),),
        PERFORMER,
        witness=partial(packages.exact_performer, performer),
        differs="it adds 1e-4 to every feature; compared without",
        tolerance=1e-3,
    )
    kernel = Side("SDPA, causal", sdpa.causal, (Aim("faster", 4),), differs=SOFTMAX)
    yield _case(setting, "performer", f"Performer, {FEATURES} features", performer, 16_384, (kernel, theirs))


def _linear(setting: BenchSettings, attention: rg.Attention, n: int) -> Case:
    gpu = setting.device == "cuda"
    aims = (Aim("faster", 5),) if gpu and n == 65_536 else (Aim("faster", 15),) if n == 16_384 and not gpu else ()
    peers = [Side("SDPA, causal", sdpa.causal, aims, differs=SOFTMAX)] if n <= 16_384 or gpu else []
    if n == 16_384 and not gpu:
        name = "flash-linear-attention's naive reference"
        peers.append(Side(name, packages.naive_linear, (Aim("faster", 50),), FLA))
    return _case(setting, "linear", "linear, elu + 1", attention, n, tuple(peers))


def _case(
    setting: BenchSettings, mechanism: str, what: str, attention: rg.Attention, n: int, peers: tuple[Side, ...]
) -> Case:
    return Case(
        group="linear",
        work=f"{what}, causal, n = {n:,}, {HEADS} heads of {WIDTH}",
        inputs=setting.inputs(*[(1, HEADS, n, WIDTH)] * 3),
        mechanism=mechanism,
        attention=attention,
        peers=peers,
        series=f"{what}, causal",
        length=n,
    )
