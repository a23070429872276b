"""The matrices of a user's module, and which of them stands for which matrix of a reference."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import combinations

import torch
from torch import Tensor, nn

from regard.base.errors import RegardError, nearest
from regard.diagnosis.steps import Matrix

#: Parts of names that tell the role of a matrix.
HINTS = {
    "query": ("q", "query", "queries", "dec", "decoder", "hidden", "state", "wq", "in"),
    "key": ("k", "key", "keys", "enc", "encoder", "memory", "source", "wk", "uk", "in"),
    "value": ("v", "value", "values", "wv", "in"),
    "output": ("o", "out", "output", "wo", "c", "final", "proj"),
    "score": ("v", "score", "energy", "va"),
    "general": ("w", "wa", "general", "attn"),
    "up": ("up", "fc", "ff", "mlp", "linear", "expand"),
    "down": ("down", "fc", "ff", "mlp", "linear", "contract"),
}
#: Roles whose names rule out others.
PROJECTIONS = ("query", "key", "value", "output")
#: Parts of names that tell that a matrix belongs to the cross-attention of a block.
CROSS = ("cross", "src", "source", "enc", "encoder", "memory", "multihead")
#: What may follow the name of a list of modules: one for each head.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def matrices_of(module: object, num_heads: int, widths: tuple[int, ...]) -> list[Matrix]:
    """All matrices (out, in) that the parameters of a module can be: whole, transposed, in parts, of heads together.

    The last part of a name says which part or order it is. `widths` are those of the inputs, which a matrix may join.
    """
    if not isinstance(module, nn.Module):
        return []
    parameters = {name: p.detach().double() for name, p in module.named_parameters() if p.is_floating_point()}
    parameters |= _of_all_heads(parameters)
    linear = {f"{name}.weight" for name, m in module.named_modules() if isinstance(m, nn.Linear)}
    found: list[Matrix] = []
    for name, x in parameters.items():
        bias = _bias_of(name, parameters)
        readings = [*_readings(name, x, bias, name in linear or name.endswith("_proj_weight"))]
        readings += _with_other_bias(name, x, parameters) if bias is None else []
        for matrix in readings:
            found += [matrix, *_of_rows(matrix), *_of_head_blocks(matrix, num_heads), *_of_columns(matrix, widths)]
    return found


def _bias_of(name: str, parameters: Mapping[str, Tensor]) -> Tensor | None:
    """The bias beside a weight, None without one; `name` is the weight's path, a key of `parameters`.

    In torch's attention with inputs of several widths one bias is for q, k and v.
    """
    joined = re.fullmatch(r"(.*)([qkv])_proj_weight", name)
    if joined is not None and f"{joined[1]}in_proj_bias" in parameters:
        return parameters[f"{joined[1]}in_proj_bias"].chunk(3)["qkv".index(joined[2])]
    return parameters.get(re.sub("weight$", "bias", name)) if name.endswith("weight") else None


def _of_all_heads(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices of single heads, such as heads.0.query.weight, one below the other, as heads.*.query.weight.

    `parameters` and the result are by name.
    """
    groups: dict[str, list[Tensor]] = {}
    for name, x in parameters.items():
        if x.ndim <= 2 and _NUMBER.search(name):
            groups.setdefault(_NUMBER.sub("*", name), []).append(x)
    return {
        name: torch.cat(parts)
        for name, parts in groups.items()
        if len(parts) > 1 and len({p.shape for p in parts}) == 1
    }


def _readings(name: str, x: Tensor, bias: Tensor | None, is_linear: bool) -> Iterator[Matrix]:
    """The matrices (out, in) that the parameter x can be, each with its bias; a vector is that of a norm, or one row.

    `name` is the name of x, and begins the names of the matrices. With `is_linear` a matrix is known to be (out, in),
    and is not transposed.
    """
    if x.ndim == 1:
        is_norm = bias is not None and bias.shape == x.shape
        if not name.endswith("bias"):
            yield Matrix(name, x, bias if is_norm else None)
            yield Matrix(f"{name}[None]", x[None])
    elif x.ndim == 3:
        for text, axes in (
            ("(heads, in, out)", (0, 2, 1)),
            ("(heads, out, in)", (0, 1, 2)),
            ("(in, heads, out)", (1, 2, 0)),
        ):
            y = x.permute(axes)
            yield Matrix(f"{name} {text}", y.reshape(-1, y.shape[-1]), None if bias is None else bias.flatten())
        yield Matrix(f"{name} (heads, width, out)", x.flatten(0, 1).mT)
    elif x.ndim == 2:
        yield Matrix(name, x, bias if bias is not None and bias.shape == x.shape[:1] else None)
        if not is_linear:
            yield Matrix(f"{name}.T", x.mT)


def _with_other_bias(name: str, x: Tensor, parameters: Mapping[str, Tensor]) -> Iterator[Matrix]:
    """The weight x of a norm, with each vector of the same module that may be its bias; `parameters` are by name."""
    if x.ndim != 1 or name.endswith("bias"):
        return
    module = name.rpartition(".")[0]
    for other, bias in parameters.items():
        if other != name and other.rpartition(".")[0] == module and bias.shape == x.shape:
            yield Matrix(f"{name}, {other}", x, bias)


def _of_rows(matrix: Matrix) -> Iterator[Matrix]:
    """Thirds and halves of the rows of a matrix that projects to query, key and value, or to key and value."""
    rows = matrix.weight.shape[0] if matrix.weight.ndim == 2 else 0
    for count in (3, 2):
        if rows % count == 0 and rows > count:
            for n in range(count):
                part = slice(n * rows // count, (n + 1) * rows // count)
                bias = None if matrix.bias is None else matrix.bias[part]
                yield Matrix(f"{matrix.name}[{part.start}:{part.stop}]", matrix.weight[part], bias)


def _of_head_blocks(matrix: Matrix, num_heads: int) -> Iterator[Matrix]:
    """Query, key and value of a joined matrix whose rows are ordered by head first: (heads, 3, width of a head)."""
    if matrix.weight.ndim != 2 or num_heads == 1 or matrix.weight.shape[0] % (3 * num_heads):
        return
    by_head, bias = matrix.weight.unflatten(0, (num_heads, 3, -1)), None
    for n in range(3):
        if matrix.bias is not None:
            bias = matrix.bias.unflatten(0, (num_heads, 3, -1))[:, n].flatten()
        yield Matrix(f"{matrix.name}[heads, {n}]", by_head[:, n].flatten(0, 1), bias)


def _of_columns(matrix: Matrix, widths: tuple[int, ...]) -> Iterator[Matrix]:
    """The columns of a matrix of two joined inputs of these widths, for each input. The bias belongs to the first."""
    if matrix.weight.ndim != 2 or matrix.weight.shape[1] != sum(widths) or len(widths) < 2:
        return
    for width in dict.fromkeys(widths):
        yield Matrix(f"{matrix.name}[:, :{width}]", matrix.weight[:, :width], matrix.bias)
        yield Matrix(f"{matrix.name}[:, {width}:]", matrix.weight[:, width:])


def check_names(wanted: Mapping[str, str], found: list[Matrix], names: Mapping[str, str]) -> None:
    """Refuse names of roles or of parameters that do not exist.

    `wanted` has the roles, `found` the matrices of the module, and `names` has for a role what the user names.
    """
    for role, name in names.items():
        if role not in wanted:
            raise RegardError(f"check(matrices=...): there is no matrix {role!r}. {nearest(role, wanted)}")
        if not any(matrix.name.startswith(name) for matrix in found):
            known = [matrix.name for matrix in found if "[" not in matrix.name]
            raise RegardError(f"check(matrices=...): the module has no matrix {name!r}. {nearest(name, known)}")


def fitting(
    role: str, letters: str, found: list[Matrix], sizes: Mapping[str, int]
) -> list[tuple[Matrix, dict[str, int]]]:
    """The matrices whose shape fits a role, each with all sizes; those whose names fit the role come first."""
    with_sizes = [(matrix, unified(letters, tuple(matrix.weight.shape), sizes)) for matrix in found]
    fits = [(matrix, its_sizes) for matrix, its_sizes in with_sizes if its_sizes is not None]
    return sorted(fits, key=lambda pair: -_fit(role, pair[0].name))


def swapped_names(matrices: Mapping[str, Matrix]) -> str:
    """The mistake of two matrices whose names speak for each other's role; empty if there are none."""
    for (one, its), (other, others) in combinations(matrices.items(), 2):
        if _hits(one, others.name) > _hits(one, its.name) and _hits(other, its.name) > _hits(other, others.name):
            return f"the projections of {one} and {other} are swapped"
    return ""


def unified(letters: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> dict[str, int] | None:
    """The sizes of letters with those of a matrix; None if the shape does not fit its letters, such as "D C".

    A digit among the letters is a size itself.
    """
    axes = letters.split()
    if len(shape) != len(axes):
        return None
    with_it = dict(sizes)
    for letter, size in zip(axes, shape, strict=True):
        expected = int(letter) if letter.isdigit() else with_it.setdefault(letter, size)
        if size != expected:
            return None
    return with_it


def _fit(role: str, name: str) -> int:
    """How well a name speaks for a role. A whole matrix fits better than a part of one.

    A hint for the role counts 2, one for cross-attention 1, and one for another projection alone -2.
    """
    of_cross = role.startswith("cross_") and any(part in CROSS for part in _parts(name))
    own = _hits(role, name)
    of_another = not own and any(_hits(other, name) for other in PROJECTIONS)
    return 2 * own - 2 * of_another + of_cross - ("[" in name)


def _hits(role: str, name: str) -> int:
    """How many words of a name are hints for the role; "cross_query" has the hints of "query".

    A role without hints is its own hint.
    """
    role = role.removeprefix("cross_")
    return sum(part in HINTS.get(role, (role,)) for part in _parts(name))


def _parts(name: str) -> list[str]:
    """The words of a name: "heads.0.W_q" has heads, w and q."""
    return re.split(r"[^a-z]+", name.lower())
