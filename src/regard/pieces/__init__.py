"""The pieces an attention is made of: scores, positions, biases, masks, normalisers."""

from regard.pieces.bias import (
    AdditiveBias,
    ALiBi,
    Bias,
    LearnedTable,
    ShawBias,
    Softcap,
    T5Bias,
    TransformerXLBias,
)
from regard.pieces.grid import Grid
from regard.pieces.kernel import EluPlusOne, FeatureMap, Kernel, RandomFeatures
from regard.pieces.mask import Mask, block_local, causal, dilated, prefix, window
from regard.pieces.mask_data import bigbird, documents, given, global_tokens, padding, random_blocks, where
from regard.pieces.normalizer import (
    Entmax15,
    Hardmax,
    LearnedSink,
    Normalizer,
    Softmax,
    Sparsemax,
    Sum,
    TopK,
)
from regard.pieces.position import NTK, LearnedPositions, Linear, Llama3, Position, RoPE, Scaling, Sinusoidal
from regard.pieces.score import Additive, Bilinear, Concat, Cosine, Dot, Score

__all__ = [
    "NTK",
    "ALiBi",
    "Additive",
    "AdditiveBias",
    "Bias",
    "Bilinear",
    "Concat",
    "Cosine",
    "Dot",
    "EluPlusOne",
    "Entmax15",
    "FeatureMap",
    "Grid",
    "Hardmax",
    "Kernel",
    "LearnedPositions",
    "LearnedSink",
    "LearnedTable",
    "Linear",
    "Llama3",
    "Mask",
    "Normalizer",
    "Position",
    "RandomFeatures",
    "RoPE",
    "Scaling",
    "Score",
    "ShawBias",
    "Sinusoidal",
    "Softcap",
    "Softmax",
    "Sparsemax",
    "Sum",
    "T5Bias",
    "TopK",
    "TransformerXLBias",
    "bigbird",
    "block_local",
    "causal",
    "dilated",
    "documents",
    "given",
    "global_tokens",
    "padding",
    "prefix",
    "random_blocks",
    "where",
    "window",
]
