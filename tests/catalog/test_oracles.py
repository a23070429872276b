"""Every mechanism of the catalog has an independent oracle; they live in test_oracles_*.py."""

from importlib import import_module
from pathlib import Path

import numpy as np
import torch

from oracles import ORACLES
from regard.catalog import mechanisms
from regard.reference.basics import array


def test_every_mechanism_has_an_oracle():
    for path in Path(__file__).parent.glob("test_oracles_*.py"):
        import_module(path.stem)
    without = sorted(set(mechanisms()) - set(ORACLES))
    assert not without, (
        f'write a function with @oracle("NAME") in a tests/catalog/test_oracles_*.py for each of {without}'
    )
    assert set(ORACLES) == set(mechanisms())


def test_the_reference_computes_in_float64_whatever_it_is_given():
    for given in (
        [1, 2],
        (0.5, 2),
        torch.ones(2),
        torch.ones(2, dtype=torch.bfloat16),
        torch.arange(2),
        np.ones(2, "f"),
    ):
        assert array(given).dtype == np.float64
