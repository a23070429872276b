"""Encodings: what positions do to queries and keys, (n, D) -> (n, D)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from regard.pieces import axial, encodings, position, scaling
from regard.pieces.piece import by_class
from regard.reference.basics import Array, Place, array, undefined

#: The methods of an encoding that say what it computes.
ENCODES = "encode", "encode_query", "encode_key", "encode_both", "frequencies", "table"


@by_class(*ENCODES)
def encode(piece: object, x: Array, positions: Array) -> Array:
    """Vectors (n, D) at positions (n,) -> (n, D)."""
    raise undefined("encode", piece)


@encode.register
def _(piece: position.RoPE, x: Array, positions: Array) -> Array:
    half, encoded = piece.head_dim // 2, x.copy()
    first, second = (slice(0, piece.head_dim, 2), slice(1, piece.head_dim, 2)) if piece.interleaved else (
        slice(0, half), slice(half, piece.head_dim)
    )  # fmt: skip
    frequencies = piece.base ** -(np.arange(0, piece.head_dim, 2) / piece.head_dim)
    rotation = np.exp(1j * positions[:, None] * rescale(piece.scaling, frequencies)[None, :])
    z = (x[:, first] + 1j * x[:, second]) * rotation * magnitude(piece.scaling)
    encoded[:, first], encoded[:, second] = z.real, z.imag
    return encoded


@by_class("__call__")
def rescale(scaling: Any, frequencies: Array) -> Array:
    """Frequencies (D / 2,) of RoPE -> frequencies (D / 2,); a scaling of the caller defines itself."""
    return frequencies if scaling is None else array(scaling(torch.from_numpy(frequencies)))


@rescale.register
def _(scaling: position.LinearScaling, frequencies: Array) -> Array:
    return frequencies / scaling.factor


@rescale.register
def _(scaling: position.NTKScaling, frequencies: Array) -> Array:
    """b^(-2m/D) with b' = b factor^(D / (D - 2)): pair m slows by factor^(2m / (D - 2))."""
    last_pair = max(len(frequencies) - 1, 1)
    return np.array([f / scaling.factor ** (m / last_pair) for m, f in enumerate(frequencies)])


@rescale.register
def _(scaling: position.Llama3Scaling, frequencies: Array) -> Array:
    """By wavelength, as in the released code: long waves slow by `factor`, short ones stay, with a ramp between."""
    rescaled = frequencies.copy()
    for m, frequency in enumerate(frequencies):
        wavelength = 2 * math.pi / frequency
        if wavelength > scaling.trained_length / scaling.low:
            rescaled[m] = frequency / scaling.factor
        elif wavelength > scaling.trained_length / scaling.high:
            smooth = (scaling.trained_length / wavelength - scaling.low) / (scaling.high - scaling.low)
            rescaled[m] = (1 - smooth) * frequency / scaling.factor + smooth * frequency
    return rescaled


@rescale.register
def _(piece: scaling.YaRNScaling, frequencies: Array) -> Array:
    """NTK-by-parts: a share gamma of each frequency is divided by the factor.

    gamma is 0 for pairs that make at least `fast` turns in the trained length, 1 for those that make at most `slow`,
    and grows linearly with the number of the pair between them. Pair m has the frequency f_0 base_of_pair^-m, so it
    makes `turns` turns if m = log(trained_length f_0 / (2 pi turns)) to the base `base_of_pair`.
    """
    if len(frequencies) < 2:
        return frequencies
    base_of_pair = frequencies[0] / frequencies[1]
    ends = [
        math.log(piece.trained_length / (2 * math.pi * turns / frequencies[0]), base_of_pair)
        for turns in (piece.fast, piece.slow)
    ]
    low, high = (math.floor(ends[0]), math.ceil(ends[1])) if piece.is_rounded else ends
    low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)  # the authors' code has the width, not the pairs
    rescaled = []
    for m, frequency in enumerate(frequencies):
        gamma = min(max((m - low) / (high - low if high > low else 0.001), 0), 1)  # 0.001: no division by 0
        rescaled.append((1 - gamma) * frequency + gamma * frequency / piece.factor)
    return np.array(rescaled)


@rescale.register
def _(piece: scaling.LongRoPEScaling, frequencies: Array) -> Array:
    return frequencies / np.array(piece.factors)


@rescale.register
def _(piece: scaling.ProportionalScaling, frequencies: Array) -> Array:
    pairs = math.floor(piece.share * len(frequencies))
    return np.array([frequency / piece.factor if m < pairs else 0.0 for m, frequency in enumerate(frequencies)])


@by_class("magnitude")
def magnitude(scaling: Any) -> float:
    """The factor of the rotated channels."""
    return 1.0 if scaling is None else scaling.magnitude


@magnitude.register
def _(piece: scaling.YaRNScaling) -> float:
    """The published 1 / sqrt(t) = 0.1 ln(s) + 1."""
    given = piece.attention_factor
    return (0.1 * math.log(max(piece.factor, 1)) + 1) if given is None else float(array(given))


@magnitude.register
def _(piece: scaling.LongRoPEScaling) -> float:
    return math.sqrt(1 + math.log(max(piece.extension, 1)) / math.log(piece.trained_length))


@encode.register
def _(piece: position.Sinusoidal, x: Array, positions: Array) -> Array:
    table = np.zeros(x.shape)
    for channel in range(x.shape[1]):
        angle = positions / piece.base ** (2 * (channel // 2) / x.shape[1])
        table[:, channel] = np.cos(angle) if channel % 2 else np.sin(angle)
    return x + table


@encode.register
def _(piece: position.LearnedPositions, x: Array, positions: Array) -> Array:
    return x + array(piece.table)[positions]


#: Tensors of the call by name, for one batch entry.
Given = dict[str, Array]


@by_class(*ENCODES)
def encode_heads(piece: object, x: Array, place: Place, is_query: bool, given: Given) -> Array:
    """Queries or keys of all heads of a batch entry, (heads, n, D) -> (heads, n, D'). `given`: tensors of the call."""
    positions = (place.i if is_query else place.j).ravel()
    return np.stack([encode(piece, each, positions) for each in x])


@encode_heads.register
def _(piece: encodings.Chain, x: Array, place: Place, is_query: bool, given: Given) -> Array:
    for part in piece.parts:
        x = encode_heads(part, x, place, is_query, given)
    return x


@encode_heads.register
def _(piece: encodings.QKNorm, x: Array, place: Place, is_query: bool, given: Given) -> Array:
    learned = piece.query_scale if is_query else piece.key_scale
    scale = 1.0 if learned is None else array(learned)
    together = x.transpose(1, 0, 2).reshape(x.shape[1], -1) if piece.joint else x
    norm = np.sqrt((together**2).mean(-1) + array(piece.eps))
    return x / norm[..., None] * scale


@encode_heads.register
def _(piece: encodings.ScalableSoftmax, x: Array, place: Place, is_query: bool, given: Given) -> Array:
    if not is_query:
        return x
    return np.log(np.maximum(place.i + 1, 1)) * array(piece.factor) * x


@encode_heads.register
def _(piece: encodings.PositionTemperature, x: Array, place: Place, is_query: bool, given: Given) -> Array:
    if not is_query:
        return x
    steps = np.maximum(np.floor((place.i + piece.first) / piece.floor), 0)
    return x * (1 + array(piece.factor) * np.log(1 + steps))


@encode_heads.register
def _(piece: encodings.PoPE, x: Array, place: Place, is_query: bool, given: Given) -> Array:
    """Complex numbers of length softplus(x) = log(1 + exp(x)); their product with the conjugate is the score."""
    angle = (place.i if is_query else place.j.T) / piece.base ** (np.arange(piece.head_dim) / piece.head_dim)
    if not is_query:
        angle = angle + np.clip(array(piece.phase), -2 * math.pi, 0)
    z: Array = np.logaddexp(0, x) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], -1)


@encode_heads.register
def _(piece: axial.AxialRoPE, x: Array, place: Place, is_query: bool, given: Given) -> Array:
    tokens, num_pairs, encoded = (place.i if is_query else place.j).ravel(), len(piece.axes), x.copy()
    places = tokens
    if piece.coordinates is None:  # those of the keys of the call, and each query is one of the keys
        table, places = given["coordinates"], np.searchsorted(place.j.ravel(), tokens)
    elif piece.coordinates.ndim == 3:
        table = array(piece.coordinates[place.b % len(piece.coordinates)])
    else:
        table = array(piece.coordinates)
    for m, (axis, rate) in enumerate(zip(piece.axes, piece.rates, strict=True)):
        first, second = (2 * m, 2 * m + 1) if piece.interleaved else (m, m + num_pairs)
        z = (x[..., first] + 1j * x[..., second]) * np.exp(1j * table[axis][places] * rate)
        encoded[..., first], encoded[..., second] = z.real, z.imag
    return encoded
