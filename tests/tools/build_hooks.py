"""hatch_build.py, for tests that need no hatchling."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

ROOT = Path(__file__).parents[2]


def hatch_build() -> ModuleType:
    """The module, beside stand-ins for what it takes from hatchling."""
    builders = ModuleType("hatchling.builders.hooks.plugin.interface")
    builders.BuildHookInterface = type("BuildHookInterface", (), {})
    metadata = ModuleType("hatchling.metadata.plugin.interface")
    metadata.MetadataHookInterface = type("MetadataHookInterface", (), {})
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {stand_in.__name__: stand_in for stand_in in (builders, metadata)}):
        spec.loader.exec_module(module)
    return module
