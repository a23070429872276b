"""Compiles the Triton kernels for GPUs that need not be here; test_gpu_statistics.py runs this script.

The interpreter takes code that the compiler refuses: other types after a branch, shapes that are no power of 2.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from regard.engine.gpu import statistics_kernel as kernels

ONE = 1
BLOCKS = {"QUERIES": 64, "KEYS": 32, "WIDTH": 32, "TOP": 4, "CELL_ROWS": 16, "CELL_COLUMNS": 16}


def arguments(dtype: str, is_full: bool) -> tuple[Any, ...]:
    """The types of the arguments; 1 is compiled in, as by a call, and so is None."""
    optional = (lambda kind: kind) if is_full else (lambda kind: None)
    stride = "i32" if is_full else ONE
    strides = ("i64", "i32", "i32", stride)
    floats, vectors = "*fp32", f"*{dtype}"
    scores = kernels.Scores(
        vectors, strides, vectors, strides, floats, optional(floats), optional(floats), "fp32", optional("fp32")
    )
    pattern = kernels.Pattern("*i64", "*i64", optional("*u8"), "i32", "i32", "i32")
    sizes = kernels.KernelSizes("i32", stride, stride, "i32", "i32", "i32", "i32", "i32")
    rows = (floats, *map(optional, (floats, floats, floats)))
    return scores, pattern, sizes, kernels.Sums(*rows, floats, floats, floats, "*i64", "i32", "i32", stride, "i32")


def source(name: str, dtype: str, is_full: bool) -> ASTSource:
    """A kernel, and what is compiled into it."""
    constants: dict[tuple[int, ...], Any] = {}

    def typed(value: Any, path: tuple[int, ...]) -> Any:
        if isinstance(value, tuple):
            inner = [typed(part, (*path, n)) for n, part in enumerate(value)]
            return type(value)(*inner) if hasattr(value, "_fields") else tuple(inner)
        if isinstance(value, str):
            return value
        constants[path] = value
        return "constexpr"

    kernel, (scores, pattern, sizes, sums) = getattr(kernels, name), arguments(dtype, is_full)
    results = {"sums": sums, "logsumexp": "*fp32"}
    given = {"scores": scores, "pattern": pattern, "sizes": sizes, **results, **BLOCKS}
    types = {name: typed(given[name], (n,)) for n, name in enumerate(kernel.arg_names)}
    return ASTSource(kernel, types, constexprs=constants)


def main() -> None:
    """Compile each kernel with all pieces, and with few."""
    for dtype, is_full, arch in (("bf16", True, 90), ("fp32", False, 80)):
        for name in ("statistics_kernel", "logsumexp_kernel"):
            compiled = triton.compile(source(name, dtype, is_full), target=GPUTarget("cuda", arch, 32))
            assert len(compiled.asm["cubin"]) > 1000, compiled.asm.keys()


if __name__ == "__main__":
    main()
