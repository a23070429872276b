"""Empty libraries in the place of CUDA's, so that a CUDA build of torch can be imported on a machine without them.

`python scripts/cuda_stubs.py FOLDER_WITH_TORCH OUT` writes one library for each that torch needs and nothing provides.
Every function of it returns 100, which CUDA calls "no device". Linux; needs gcc and binutils.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

PREFIXES = ("cu", "nv", "nccl", "pnccl", "__cuda", "__nv", "Cupti")
OF_CUDA = ("libcu", "libnv", "libnccl")
#: Which library has the functions without a version, by the beginning of their names; all others are libcuda's.
HOMES = {"cusparseLt": "libcusparseLt", "nccl": "libnccl", "pnccl": "libnccl", "cuFile": "libcufile"} | {
    name: f"lib{name}" for name in ("curand", "cudnn", "cupti")
}


def lines(*command: str) -> list[list[str]]:
    """What a command prints, as words."""
    return [line.split() for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines()]


def is_provided(name: str) -> bool:
    """Whether the system has the library."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def definition(function: str) -> str:
    """A function of CUDA in C: it finds no device, says so in words, and no stream is being captured."""
    if "GetErrorString" in function or "GetErrorName" in function:
        return f'const char *{function}(void) {{ return "no device"; }}'
    if function.startswith("cudaStreamIsCapturing"):
        return f"int {function}(void *stream, int *status) {{ *status = 0; return 0; }}"
    return f"int {function}(void) {{ return 100; }}"


def write(site: Path, out: Path) -> None:
    """Write the libraries that torch in `site` lacks to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    libraries = [*(site / "torch" / "lib").glob("*.so*"), *(site / "torch").glob("_C*.so")]
    needed: set[str] = set()
    undefined: dict[str, str] = {}
    defined: set[str] = set()
    for library in map(str, libraries):
        needed |= {words[-1].strip("[]") for words in lines("readelf", "-d", library) if "(NEEDED)" in words}
        for words in lines("nm", "-D", "--undefined-only", library):
            name, _, version = words[-1].partition("@")
            if words[0] == "U":
                undefined[name] = version.lstrip("@") or undefined.get(name, "")
        defined |= {words[-1].partition("@")[0] for words in lines("nm", "-D", "--defined-only", library)}
    missing = [
        name
        for name in sorted(needed - {path.name for path in libraries})
        if name.startswith(OF_CUDA) or not is_provided(name)
    ]
    functions, versions = defaultdict(list), {}
    for name, version in undefined.items():
        is_cuda = name.startswith(PREFIXES) or (name.startswith("_Z") and "nvshmem" in name)
        if name in defined or not is_cuda or version.startswith(("GLIBC", "CXXABI")):
            continue
        start = next((home for prefix, home in HOMES.items() if name.startswith(prefix)), "libcuda.so")
        start = "libnvshmem" if "nvshmem" in name else start
        home = version if version in missing else next((one for one in missing if one.startswith(start)), missing[0])
        functions[home].append(name)
        if version:
            versions[home] = version
    for number, name in enumerate(missing):
        code = [f"int stub_{number};", *map(definition, functions[name])]
        (out / f"{name}.c").write_text("\n".join(code) + "\n")
        options = []
        if name in versions:
            (out / f"{name}.map").write_text(f"{versions[name]} {{ global: *; }};\n")
            options = [f"-Wl,--version-script={out / name}.map"]
        gcc = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}", *options]
        subprocess.run([*gcc, "-o", str(out / name), str(out / f"{name}.c")], check=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
