"""Which files ask for the class of a piece that another file defines: a list that may only become shorter.

A new normalizer, mask or score must not need a change in such a file: what others need to know of a piece, it says by
itself.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import regard

SOURCE = Path(regard.__file__).parent
ROOTS = {"Score", "Bias", "Mask", "Normalizer", "Encoding", "Selection", "Transition"}
#: File -> the classes of pieces that it asks for. Take out what is gone; add nothing.
ASKED = {
    "call_options.py": "Dot",
    "engine/gpu/statistics.py": "mask_mod",
    "engine/kernel/engine.py": "TanhScore",
    "engine/ring/choosing.py": "chosen_keys",
    "hf/capture/module_rerun.py": "mask_tensor",
    "hf/heads/pruning.py": "Bilinear",
    "hf/masks/graph_masks.py": "window",
    "maps/combined_map.py": "GroupMask",
    "nn/embedding.py": "RoPE Sinusoidal",
    "nn/latent.py": "LatentDot",
    "nn/attention_roles.py": "Dot RoPE",
    "reference/biases.py": "Taps TokenShift",
    "stats/profile.py": "Dot",
}


def name_of(node: ast.expr) -> str:
    """`Score` of `Score`, `pieces.Score` and `Score[int]`."""
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def trees() -> dict[Path, ast.Module]:
    files = sorted(SOURCE.rglob("*.py"))
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in files if "lab" not in path.parts}


def pieces_of(parsed: dict[Path, ast.Module]) -> dict[str, Path]:
    """Each class of a piece, and the file that defines it."""
    classes = [(n, path) for path, tree in parsed.items() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    known = dict.fromkeys(ROOTS, Path())
    for _ in classes:  # a class may stand before its base
        new = {n.name: path for n, path in classes if n.name not in known and {*map(name_of, n.bases)} & known.keys()}
        if not new:
            break
        known |= new
    return {name: path for name, path in known.items() if name not in ROOTS}


def asked_in(node: ast.AST) -> list[ast.AST]:
    """The expressions of a node that name classes to compare with."""
    match node:
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, classes]):
            return [classes]
        case ast.MatchClass(cls=cls):
            return [cls]
        case ast.Compare(left=left, comparators=others):
            sides = [left, *others]
            of_type = any(isinstance(side, ast.Call) and name_of(side.func) == "type" for side in sides)
            return [side for side in sides if of_type and not isinstance(side, ast.Call)]
        case ast.Dict(keys=keys):
            return [key for key in keys if key is not None]
    return []


def test_no_other_file_asks_for_the_class_of_a_piece():
    parsed, asked = trees(), defaultdict(set)
    own = pieces_of(parsed)
    assert len(own) > 60
    for path, tree in parsed.items():
        for place in (place for node in ast.walk(tree) for place in asked_in(node)):
            named = {name_of(node) for node in ast.walk(place) if isinstance(node, ast.Name | ast.Attribute)}
            asked[path.relative_to(SOURCE).as_posix()] |= {name for name in named & own.keys() if own[name] != path}
    found = {file: " ".join(sorted(names)) for file, names in asked.items() if names}
    assert found == ASKED, "what others need to know of a piece, the piece says by itself"
