"""Compiles kernels/ into one library without dependencies, for this machine or for another: `make kernels`.

    python scripts/build_kernels.py [--target aarch64-linux | ... | all] [--folder FOLDER] [--list]

The compiler is clang, from the package `ziglang`; it needs nothing of the machine and compiles for every target. The
build hook of the wheel (hatch_build.py) calls `build` too, so that this file is the one place for flags and targets.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "kernels"
PACKAGE = ROOT / "src" / "regard" / "engine" / "kernel"
#: Sources that are compiled once; every other file of kernels/ is compiled for each variant, with its name as VARIANT.
COMPILED_ONCE = ("dispatch.c", "memory.c", "team.c")
#: Runs the kernels in a process of its own, for tests; it is no part of the library.
HARNESS = "harness.c"
#: A level of x86-64 as zig spells it. dispatch.c tests every feature of these levels.
X86_VARIANTS = {
    "baseline": "x86_64",
    "avx2": "x86_64_v3",
    "avx512": "x86_64_v4",
    "avx512bf16": "x86_64_v4+avx512bf16",
}
#: The sources of a variant that has some functions of its own; the others are those of the variant before it.
OWN_SOURCES = {"avx512bf16": ("decode.c",)}
#: The whole registers: by default clang uses the lower half of them.
WIDE = ("-mprefer-vector-width=512",)
VARIANT_FLAGS = {"avx512": WIDE, "avx512bf16": WIDE}
FLAGS = (
    *("-std=c11", "-O3", "-Wall", "-Wextra"),
    # No -ffast-math: NaN and infinities keep their meaning. A product and a sum may become one instruction.
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-sanitize=all"),
    # No C library, and no names visible but those that are marked.
    *("-ffreestanding", "-fPIC", "-fvisibility=hidden"),
)
#: Flags of the harness, for any compiler.
HARNESS_FLAGS = ("-std=c11", "-ffp-contract=fast", "-fno-math-errno")


@dataclass(frozen=True)
class Target:
    """A system to compile for: its name for zig, its variants, the name of the library and the tag of the wheel."""

    triple: str
    variants: dict[str, str]
    library: str
    wheel_tag: str
    link_flags: tuple[str, ...] = ()


#: A function that nothing defines is an error when the library is linked, not when it is loaded.
ALL_DEFINED = ("-Wl,-z,defs",)
#: Otherwise the library would have the name of the folder where it was linked.
MACOS_NAME = ("-Wl,-install_name,@rpath/libregard.dylib",)
#: On Linux the library calls no function of a C library, so it asks for no version of glibc and runs beside musl too.
#: What auditwheel would check is then only the format of the file: GNU_HASH is read by glibc since 2.5 and by musl
#: since 0.9.2. The tags are manylinux2014 and the oldest of musl.
#: On macOS every library has to name libSystem, which is part of the system; zig adds it.
TARGETS = {
    "x86_64-linux": Target(
        "x86_64-linux-none",
        X86_VARIANTS,
        "libregard.so",
        "manylinux_2_17_x86_64.musllinux_1_1_x86_64",
        ALL_DEFINED,
    ),
    "aarch64-linux": Target(
        "aarch64-linux-none",
        {"baseline": "generic"},
        "libregard.so",
        "manylinux_2_17_aarch64.musllinux_1_1_aarch64",
        ALL_DEFINED,
    ),
    "x86_64-macos": Target("x86_64-macos.11.0-none", X86_VARIANTS, "libregard.dylib", "macosx_11_0_x86_64", MACOS_NAME),
    "aarch64-macos": Target(
        "aarch64-macos.11.0-none", {"baseline": "apple_m1"}, "libregard.dylib", "macosx_11_0_arm64", MACOS_NAME
    ),
    "x86_64-windows": Target("x86_64-windows-gnu", X86_VARIANTS, "libregard.dll", "win_amd64"),
}


class BuildError(Exception):
    """The library cannot be built here; the message says why."""


def this_machine() -> str:
    """The name of the target that runs this Python. A 32-bit Python on a 64-bit machine has none."""
    systems = {"linux": "linux", "darwin": "macos", "win32": "windows"}
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    name = f"{machine}-{systems.get(sys.platform, sys.platform)}"
    if name not in TARGETS or sys.maxsize < 2**32 or sysconfig.get_platform() == "win-arm64":
        raise BuildError(f"the kernels are not written for this machine ({sysconfig.get_platform()})")
    return name


def folder_of(name: str) -> Path:
    """Where the library of a wheel for this target is built."""
    return ROOT / "build" / "kernels" / name


def compiler() -> list[str]:
    """The command of the compiler."""
    if find_spec("ziglang") is None:
        raise BuildError(f"the compiler is not installed: {sys.executable} -m pip install ziglang")
    return [sys.executable, "-m", "ziglang", "cc"]


def _run(command: list[str], caches: Path) -> None:
    settings = {name: os.environ.get(name, str(caches)) for name in ("ZIG_LOCAL_CACHE_DIR", "ZIG_GLOBAL_CACHE_DIR")}
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    print(done.stderr, end="", file=sys.stderr)  # warnings


def build(name: str, folder: Path) -> Path:
    """Compile the library for a target into a folder; returns its path. Raises BuildError."""
    target, command = TARGETS[name], compiler()
    flags = [*command, "-target", target.triple, *FLAGS]
    with tempfile.TemporaryDirectory() as scratch:
        caches, objects = Path(scratch), []
        for source, variant in _compilations(target):
            objects.append(str(caches / f"{source.stem}_{variant}.o"))
            naming = [f"-mcpu={target.variants[variant]}", f"-DVARIANT={variant}", *VARIANT_FLAGS.get(variant, ())]
            _run([*flags, *naming, "-c", str(source), "-o", objects[-1]], caches)
        linked = caches / target.library
        _run([*flags, "-nostdlib", "-shared", "-s", *target.link_flags, *objects, "-o", str(linked)], caches)
        return _replaced(folder / target.library, linked)


def _compilations(target: Target) -> list[tuple[Path, str]]:
    """Each source with each variant that it is compiled for."""
    sources = sorted(source for source in SOURCES.glob("*.c") if source.name != HARNESS)
    return [
        (source, variant)
        for source in sources
        for variant in (["baseline"] if source.name in COMPILED_ONCE else target.variants)
        if source.name in OWN_SOURCES.get(variant, (source.name,))
    ]


def _replaced(library: Path, linked: Path) -> Path:
    """Put the new library in place at once: a process that has loaded the old one keeps it."""
    library.parent.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_name(f"{library.name}.new")
    unfinished.write_bytes(linked.read_bytes())
    unfinished.replace(library)
    return library


def build_harness(command: list[str], path: Path) -> Path:
    """Compile all kernels, in their baseline, and harness.c with a compiler and its flags; returns the program."""
    with tempfile.TemporaryDirectory() as caches:
        sources = [str(source) for source in sorted(SOURCES.glob("*.c"))]
        _run([*command, *HARNESS_FLAGS, "-DVARIANT=baseline", *sources, "-o", str(path)], Path(caches))
    return path


def emulated_compiler() -> list[str]:
    """A compiler of programs for AArch64 Linux that need no C library; the flags are those of the library."""
    target = TARGETS["aarch64-linux"]
    return [
        *compiler(),
        "-target",
        target.triple,
        f"-mcpu={target.variants['baseline']}",
        *FLAGS,
        "-nostdlib",
        "-static",
    ]


def is_current(library: Path) -> bool:
    """Whether a library is newer than every file that it is made of."""
    files = [Path(__file__), *SOURCES.iterdir()]
    return library.exists() and library.stat().st_mtime > max(file.stat().st_mtime for file in files)


def main() -> int:
    """Build what the arguments name; returns whether something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=[*TARGETS, "all"], help="another system (this machine)")
    parser.add_argument("--folder", type=Path, help="where to (the package; for other systems build/kernels/TARGET)")
    parser.add_argument("--list", action="store_true", help="print the names of all targets, and stop")
    options = parser.parse_args()
    if options.list:
        print(*TARGETS)
        return 0
    try:
        own = this_machine()
        if options.target is None and options.folder is None and is_current(PACKAGE / TARGETS[own].library):
            print("The kernels are up to date.")
            return 0
        for name in TARGETS if options.target == "all" else [options.target or own]:
            default = PACKAGE if options.target is None else folder_of(name)
            print(build(name, options.folder / name if options.folder else default))
    except BuildError as error:
        print(f"The kernels were not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
