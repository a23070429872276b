"""The extra of each command, which the errors about missing packages name."""

from __future__ import annotations

#: The one extra that has all a command needs; `demo` has MiniLM, which `see` reads unless told otherwise.
EXTRAS = {
    **dict.fromkeys(("list", "show", "explain", "check"), "cli"),
    **dict.fromkeys(("demo", "see"), "demo"),
    **dict.fromkeys(("data", "train", "translate", "align", "evaluate", "compare"), "lab"),
    "view": "view",
    "bench": "bench",
}
