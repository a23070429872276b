"""What a training step is made of: loss, schedules, averages, and the configuration they are set by."""

from __future__ import annotations

import math
import tomllib
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from regard import RegardError
from regard.lab.models.loss import smoothed_cross_entropy, translation_loss
from regard.lab.runs.config import Config, make_config, read_config
from regard.lab.training.averaging import Averaging
from regard.lab.training.schedule import SCHEDULES, Plateau, Schedule, cosine, inverse_square_root, noam, trapezoid
from regard.lab.training.stream import UpdateBatches, update_batches


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_the_loss_and_its_gradient_are_those_of_torch(smoothing, rows):
    logits = (5 * torch.randn(rows, 11, dtype=torch.float64)).requires_grad_()
    twin = logits.detach().clone().requires_grad_()
    targets = torch.randint(11, (rows,))
    total, nll = smoothed_cross_entropy(logits, targets, smoothing)
    theirs = F.cross_entropy(twin, targets, label_smoothing=smoothing, reduction="sum")
    (3 * total).backward()
    (3 * theirs).backward()
    torch.testing.assert_close(total, theirs)
    torch.testing.assert_close(logits.grad, twin.grad)
    torch.testing.assert_close(nll, F.cross_entropy(twin.detach(), targets, reduction="sum"))
    assert not nll.requires_grad


def test_the_loss_holds_for_extreme_and_half_precision_logits():
    targets = torch.tensor([0, 1])
    extreme = torch.tensor([[1e4, -1e4, 0.0], [-3e38, 0.0, -3e38]], requires_grad=True)
    total, _ = smoothed_cross_entropy(extreme, targets)
    total.backward()
    assert total == 0 and extreme.grad is not None and extreme.grad.isfinite().all()
    half = torch.randn(2, 5).bfloat16()
    torch.testing.assert_close(
        smoothed_cross_entropy(half, targets, 0.1)[0],
        F.cross_entropy(half.float(), targets, label_smoothing=0.1, reduction="sum"),
    )


def test_the_loss_passes_nan_on():
    assert smoothed_cross_entropy(torch.tensor([[math.nan, 0.0]]), torch.tensor([1]))[0].isnan()


@pytest.mark.parametrize(
    ("logits", "targets", "smoothing", "said"),
    [((2, 3, 4), (2,), 0.1, "must be"), ((3, 4), (2,), 0.1, "do not fit"), ((2, 4), (2,), 1.0, "below 1, not 1.0")],
)
def test_the_loss_says_what_is_wrong(logits, targets, smoothing, said):
    with pytest.raises(RegardError, match=said):
        smoothed_cross_entropy(torch.zeros(logits), torch.zeros(targets, dtype=torch.long), smoothing)


def test_padding_has_no_part_in_the_loss():
    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(9, 6)
            self.logits = torch.nn.Linear(6, 9)

        def forward(self, source, target):
            return self.table(target) + self.table(source).mean(1, keepdim=True)

    model = Words()
    source, target = torch.randint(4, 9, (2, 3)), torch.tensor([[2, 5, 6, 3], [2, 7, 3, 0]])
    loss = translation_loss(model, source, target, 0.1)
    longer = translation_loss(model, source, F.pad(target, (0, 4)), 0.1)
    every = model.logits(model(source, target[:, :-1]))
    oracle = F.cross_entropy(every.mT, target[:, 1:], ignore_index=0, label_smoothing=0.1)
    assert loss.num_tokens == longer.num_tokens == 5
    torch.testing.assert_close(loss.smoothed / 5, oracle)
    torch.testing.assert_close(longer.smoothed, loss.smoothed)


def test_schedules_are_the_formulas_of_the_papers():
    # "increasing linearly for the first warmup_steps, and decreasing thereafter" as step^-0.5; both meet at the peak
    assert noam(4000, 4000, 512) == pytest.approx(1 / math.sqrt(512 * 4000))
    assert noam(1000, 4000, 512) == pytest.approx(noam(4000, 4000, 512) / 4)
    assert noam(16000, 4000, 512) == pytest.approx(noam(4000, 4000, 512) / 2)
    for step in (1, 7, 100, 1234):  # the same shape, one as a share of its peak
        assert noam(step, 100, 64) / noam(100, 100, 64) == pytest.approx(inverse_square_root(step, 100))
    assert [trapezoid(share) for share in (0.0, 0.5, 0.75)] == [1.0, 1.0, 1.0]
    assert [trapezoid(share) for share in (0.85, 0.9, 0.95, 1.0)] == pytest.approx([0.75, 0.5, 0.25, 0.0])
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    for step in range(10):
        assert cosine(step / 10) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_rises_over_the_warm_up_and_stays_within_its_peak(name):
    schedule = Schedule(name, peak=0.5, warmup=20, width=1)
    rates = [schedule.rate(step, share=(step - 1) / 200) for step in range(1, 201)]
    peak = max(rates)
    assert rates.index(peak) <= 20 and 0 < peak <= 0.5
    assert all(a < b for a, b in pairwise(rates[:16]))
    assert all(a >= b for a, b in pairwise(rates[20:]))
    with pytest.raises(RegardError, match=f"mean '{name}'"):
        Schedule(name + "x")


def test_the_plateau_falls_as_that_of_torch_with_one_validation_less_of_patience():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2, threshold=0.0)
    ours = Plateau(patience=3, decay=0.5)
    for loss in (3.0, 2.0, 2.5, 2.0, 2.1, 1.9, 1.9, 1.9, 1.9, 1.95, 5.0, 1.8):
        theirs.step(loss)
        ours = ours.after(loss)
        assert ours.factor == theirs.get_last_lr()[0]


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.995])
def test_the_average_is_the_weighted_mean_of_all_weights_so_far(decay):
    layer = torch.nn.Linear(3, 2).double()
    average, seen = Averaging(layer, decay), []
    for _ in range(6):
        with torch.no_grad():
            layer.weight.add_(torch.randn(2, 3))
        average.add()
        seen.append(layer.weight.detach().clone())
    share = torch.tensor([decay ** (len(seen) - 1 - s) for s in range(len(seen))], dtype=torch.float64)
    expected = torch.einsum("s,sij->ij", share / share.sum(), torch.stack(seen))
    torch.testing.assert_close(average.weights["weight"], expected)
    before = layer.weight.detach().clone()
    with average.swapped_in():
        assert torch.equal(layer.weight, average.weights["weight"])
    assert torch.equal(layer.weight, before)


def test_the_average_refuses_what_is_no_decay():
    with pytest.raises(RegardError, match=r"below 1, not 1\.0"):
        Averaging(torch.nn.Linear(1, 1), 1.0)


@pytest.mark.parametrize("accumulate", [1, 2, 5])
def test_turns_can_be_taken_up_at_any_place(accumulate):
    def epoch(number):
        return [f"{number}.{place}" for place in range(3 + number)]

    whole = list(update_batches(epoch, accumulate, stop=3))
    assert [batch for update in whole for batch in update.batches] == [b for n in range(3) for b in epoch(n)]
    for done, update in enumerate(whole):
        rest = list(update_batches(epoch, accumulate, update.following, stop=3))
        assert [t.batches for t in rest] == [t.batches for t in whole[done + 1 :]]
    assert isinstance(whole[0], UpdateBatches)


def test_the_template_is_the_default_and_explains_every_key():
    assert make_config(tomllib.loads(Config().write())) == Config()
    for name, section in Config.model_fields.items():
        for key, field in section.annotation.model_fields.items():  # type: ignore[union-attr]
            assert field.description, f"{name}.{key} is not explained"


@pytest.mark.parametrize("written", ["", "# width = 64\n"])
def test_a_file_that_sets_no_key_is_refused(written, tmp_path):
    """The defaults would train for minutes, and nobody asked for them."""
    (tmp_path / "config.toml").write_text(written)
    with pytest.raises(RegardError, match=r"config\.toml sets no key\. Leave it out"):
        read_config(tmp_path / "config.toml")


def test_every_key_can_be_set_on_the_command_line_and_comes_back_from_the_file():
    set_ = [
        "model.options.cell=gru",
        "model.dropout=0.3",
        "training.steps=7",
        "data.source='a b'",
        'data.target="é\\n"',
    ]
    config = read_config(None, set_)
    assert config.model.options == {"cell": "gru"} and config.training.budget == ("steps", 7.0)
    assert make_config(tomllib.loads(config.write())) == config
    for name, section in Config.model_fields.items():
        for key in section.annotation.model_fields:  # type: ignore[union-attr]
            value = getattr(getattr(config, name), key)
            given = tomllib.loads(config.write())[name][key]
            assert given == value, f"{name}.{key}"


@pytest.mark.parametrize(
    ("set_", "said"),
    [
        ("model.widht=3", "no key model.widht. Did you mean 'width'"),
        ("trainig.steps=1", "no section trainig. Did you mean 'training'"),
        ("training.steps=abc", 'training.steps = "abc" is wrong: it must be a whole number at least 0'),
        ("training.steps=1.5", "whole number"),
        ("training.clip=nan", "it must be a number at least 0"),
        ("training.schedule=cosin", '"trapezoid", "cosine", "inverse_square_root"'),
        ("model.dropout=1.5", 'a number at least 0 and below 1 or "auto"'),
        ("tokenizer.sampling=1", "true or false"),
        ("data.source=a", "two files that belong together"),
        ("training.steps", "section.key=value"),
        ("steps=3", "section.key=value"),
        ("model=3", "section.key=value"),
        ("training.steps.x=3", "must be a whole number"),
        ("training.steps=1 training.steps.x=3", "is a value and not a section"),
        (
            "decoding.max_length=4 decoding.min_length=4",
            "[decoding] max_length = 4 steps (with the end of the sentence)",
        ),
        ("training.steps=1 training.epochs=1", "steps and epochs are set, but only one"),
    ],
)
def test_a_wrong_configuration_is_named_with_what_would_be_right(set_, said):
    with pytest.raises(RegardError) as error:
        read_config(None, set_.split())
    assert said in str(error.value) and "pydantic" not in str(error.value)


def test_a_file_that_is_no_toml_is_named(tmp_path):
    wrong = tmp_path / "wrong.toml"
    for content in (b"[training\n", b"\xff\xfe", b"training = 3\n"):
        wrong.write_bytes(content)
        with pytest.raises(RegardError, match=r"not TOML|not a value"):
            read_config(wrong)
    with pytest.raises(RegardError, match="cannot be read"):
        read_config(tmp_path / "missing.toml")
