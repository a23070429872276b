"""Models on `attn_implementation="regard"`, where the transformers that is installed can have it."""

from __future__ import annotations

import pytest

import regard as rg
from extras import is_missing, is_newer
from regard.base.errors import RegardError

try:
    rg.register()
    REFUSAL = ""
except RegardError as error:
    if not is_missing(error) and not is_newer(error):
        raise
    REFUSAL = str(error)

#: The backend, if it is there: what tests compare beside the backends of transformers.
OURS = () if REFUSAL else ("regard",)


def needs_register() -> None:
    """Skip the test, or the file of tests that calls this at its top, where `register` needs a newer transformers."""
    if REFUSAL:
        pytest.skip(REFUSAL, allow_module_level=True)
