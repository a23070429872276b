"""The sums of a register tile stay in registers: a compiler that spills them makes the products half as fast."""

from __future__ import annotations

import os
import re
import subprocess
from importlib.util import find_spec

import pytest

from build_kernels import FLAGS, SOURCES, TARGETS, VARIANT_FLAGS, compiler

pytestmark = pytest.mark.skipif(find_spec("ziglang") is None, reason="the compiler of the kernels is not installed")
SOURCE = '#include "forward.c"\n'
#: Functions of their own, whose loops the code around them takes no register from.
PRODUCTS = ("dot_products", "add_product_1", "add_product_2")
#: A vector that goes to the stack, in the assembly of x86-64 and of AArch64.
SPILL = re.compile(r"mov\w+\s+%[xyz]mm\d+, -?\d*\(%r[sb]p\)|st[rp]\s+q\d+.*\[(sp|x29)")
CASES = [(name, variant) for name in ("x86_64-linux", "aarch64-linux") for variant in TARGETS[name].variants]


def bodies(name, variant, folder, source=SOURCE):
    """The assembly of each product."""
    target, path, assembly = TARGETS[name], folder / "products.c", folder / "products.s"
    path.write_text(source)
    flags = ["-target", target.triple, *FLAGS, f"-mcpu={target.variants[variant]}", f"-DVARIANT={variant}"]
    command = [
        *compiler(),
        *flags,
        *VARIANT_FLAGS.get(variant, ()),
        f"-I{SOURCES}",
        "-S",
        str(path),
        "-o",
        str(assembly),
    ]
    caches = {f"ZIG_{kind}_CACHE_DIR": str(folder) for kind in ("LOCAL", "GLOBAL")}
    done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.findall(
        r"^(\w+):[^\n]*\n(.*?)^\.Lfunc_end", assembly.read_text(errors="replace"), re.MULTILINE | re.DOTALL
    )
    return {function: body for function, body in found if function in PRODUCTS}


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_the_sums_of_a_product_stay_in_registers(name, variant, tmp_path):
    found = bodies(name, variant, tmp_path)
    assert sorted(found) == sorted(PRODUCTS)
    assert not [function for function, body in found.items() if SPILL.search(body)]


def test_a_tile_that_does_not_fit_is_seen(tmp_path):
    too_many = f'#include "vector.h"\n#undef ROWS\n#define ROWS 12\n{SOURCE}'
    assert SPILL.search(bodies("x86_64-linux", "avx2", tmp_path, too_many)["add_product_2"])
