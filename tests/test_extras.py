"""Tests are skipped for packages that are missing, and for nothing else."""

from __future__ import annotations

import pytest

from extras import asked_for, is_missing
from regard.errors import RegardError


def test_only_a_missing_package_is_a_reason_to_skip(monkeypatch):
    monkeypatch.setattr("extras.not_installed", lambda: frozenset({"matplotlib"}))
    assert is_missing(RegardError("figures: matplotlib is not installed. pip install 'regard[demo]'"))
    assert not is_missing(
        RegardError("watch: transformers 5.0.0 has another interface; pip install 'transformers>=5.23'")
    )
    assert not is_missing(RegardError("attend: q has 3 heads"))
    assert is_missing(ModuleNotFoundError("", name="nowhere.inner"))
    assert not is_missing(ModuleNotFoundError("", name="regard.inner"))


@pytest.mark.parametrize(
    ("message", "distribution"),
    [("pip install 'regard[hf,lab]'", "transformers"), ("pip install zstandard. Or", "zstandard")],
)
def test_what_a_message_says_to_install(message, distribution):
    assert distribution in asked_for(message)
