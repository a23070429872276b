"""Masks: positions -> which query may attend to which key, pair by pair."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from regard.pieces import chosen, data_masks, key_groups, mask, neighborhoods, same_group, trees
from regard.pieces.piece import by_class
from regard.reference.basics import Array, Place, undefined


@by_class("allowed")
def attends(piece: object, place: Place) -> Array:
    """Which query may attend to which key: (I, J), True = may."""
    raise undefined("attends", piece)


@attends.register
def _(piece: mask.Both, place: Place) -> Array:
    return attends(piece.left, place) & attends(piece.right, place)


@attends.register
def _(piece: mask.Either, place: Place) -> Array:
    return attends(piece.left, place) | attends(piece.right, place)


@attends.register
def _(piece: mask.Not, place: Place) -> Array:
    return ~attends(piece.mask, place)


@attends.register
def _(piece: mask.Selected, place: Place) -> Array:
    return attends(piece.mask, replace(place, b=int(piece.index[place.b])))


@attends.register
def _(piece: mask.causal, place: Place) -> Array:
    return place.j <= place.i


@attends.register
def _(piece: mask.window, place: Place) -> Array:
    return np.abs(place.i - place.j) < piece.size


@attends.register
def _(piece: mask.dilated, place: Place) -> Array:
    steps, rest = np.divmod(np.abs(place.i - place.j), piece.dilation)
    return (rest == 0) & (steps < piece.size)


@attends.register
def _(piece: mask.prefix, place: Place) -> Array:
    return (place.j < piece.length) & (place.i == place.i)  # the second is True, for the shape (I, J)


@attends.register
def _(piece: mask.block_local, place: Place) -> Array:
    query_block, key_block = np.floor_divide(place.i, piece.size), np.floor_divide(place.j, piece.size)
    return (query_block - piece.before <= key_block) & (key_block <= query_block + piece.after)


@attends.register
def _(piece: data_masks.Lengths, place: Place) -> Array:
    return place.j < int(piece.lengths[place.b])


@attends.register
def _(piece: data_masks.RealKeys, place: Place) -> Array:
    return np.asarray(piece.real[place.b].cpu())[place.j]


@attends.register
def _(piece: data_masks.documents, place: Place) -> Array:
    """Equal numbers of documents; a position outside all documents attends to nothing. The last tokens are aligned."""
    keys = np.repeat(np.arange(len(piece.lengths)), piece.key_lengths or piece.lengths)
    queries = np.repeat(np.arange(len(piece.lengths)), piece.lengths)
    i = place.i - (len(keys) - len(queries))
    inside = (i >= 0) & (i < len(queries)) & (place.j >= 0) & (place.j < len(keys))
    return inside & (np.take(queries, i, mode="clip") == np.take(keys, place.j, mode="clip"))


@attends.register
def _(piece: data_masks.global_tokens, place: Place) -> Array:
    return np.isin(place.i, piece.positions) | np.isin(place.j, piece.positions)


@attends.register
def _(piece: data_masks.random_blocks, place: Place) -> Array:
    key_blocks = [set(row) for row in piece.table.tolist()]
    pairs = np.broadcast_arrays(place.i // piece.size, place.j // piece.size)
    return np.vectorize(lambda query_block, key_block: key_block in key_blocks[query_block])(*pairs)


@attends.register
def _(piece: data_masks.mask_mod, place: Place) -> Array:
    b, h, i, j = (torch.as_tensor(x, device="cpu") for x in (place.b, place.h, place.i, place.j))
    return np.asarray(piece.predicate(b, h, i, j))


@attends.register
def _(piece: data_masks.mask_tensor, place: Place) -> Array:
    """The last row is that of the last query; a batch or heads of size 1 serve all."""
    t = piece.tensor[(None,) * (4 - piece.tensor.ndim)]
    full = np.asarray(t[place.b % len(t), place.h % t.shape[1]].cpu())
    return full[place.i - (full.shape[1] - full.shape[0]), place.j]


@attends.register
def _(piece: same_group.SameGroup, place: Place) -> Array:
    groups = piece.groups[place.b % len(piece.groups)].cpu().numpy()
    return (groups[place.i] == groups[place.j]) & (groups[place.i] >= 0)


@attends.register
def _(piece: trees.tree, place: Place) -> Array:
    def line(i: int) -> set[int]:
        """A position and its ancestors: up through the tree, then every position of the context."""
        members = {i}
        while i >= piece.context and piece.parents[i - piece.context] >= 0:
            i = piece.context + piece.parents[i - piece.context]
            members.add(i)
        return members | set(range(min(i, piece.context)))

    return np.array([[j in members for j in place.j.ravel()] for members in map(line, place.i.ravel().tolist())])


@attends.register
def _(piece: neighborhoods.neighborhood, place: Place) -> Array:
    query, key = (np.unravel_index(x, piece.shape) for x in (place.i, place.j))
    axes = zip(query, key, piece.shape, piece.size, piece.dilation, piece.stride, piece.is_causal, strict=True)
    return np.logical_and.reduce([_is_near(*axis) for axis in axes])


def _is_near(i: Array, j: Array, length: int, size: int, gap: int, stride: int, is_causal: bool) -> Array:
    """One axis of a neighborhood: coordinates of queries (I, 1) and keys (1, J) -> (I, J).

    Points `gap` apart form a line. `stride` queries share the window of a leader. A window that would begin before the
    line is shifted right, one that would end after it left.
    """
    num_points = np.ceil((length - i % gap) / gap).astype(int)  # on the line of each query
    offset = stride - 1 if is_causal else stride // 2
    leader = np.minimum(i // gap // stride * stride + offset, num_points - 1)
    distance = j // gap - leader
    if is_causal:
        return (i % gap == j % gap) & (distance > -size) & (j <= i)
    shift = np.maximum(size // 2 - leader, 0) - np.maximum(leader + (size - 1) // 2 - (num_points - 1), 0)
    return (i % gap == j % gap) & (-(size // 2) <= distance - shift) & (distance - shift <= (size - 1) // 2)


@attends.register
def _(piece: neighborhoods.sliding_tiles, place: Place) -> Array:
    """A neighborhood of tiles."""
    tiles = (np.unravel_index(x // np.prod(piece.tile), piece.near.shape) for x in (place.i, place.j))
    axes = zip(*tiles, piece.shape, piece.tile, piece.size, strict=True)
    return np.logical_and.reduce([_is_near(i, j, n // side, size, 1, 1, False) for i, j, n, side, size in axes])


@attends.register
def _(piece: chosen.chosen_keys, place: Place) -> Array:
    """Whether the block of the key is among the ids of the query's row; a head of ids serves query heads in a row."""
    ids = piece.ids.cpu().numpy()
    heads = ids.shape[1] if piece.num_heads is None else piece.num_heads
    head = place.h // (heads // ids.shape[1]) if ids.shape[1] > 1 else 0
    rows = ids[place.b % len(ids), head, place.i.ravel() - piece.start]
    j, blocks = place.j.ravel(), piece.blocks
    block = j // piece.size if blocks is None else blocks.cpu().numpy()[place.b % len(blocks), j]
    return np.array([np.isin(block, row) for row in rows]).reshape(len(rows), -1)


@attends.register
def _(piece: key_groups.GroupMask, place: Place) -> Array:
    """Whether `mask` allows the first token of each group, and the second, and so on; `place.j` are groups."""
    last, tokens, is_own = (x.cpu().numpy() for x in (piece.last, piece.tokens, piece.is_own))
    entry, columns = place.b % len(tokens), np.searchsorted(last, place.j.ravel())
    by_token = [attends(piece.mask, replace(place, j=tokens_n[None])) for tokens_n in tokens[entry, columns].T]
    return np.logical_and.reduce(by_token) & is_own[entry, columns]
