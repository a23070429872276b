"""Two features at once, 247 draws; `make fuzz` draws as many as one likes."""

import importlib.util

import pytest

import drawn_calls  # noqa: F401 - its draws are pairs too
import feature_pairs

if importlib.util.find_spec("transformers"):
    import backend_calls  # noqa: F401 - calls of a backend of transformers

DRAWS = 247
OF_MODELS = {"edit_and_generation", "watch_inside_edit"}


@pytest.mark.parametrize("name", feature_pairs.PAIRS)
def test_drawn_pairs_of_features_agree_with_formulas(name):
    if name in OF_MODELS:
        pytest.importorskip("transformers")
    for seed in range(-(-DRAWS // len(feature_pairs.PAIRS))):
        feature_pairs.run(name, seed)


def test_an_error_names_its_draw(monkeypatch):
    def wrong(rng):
        raise AssertionError("wrong")

    monkeypatch.setitem(feature_pairs.PAIRS, "wrong", wrong)
    with pytest.raises(AssertionError) as raised:
        feature_pairs.run("wrong", 7)
    assert raised.value.__notes__ == ['drawn by: make fuzz ARGS="--pair wrong --seed 7 --draws 1"']
