"""Which mechanisms of the catalogue are one `Attention`, with pieces and engines; the others are composites."""

from __future__ import annotations

import regard as rg
from regard.catalog import mechanisms

COMPOSITES = sorted(name for name, entry in mechanisms().items() if isinstance(entry.example()[0], rg.Composite))
#: Mechanisms with one score, one mask and one normaliser.
SINGLE = sorted(set(mechanisms()) - set(COMPOSITES))
