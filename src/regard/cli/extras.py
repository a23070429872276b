"""The extra of each command, which the errors about missing packages name."""

from __future__ import annotations

#: The extra with all packages of a command. `see` has `demo`, because its default model is MiniLM.
EXTRAS = {
    **dict.fromkeys(("list", "show", "explain", "check"), "cli"),
    **dict.fromkeys(("demo", "see"), "demo"),
    **dict.fromkeys(("data", "train", "translate", "align", "evaluate", "compare"), "lab"),
    "view": "view",
    "bench": "bench",
}
