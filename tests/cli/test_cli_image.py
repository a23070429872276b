"""`regard analyze --image`: what it prints, what it saves, and what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from typer.testing import CliRunner

from miniatures import sharpened
from regard.cli.app import app
from regard.hf.image_reader import ImageReader
from regard.viewer import load_run
from vision_models import SQUARE

pytestmark = pytest.mark.filterwarnings("ignore")


def run(*arguments, status=0):
    result = CliRunner().invoke(app, ["analyze", *map(str, arguments)], env={"COLUMNS": "140"})
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of images with its processor, which makes 24 x 24 pixels: 6 x 6 patches."""
    path = tmp_path_factory.mktemp("vit")
    config = transformers.ViTConfig(**(SQUARE | {"image_size": 24}))
    torch.manual_seed(0)
    sharpened(transformers.ViTModel._from_config(config)).save_pretrained(path)
    transformers.ViTImageProcessorPil(size={"height": 24, "width": 24}).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 96, 3), dtype=np.uint8)).save(path)
    return path


def test_an_image_is_read_and_saved(folder, photo, tmp_path):
    output = run("--image", photo, "--model", folder, "--save", tmp_path / "kept")
    assert "photo.png  Image: 6 x 6 patches" in output and "2 layers of 2 heads, 37 tokens" in output
    assert output.count("[CLS] attends most to r") == 2
    (sheet,) = load_run(tmp_path / "kept")
    assert sheet.about["has_roles"] and (tmp_path / "kept/index.html").exists()


def test_json_has_the_grid(folder, photo):
    (found,) = json.loads(run("--image", photo, "--model", folder, "--json"))
    assert found["panels"] == [{"rows": 6, "columns": 6, "start": 1}] and len(found["tokens"]) == 37


def test_the_image_has_its_own_colors_after_resizing(folder, photo):
    image = Image.open(photo).convert("RGB")
    (shown,) = ImageReader.load(folder).read(image).image
    resized = np.asarray(image.resize((24, 24), Image.Resampling.BILINEAR)) / 255
    assert np.abs(shown.permute(1, 2, 0).numpy() - resized).max() < 0.02


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--word", "it"], "--word is about texts"),
        (["a", "b"], "at most one text"),
        (["a text"], "ViTModel reads no text"),
    ],
)
def test_what_is_not_about_an_image_is_refused(folder, photo, arguments, said):
    assert said in " ".join(run(*arguments, "--image", photo, "--model", folder, status=2).split())


def test_a_file_that_is_no_image_is_refused(folder, photo, tmp_path):
    (tmp_path / "note.txt").write_text("no image")
    assert "not an image" in run("--image", tmp_path / "note.txt", "--model", folder, status=2)
    assert "No such file" in run("--image", tmp_path / "none.png", "--model", folder, status=2)
    assert "no config.json" in run("--image", photo, "--model", tmp_path, status=2)
    assert "give at least one, or --image FILE" in run(status=2)
