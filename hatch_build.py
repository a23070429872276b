"""The build hooks: README.md as the description of the package, and the compiled kernels of the wheel.

Where kernels/ cannot be compiled, the wheel is made without them, and says why.

REGARD_TARGET names another system to compile for (`make wheels`). REGARD_KERNEL=off leaves the kernels out, and then
the compiler is not fetched either.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

#: Code, which stays as it is; or a link or an image of Markdown that leads to a file of the repository.
CODE_OR_RELATIVE = re.compile(
    r"(?P<ticks>`+).+?(?P=ticks)(?!`)"
    r"|(?P<image>!?)\[(?P<text>(?:!?\[[^\]]*\]\([^)]*\)|[^\[\]])*)\]\((?!\w+:|#)(?P<path>[^\s()]+)[^()]*\)",
    re.DOTALL,
)
#: clang as a package: with it, a machine without a compiler builds the kernels too.
COMPILER = "ziglang>=0.17"
INSIDE_WHEEL = "regard/engine/kernel"


def build_script(root: str) -> ModuleType:
    """scripts/build_kernels.py as a module."""
    spec = importlib.util.spec_from_file_location("build_kernels", Path(root) / "scripts" / "build_kernels.py")
    assert spec and spec.loader
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def described(text: str, repository: str) -> str:
    """A page for readers outside of the repository: links lead to its address, or without one are text."""

    def replaced(found: re.Match[str]) -> str:
        if found["ticks"]:
            return found[0]
        text = CODE_OR_RELATIVE.sub(replaced, found["text"])
        if not repository:
            return "" if found["image"] else text
        return f"{found['image']}[{text}]({repository}/{'raw' if found['image'] else 'blob'}/HEAD/{found['path']})"

    return CODE_OR_RELATIVE.sub(replaced, text)


class DescriptionHook(MetadataHookInterface):
    """Fills in the description and the addresses of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """The addresses stand in pyproject.toml, and those that are empty are left out."""
        addresses = self.config["addresses"]
        text = described((Path(self.root) / "README.md").read_text(encoding="utf-8"), addresses["Repository"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {name: address for name, address in addresses.items() if address}


class KernelHook(BuildHookInterface):
    """Adds the library to the wheel, with the tag of its system; an editable installation has it in its source tree."""

    def dependencies(self) -> list[str]:
        """The compiler, unless this machine or its user builds no kernels."""
        script = build_script(self.root)
        try:
            self._target(script)
        except script.BuildError:
            return []
        return [COMPILER]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the library before the files of the wheel are collected."""
        script = build_script(self.root)
        try:
            name = self._target(script)
            library = script.build(name, script.PACKAGE if version == "editable" else script.folder_of(name))
        except (script.BuildError, OSError) as error:
            if "REGARD_TARGET" in os.environ:
                raise
            self.app.display_warning(f"Regard is built without its compiled kernels, and works without them: {error}")
            return
        if version != "editable":
            build_data["force_include"][str(library)] = f"{INSIDE_WHEEL}/{library.name}"
            build_data["tag"] = f"py3-none-{script.TARGETS[name].wheel_tag}"
            build_data["pure_python"] = False

    def _target(self, script: ModuleType) -> str:
        if os.environ.get("REGARD_KERNEL") == "off":
            raise script.BuildError("REGARD_KERNEL=off")
        return os.environ.get("REGARD_TARGET") or script.this_machine()
