"""The definition of attention: every piece in NumPy, float64, dense, one head at a time. Read it first, in this order:

    attention.py      one head: encode q and k, compare, shift, mask, normalize, multiply with the values
    scores.py         `compare`: how a query is compared with a key (`vectors` and `features`: what it multiplies)
    masks.py          `attends`: which query may attend to which key
    positions.py      `encode`, `encode_heads`: what positions do to queries and keys
    biases.py         `shift`: what is added to scores
    normalizers.py    `normalize`: how scores become weights
    transitions.py    `transit`: what a token does to the memory of a recurrent layer
    basics.py         arrays, and the place of a tile

This room is the specification. It reads the fields of the pieces and computes all else in its own way: masks are
evaluated pair by pair from positions, bisection finds thresholds, RoPE is a product of complex numbers, slopes and
buckets follow the formulas of the papers. It shares with the pieces what is drawn at random (which weights dropout
drops, the table of `random_blocks`) and code of the user (a predicate, `taps`, a scaling). Output and weights of all
engines are tested against it; the engine "reference" runs it. Register a definition for a piece of your own with
`@regard.reference.attends.register`, or with the function of its slot.
"""

from regard.reference.attention import one_head, reference
from regard.reference.basics import Place, array
from regard.reference.biases import shift
from regard.reference.masks import attends
from regard.reference.normalizers import normalize
from regard.reference.positions import encode, encode_heads
from regard.reference.scores import compare, features, vectors
from regard.reference.transitions import transit

__all__ = [
    "Place",
    "array",
    "attends",
    "compare",
    "encode",
    "encode_heads",
    "features",
    "normalize",
    "one_head",
    "reference",
    "shift",
    "transit",
    "vectors",
]
