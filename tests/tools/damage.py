"""Data of JSON with one part changed, as damaged files and other programs have it."""

import json

#: In place of a value: the part is taken out.
DELETED = object()


def parts(tree, path=()):
    """The path to each part of the data, but the whole."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*path, key)
        yield from parts(value, (*path, key))


def changed(tree, path, value):
    """A copy of the data with a value in place of the part at a path."""
    tree = json.loads(json.dumps(tree))
    *before, last = path
    part = tree
    for key in before:
        part = part[key]
    if value is DELETED:
        del part[last]
    else:
        part[last] = value
    return tree
