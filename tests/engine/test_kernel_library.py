"""The library of the compiled kernels: how it is built, packed, found, and what is said where it cannot run."""

from __future__ import annotations

import _ctypes
import ctypes
import platform
import re
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.tags import parse_tag, sys_tags

import build_kernels
import regard as rg
from build_hooks import hatch_build
from regard.engine.kernel import library

ROOT = Path(__file__).parents[2]
built = pytest.mark.skipif(not library.PATH.exists(), reason="the kernels were not built; `make kernels` builds them")


@pytest.fixture(autouse=True)
def no_setting(monkeypatch):
    caches = library._chosen, library._opened
    for cache in caches:
        cache.cache_clear()
    monkeypatch.delenv("REGARD_KERNEL", raising=False)
    yield
    for cache in caches:
        cache.cache_clear()


def processor_with_level(level, monkeypatch):
    monkeypatch.setattr(library, "_opened", lambda path: SimpleNamespace(regard_level=lambda: level))


def dynamic_entries(path):
    """The (tag, value) pairs of the dynamic section of an ELF file of 64 bits (System V ABI, chapters 4 and 5)."""
    data = path.read_bytes()
    start, size, count = *struct.unpack_from("<Q", data, 32), *struct.unpack_from("<HH", data, 54)
    headers = [struct.unpack_from("<IIQQQQ", data, start + n * size) for n in range(count)]
    _, _, offset, _, _, length = next(header for header in headers if header[0] == 2)  # PT_DYNAMIC
    return [struct.unpack_from("<qQ", data, offset + n) for n in range(0, length, 16)]


@built
def test_the_library_is_loaded_at_the_highest_level():
    found = library.load()
    assert found is not None and library.reason() == ""
    assert found.level_name == library.LEVELS[found.level]
    assert library.load() is found


@built
@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="the system does not list the features of the processor")
def test_the_level_is_the_one_that_the_system_reports():
    flags = set(re.search(r"^(?:flags|Features)\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.M)[1].split())
    level = 0
    if {"avx2", "fma", "bmi2", "f16c", "abm", "movbe", "popcnt", "cx16", "lahf_lm"} <= flags:
        level = 1
        if {"avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl"} <= flags:
            level = 3 if "avx512_bf16" in flags else 2
    assert library.load().level == level


#: Features of AVX2's level, each of which a processor may lack. SSE4.1 and BMI1 are not in the list: without one
#: of them the C library fails on a processor that has AVX2.
LACKING = ("avx2", "fma", "f16c", "bmi2", "abm", "movbe", "popcnt", "sse3", "ssse3", "cx16", "xsave")
#: Processors that qemu emulates -> their level.
PROCESSORS = {"qemu64": 0, "Nehalem": 0, "SandyBridge": 0, "Haswell": 1} | {f"Haswell,-{name}": 0 for name in LACKING}


@built
@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="emulates x86-64 on Linux")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_an_emulated_processor_has_its_level(processor):
    if shutil.which("qemu-x86_64") is None:
        pytest.skip("qemu-x86_64 is not installed: apt-get install qemu-user")
    code = f"import ctypes; print(ctypes.CDLL({str(library.PATH)!r}).regard_level())"
    command = ["qemu-x86_64", "-cpu", processor, str(Path(sys.executable).resolve()), "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == -signal.SIGILL:
        pytest.skip("this Python itself does not run on that processor")
    assert int(done.stdout) == PROCESSORS[processor]


@built
def test_the_setting_lowers_the_level(monkeypatch):
    highest = library.load().level
    for level, name in enumerate(library.LEVELS[: highest + 1]):
        monkeypatch.setenv("REGARD_KERNEL", name)
        assert (library.load().level, library.load().level_name) == (level, name)


@built
def test_functions_of_the_level_are_found_and_others_are_not():
    found = library.load()
    with pytest.raises(AttributeError, match=f"regard_dance_{found.vectors}"):
        found.function("dance")


def test_a_function_has_the_suffix_of_its_level(monkeypatch):
    for level, name in enumerate(library.LEVELS):
        functions = SimpleNamespace(**{f"regard_forward_{name}": name})
        assert library.Library(functions, level).function("forward") == name


def test_a_level_without_a_function_of_its_own_has_that_of_its_vectors():
    functions = SimpleNamespace(
        regard_forward_avx512="forward", regard_decode_avx512="wide", regard_decode_avx512bf16="own"
    )
    found = library.Library(functions, 3)
    assert [found.function(name) for name in ("forward", "decode")] == ["forward", "own"]
    assert found.has("forward") and not found.has("dance")


def test_a_level_that_the_processor_lacks_is_refused(monkeypatch):
    processor_with_level(1, monkeypatch)
    assert library.load().level_name == "avx2"
    monkeypatch.setenv("REGARD_KERNEL", "avx512")
    for ask in (library.load, library.reason):
        with pytest.raises(rg.RegardError, match=r"cannot run that variant of the kernels\. Its highest is avx2"):
            ask()


def test_a_setting_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("REGARD_KERNEL", "avx51")
    with pytest.raises(rg.RegardError, match=r"REGARD_KERNEL=avx51: no such setting\. Did you mean 'avx512'"):
        library.load()


def test_off_turns_the_kernels_off(monkeypatch):
    processor_with_level(2, monkeypatch)
    monkeypatch.setenv("REGARD_KERNEL", "off")
    assert library.load() is None and library.reason() == "REGARD_KERNEL=off turns the compiled kernels off."


def test_without_the_file_the_reason_says_how_to_build_it(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "PATH", tmp_path / "libregard.so")
    assert library.load() is None
    assert re.search(r"was not built \(libregard.so is missing\). Run `make kernels`", library.reason())


@pytest.mark.parametrize("setting", ["", "baseline", "avx512"])
def test_a_file_for_another_system_is_not_loaded(monkeypatch, tmp_path, setting):
    monkeypatch.setenv("REGARD_KERNEL", setting)
    monkeypatch.setattr(library, "PATH", tmp_path / "libregard.so")
    library.PATH.write_bytes(b"MZ, a library for another system")
    assert library.load() is None
    assert "cannot be loaded here" in library.reason() and "make kernels" in library.reason()


def test_a_library_without_a_version_is_not_loaded(monkeypatch):
    monkeypatch.setattr(library, "PATH", Path(_ctypes.__file__))
    assert library.load() is None and "regard_version" in library.reason()


@built
def test_a_library_of_another_version_is_not_loaded(monkeypatch):
    monkeypatch.setattr(library, "VERSION", library.VERSION + 1)
    assert library.load() is None
    versions = f"has version {library.VERSION - 1}, and this Regard needs version {library.VERSION}"
    assert versions in library.reason() and "make kernels" in library.reason()


def test_sources_and_loader_name_the_same_version():
    header = (ROOT / "kernels" / "regard.h").read_text()
    assert int(re.search(r"#define INTERFACE_VERSION (\d+)", header)[1]) == library.VERSION


@built
def test_the_library_was_built_from_the_sources_of_today():
    assert build_kernels.is_current(library.PATH), "a file of kernels/ has changed: run make kernels"


@built
@pytest.mark.skipif(sys.platform != "linux", reason="the format of Linux")
def test_the_library_needs_no_other():
    entries = dynamic_entries(library.PATH)
    assert entries and not [value for tag, value in entries if tag == 1]  # DT_NEEDED


@built
@pytest.mark.skipif(not shutil.which("readelf") or sys.platform != "linux", reason="readelf is not installed")
def test_every_variant_has_the_same_functions_and_nothing_else_is_visible():
    listed = subprocess.run(["readelf", "-W", "--dyn-syms", library.PATH], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in listed.stdout.splitlines() if re.match(r" +[1-9]\d*:", line)}
    once = {"regard_level", "regard_version", "regard_run_member"}
    assert names >= once and all(name.startswith("regard_") for name in names)
    functions = {name.rpartition("_")[::2] for name in names - once}
    variants = build_kernels.TARGETS[build_kernels.this_machine()].variants
    own = {source.removesuffix(".c") for source in build_kernels.OWN_SOURCES["avx512bf16"]}
    assert functions == {
        (name, variant)
        for name, _ in functions
        for variant in variants
        if variant in library.VECTORS or name.removeprefix("regard_").startswith(tuple(own))
    }


def test_only_the_folder_of_the_package_is_searched(monkeypatch):
    paths = []
    monkeypatch.setattr(ctypes, "CDLL", lambda path: paths.append(path) or SimpleNamespace(regard_version=lambda: -1))
    monkeypatch.setattr(library.Path, "exists", lambda path: True)
    assert library.load() is None
    assert paths == [str(Path(library.__file__).parent / library.PATH.name)] and Path(paths[0]).is_absolute()


@pytest.mark.parametrize("name", build_kernels.TARGETS)
def test_a_target_names_the_file_that_its_system_loads(name):
    suffix = {"linux": ".so", "macos": ".dylib", "windows": ".dll"}[name.partition("-")[2]]
    target = build_kernels.TARGETS[name]
    assert target.library == f"libregard{suffix}"
    assert set(target.variants) == set(library.LEVELS if name.startswith("x86_64") else library.LEVELS[:1])


def own_target():
    try:
        return build_kernels.this_machine()
    except build_kernels.BuildError as error:
        pytest.skip(str(error))


def test_pip_installs_the_wheel_of_this_machine():
    name = own_target()
    if build_kernels.TARGETS[name].library == library.PATH.name:
        assert parse_tag(f"py3-none-{build_kernels.TARGETS[name].wheel_tag}") & set(sys_tags())
    others = [target for other, target in build_kernels.TARGETS.items() if other != name]
    for target in others:
        assert not parse_tag(f"py3-none-{target.wheel_tag}") & set(sys_tags())


@pytest.mark.parametrize("machine", ["riscv64", "i686"])
def test_another_processor_has_no_target(monkeypatch, machine):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(build_kernels.BuildError, match="not written for this machine"):
        build_kernels.this_machine()


def test_without_the_compiler_the_remedy_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(build_kernels, "find_spec", lambda name: None)
    with pytest.raises(build_kernels.BuildError, match="-m pip install ziglang"):
        build_kernels.build("aarch64-linux", tmp_path)


@pytest.fixture
def hook(monkeypatch):
    """The build hook and what its build script is asked for."""
    module = hatch_build()
    monkeypatch.delenv("REGARD_TARGET", raising=False)
    monkeypatch.setattr(module, "build_script", lambda root: build_kernels)
    hook = module.KernelHook()
    hook.root, hook.warnings = str(ROOT), []
    hook.app = SimpleNamespace(display_warning=hook.warnings.append)
    return hook


def packed(hook, version="standard"):
    """What the hook changes in the data of a wheel, and what it warns of."""
    data = {"force_include": {}, "pure_python": True}
    hook.initialize(version, data)
    return data


def test_the_wheel_has_the_library_and_the_tag_of_its_system(hook, monkeypatch):
    monkeypatch.setattr(build_kernels, "build", lambda name, folder: folder / build_kernels.TARGETS[name].library)
    monkeypatch.setenv("REGARD_TARGET", "aarch64-macos")
    data = packed(hook)
    assert list(data["force_include"].values()) == ["regard/engine/kernel/libregard.dylib"]
    assert data["tag"] == "py3-none-macosx_11_0_arm64" and not data["pure_python"] and not hook.warnings


def test_an_editable_installation_has_the_library_beside_its_loader(hook, monkeypatch):
    folders = []
    monkeypatch.setattr(build_kernels, "build", lambda name, folder: folders.append(folder))
    monkeypatch.setattr(build_kernels, "this_machine", lambda: "x86_64-linux")
    assert packed(hook, "editable") == {"force_include": {}, "pure_python": True}
    assert folders == [library.PATH.parent]


@pytest.mark.parametrize("version", ["standard", "editable"])
def test_a_build_that_fails_gives_a_wheel_without_the_library(hook, monkeypatch, version):
    monkeypatch.setattr(build_kernels, "this_machine", lambda: "x86_64-linux")
    monkeypatch.setattr(build_kernels, "find_spec", lambda name: None)
    assert packed(hook, version) == {"force_include": {}, "pure_python": True}
    (warning,) = hook.warnings
    assert "built without its compiled kernels" in warning and "pip install ziglang" in warning
    monkeypatch.setenv("REGARD_TARGET", "x86_64-windows")  # somebody asked for this system, so its wheel must have them
    with pytest.raises(build_kernels.BuildError):
        packed(hook)


def test_the_compiler_is_required_only_where_it_is_used(hook, monkeypatch):
    monkeypatch.setattr(build_kernels, "this_machine", lambda: "x86_64-linux")
    (requirement,) = hook.dependencies()
    assert requirement.startswith("ziglang")
    monkeypatch.setenv("REGARD_KERNEL", "off")
    assert hook.dependencies() == [] and packed(hook) == {"force_include": {}, "pure_python": True}
    monkeypatch.delenv("REGARD_KERNEL")
    monkeypatch.undo()
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert hook.dependencies() == []


@pytest.mark.example
@pytest.mark.parametrize("name", build_kernels.TARGETS)
def test_one_machine_compiles_for_every_system(name, tmp_path):
    pytest.importorskip("ziglang", reason="the compiler is not installed; `make kernels` installs it")
    path = build_kernels.build(name, tmp_path)
    formats = {"linux": b"\x7fELF", "macos": b"\xcf\xfa\xed\xfe", "windows": b"MZ"}
    assert path.read_bytes().startswith(formats[name.partition("-")[2]])
    if name.endswith("linux"):
        assert not [value for tag, value in dynamic_entries(path) if tag == 1]


def test_one_sentence_says_which_variant_runs(monkeypatch):
    monkeypatch.setenv("REGARD_KERNEL", "off")
    assert library.described() == "No compiled kernel ran. REGARD_KERNEL=off turns the compiled kernels off."
    monkeypatch.delenv("REGARD_KERNEL")
    processor_with_level(1, monkeypatch)
    assert library.described() == "Compiled kernels ran: avx2."
