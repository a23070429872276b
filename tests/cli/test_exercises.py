"""The exercises: right solutions pass their check cells, wrong ones are named, and notebooks are written."""

import json
from pathlib import Path

import nbformat
import pytest
from typer.testing import CliRunner

from regard.base.errors import RegardError
from regard.cli.app import app
from regard.cli.exercise_notebooks import Exercise, names

STORED = Path(__file__).parents[2] / "examples" / "exercises"
UNSCALED = (" / math.sqrt(q.shape[-1])", "", "the scores are not scaled")
UNSCALED_MODULE = (" / q.shape[-1] ** 0.5", "", "the scores are not scaled")
#: For each exercise: what is replaced in its solution, by what, and words of the mistake that the check must name.
WRONG = {
    "scaled_dot_product": [UNSCALED, (".softmax(-1)", ".softmax(-2)", "over the queries")],
    "numpy_softmax": [(" / np.sqrt(q.shape[-1])", "", "not scaled"), ("axis=-1", "axis=-2", "queries")],
    "causal_attention": [UNSCALED, (".tril()", ".triu()", "reversed"), (".tril()", ".tril(1)", "next token")],
    "causal_mask": [(".tril()", ".triu()", "hides earlier"), (".tril()", ".tril(-1)", "itself")],
    "padding_mask": [("!= 0", "== 0", "reversed"), ("[:, None, None, :]", "[:, None, :, None]", "queries")],
    "luong_dot": [
        ("state, encoder_states)\n", "state, encoder_states) / 4\n", "scaled"),
        (".softmax(-1)", ".softmax(0)", "batch"),
    ],
    "luong_general": [
        ("self.W(encoder_states))", "self.W(encoder_states).tanh())", "tanh"),
        ("weights, encoder_states)", "weights, self.W(encoder_states))", "projected keys"),
    ],
    "luong_concat": [("torch.tanh(", "torch.relu(", "relu"), ("torch.tanh(", "(", "tanh is missing")],
    "bahdanau": [
        ("torch.tanh(", "torch.relu(", "relu in place of tanh"),
        (".softmax(1)", ".softmax(-1)", "one number"),
        ("self.W(state)[:, None] +", "self.W(state)[:, None] *", "product"),
        ("weights * encoder_states", "weights * self.U(encoder_states)", "projected keys"),
    ],
    "self_attention": [UNSCALED_MODULE, (".softmax(-1)", ".softmax(-2)", "queries")],
    "multi_head": [
        ("/ q.shape[-1] ** 0.5", "/ C ** 0.5", "width"),
        (
            ".view(B, n, self.num_heads, -1).transpose(1, 2)",
            ".view(B, self.num_heads, n, -1)",
            "by .view without .transpose",
        ),
    ],
    "causal_multi_head": [("triu(1)", "triu(2)", "next token"), ("triu(1)", "tril(-1)", "reversed")],
    "cross_attention": [UNSCALED_MODULE, ("self.output(context", "(context", "not projected")],
    "sinusoidal": [
        ("angles.sin(), angles.cos()", "angles.cos(), angles.sin()", "swapped"),
        ("x + encoding", "x * encoding", "multiplied"),
    ],
    "learned_positions": [
        ("torch.arange(x.shape[1])", "torch.arange(x.shape[1]) + 1", "first position"),
        ("x + self", "x * self", "multiplied"),
    ],
    "rope": [("cos() - b", "cos() + b", "no rotation"), ("10_000.0", "1_000.0", "base")],
    "encoder_block": [("x + self.attention", "self.attention", "residual"), (".relu()", "", "activation")],
    "gpt_block": [(", attn_mask=future", "", "mask"), ("x = x + self.attention", "x = y + self.attention", "residual")],
    "decoder_block": [
        ("self.cross(x, memory, memory)", "self.cross(x, x, x)", "cross"),
        ("x + self.cross", "self.cross", "residual"),
    ],
    "kv_cache": [
        (" / math.sqrt(query.shape[-1])", "", "the scores are not scaled"),
        ("torch.cat((cache[1], value), -2)", "torch.cat((value, cache[1]), -2)", "differ"),
    ],
}


def checked(exercise, code):
    """The value of the check cell, its last expression, after the cell of the function."""
    scope = {}
    *lines, expression = exercise.check.splitlines()
    exec("\n".join([code, *lines]), scope)
    return eval(expression, scope)


def test_every_exercise_has_wrong_solutions():
    assert set(WRONG) == set(names())


@pytest.mark.parametrize("name", names())
def test_the_solution_is_right_and_mistakes_are_named(name):
    exercise = Exercise.read(name)
    assert checked(exercise, exercise.solution).ok is True
    for right, wrong, words in WRONG[name]:
        assert right in exercise.solution
        report = checked(exercise, exercise.solution.replace(right, wrong))
        assert report.ok is False and any(words in mistake for mistake in report.mistakes), (wrong, report.mistakes)


@pytest.mark.parametrize("body", ["raise NotImplementedError", "pass"])
@pytest.mark.parametrize("name", ["scaled_dot_product", "causal_mask", "bahdanau"])
def test_an_empty_function_is_called_not_written(name, body):
    exercise = Exercise.read(name)
    with pytest.raises(RegardError, match="is not written yet"):
        checked(exercise, exercise.start.replace("raise NotImplementedError", body))


def test_a_state_without_its_axis_of_tokens_cannot_be_called():
    """Of a state (batch, 1, width), which the task does not give, this solution would be right."""
    exercise = Exercise.read("bahdanau")
    with pytest.raises(RegardError, match="it needs their axis"):
        checked(exercise, exercise.solution.replace("[:, None]", ""))


def test_the_command_writes_notebooks_and_loses_none(tmp_path):
    arguments = ["exercises", str(tmp_path), "--only", "rope"]
    assert CliRunner().invoke(app, ["exercises", str(tmp_path / "all")]).exit_code == 0
    assert sorted(path.stem for path in (tmp_path / "all").iterdir()) == names()
    assert CliRunner().invoke(app, arguments).exit_code == 0
    file = tmp_path / "rope.ipynb"
    file.write_text("solved")
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code != 0 and file.read_text() == "solved"
    of_file = CliRunner().invoke(app, ["exercises", str(file)])
    assert (
        isinstance(of_file.exception, RegardError | SystemExit)
        and "rope.ipynb" in str(of_file.exception) + of_file.output
    )
    assert CliRunner().invoke(app, [*arguments, "--overwrite"]).exit_code == 0
    assert file.read_text() == Exercise.read("rope").notebook()


def test_notebooks_are_valid_and_stored_as_they_are_made():
    assert sorted(path.stem for path in STORED.glob("*.ipynb")) == names()
    for name in names():
        text = Exercise.read(name).notebook()
        assert (STORED / f"{name}.ipynb").read_text(encoding="utf-8") == text
        nbformat.validate(nbformat.from_dict(json.loads(text)))
