"""Every mechanism of the catalogue has an independent oracle; they live in test_oracles_*.py."""

from importlib import import_module
from pathlib import Path

from oracles import ORACLES
from regard.catalog import mechanisms


def test_every_mechanism_has_an_oracle():
    for path in Path(__file__).parent.glob("test_oracles_*.py"):
        import_module(path.stem)
    assert set(ORACLES) == set(mechanisms())
