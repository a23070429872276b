"""Which files ask for the class of a piece that another file defines: a list that may only become shorter.

A new normalizer, mask or score must not need a change in such a file: what others need to know of a piece, it says by
itself.
"""

from __future__ import annotations

import ast
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


def classes_and_names(path: Path) -> tuple[dict[str, set[str]], set[str]]:
    """The bases of each class that a file defines, and the names that it asks for. (All trees together are large.)"""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    places = [node for each in nodes for place in asked_in(each) for node in ast.walk(place)]
    named = {name_of(node) for node in places if isinstance(node, ast.Name | ast.Attribute)}
    return {n.name: {*map(name_of, n.bases)} for n in nodes if isinstance(n, ast.ClassDef)}, named


def pieces_of(classes: dict[Path, dict[str, set[str]]]) -> dict[str, Path]:
    """Each class of a piece, and the file that defines it."""
    known = dict.fromkeys(ROOTS, Path())
    every = [(name, bases, path) for path, defined in classes.items() for name, bases in defined.items()]
    for _ in every:  # a class may stand before its base
        new = {name: path for name, bases, path in every if name not in known and bases & known.keys()}
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
    files = sorted(path for path in SOURCE.rglob("*.py") if "lab" not in path.parts)
    parsed = {path: classes_and_names(path) for path in files}
    own = pieces_of({path: classes for path, (classes, _) in parsed.items()})
    assert len(own) > 60
    found = {}
    for path, (_, named) in parsed.items():
        if asked := {name for name in named & own.keys() if own[name] != path}:
            found[path.relative_to(SOURCE).as_posix()] = " ".join(sorted(asked))
    assert found == ASKED, "what others need to know of a piece, the piece says by itself"
