"""Images under the weights: where the patches are, what the page gets, and what is refused."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
import torch
import transformers

import regard as rg
from extras import needs_transformers
from miniatures import sharpened
from regard.base.errors import RegardError
from regard.hf.capture.model_inputs import ModelInputs
from regard.hf.image_grids import image_grids
from regard.hf.window_maps import window_tokens
from regard.stats import PatchGrid, patch_roles, shuffle_patches
from regard.viewer import picture_sheets
from regard.viewer.pictures import LONGEST, as_bytes, data_url
from vision_models import (
    COLUMNS,
    ROWS,
    SQUARE,
    TOWER,
    Vision,
    pictured,
    pixels,
    towers,
    video,
    watched,
    whisper,
    with_texts,
)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("vision", [*towers(), *with_texts()], ids=str)
def test_the_grid_is_that_of_the_configuration(vision):
    sheet = pictured(picture_sheets(watched(vision)))
    (panel,) = sheet.about["picture"]["panels"]
    assert (panel["rows"], panel["columns"], panel["start"]) == vision.grid and "tokens" not in panel
    rows, columns, start = vision.grid
    names = sheet.about["tokens"]
    assert [names[start + r * columns + c] for r in range(rows) for c in range(columns)] == [
        f"r{r} c{c}" for r in range(rows) for c in range(columns)
    ]


@pytest.mark.parametrize("vision", towers(), ids=str)
def test_tokens_before_the_patches_are_special(vision):
    sheet = pictured(picture_sheets(watched(vision)))
    assert sheet.about["special"] == list(range(vision.grid[2]))
    if vision.name == "Dinov2WithRegistersModel":
        assert sheet.about["tokens"][:4] == ["[CLS]", "[REG 1]", "[REG 2]", "[REG 3]"]


def test_a_patch_is_where_the_convolution_read_it():
    """Moving one patch of the input changes the embedding of the token that the grid names, and of no other."""
    for vision in towers():
        model, image = vision.make(), vision.inputs["pixel_values"]
        rows, columns, start = vision.grid
        changed = image.clone()
        changed[:, :, 4:8, 0:4] += 1  # row 1, column 0
        body = getattr(model, "vision_model", model)
        with torch.no_grad():
            moved = (body.embeddings(image) - body.embeddings(changed)).abs().sum(-1)[0]
        assert moved.nonzero().flatten().tolist() == [PatchGrid(rows, columns, start).token(1, 0)], vision


@needs_transformers("5.1", "the tower takes these arguments")
def test_the_tower_of_qwen_vl_orders_patches_by_blocks():
    vision = with_texts()[-1]
    tower = next(
        s for s in picture_sheets(watched(vision)) if s.about["picture"] and "tokens" in s.about["picture"]["panels"][0]
    )
    (panel,) = tower.about["picture"]["panels"]
    blocks = [(r // 2, c // 2, r % 2, c % 2) for r in range(4) for c in range(6)]
    order = sorted(blocks)
    assert (panel["rows"], panel["columns"]) == (4, 6) and panel["tokens"] == [order.index(block) for block in blocks]


def test_frames_of_a_video():
    vision = video()
    sheet = pictured(picture_sheets(watched(vision)))
    picture = sheet.about["picture"]
    assert picture["kind"] == "video" and [panel["start"] for panel in picture["panels"]] == [0, 4]
    assert sheet.about["tokens"][5] == "f1 r0 c1"


def test_a_sound_has_a_time_axis():
    seen = watched(whisper())
    sheets = picture_sheets(seen, targets=["a", "b", "c", "d"])
    cross = next(sheet for sheet in sheets if sheet.about["queries"])
    picture = cross.about["picture"]
    assert picture["kind"] == "sound" and picture["panels"][0]["columns"] == 9
    assert picture["seconds"] == pytest.approx(0.02), "two mel frames of 10 ms are one frame of the encoder"
    assert cross.about["queries"] == ["a", "b", "c", "d"] and cross.about["tokens"][3] == "0.06 s"


@pytest.mark.parametrize("vision", with_texts(), ids=str)
def test_a_generation_shows_its_prompt_with_the_image(vision):
    model = vision.make()
    with torch.no_grad(), rg.watch(model) as seen:
        model.generate(**vision.inputs, max_new_tokens=3, do_sample=False)
    sheet = picture_sheets(seen)[0]
    (panel,) = sheet.about["picture"]["panels"]
    assert (panel["rows"], panel["columns"], panel["start"]) == vision.grid
    assert len(sheet.about["tokens"]) == vision.inputs["input_ids"].shape[1]


def test_a_text_and_an_image_of_equal_length_are_two_texts():
    config = transformers.CLIPConfig(
        text_config=TOWER | {"vocab_size": 50, "max_position_embeddings": 20}, vision_config=SQUARE
    )
    vision = Vision(
        "CLIPModel", config, {"pixel_values": pixels(8, 8), "input_ids": torch.tensor([[3, 4, 5, 6, 7]])}, ()
    )
    image, text = picture_sheets(watched(vision), tokens=list("abcde"))
    assert image.about["tokens"][:2] == ["[CLS]", "r0 c0"] and text.about["tokens"] == list("abcde")
    assert text.about["picture"] is None


def swin(size=32, **more):
    sizes = {"image_size": size, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
    config = transformers.SwinConfig(**(sizes | {"window_size": 4} | more))
    return Vision("SwinModel", config, {"pixel_values": pixels(size, size)}, (0, 0, 0))


@pytest.mark.parametrize(("window", "shift"), [(4, 0), (4, 2), (2, 1)])
def test_windows_of_swin_are_those_of_transformers(window, shift):
    from transformers.models.swin.modeling_swin import window_partition

    tokens = torch.arange(8.0 * 12).view(1, 8, 12, 1)
    expected = window_partition(torch.roll(tokens, (-shift, -shift), (1, 2)), window).flatten(1)
    assert torch.equal(window_tokens(8, 12, window, shift), expected.long())


def test_swin_is_shown_over_the_whole_image():
    vision = swin()
    seen = watched(vision)
    sheets = picture_sheets(seen)
    panels = [sheet.about["picture"]["panels"][0] for sheet in sheets]
    assert [(panel["rows"], panel["columns"]) for panel in panels] == [(16, 16), (8, 8)]
    for sheet, first in zip(sheets, (0, 2), strict=True):
        for block, weights in enumerate(sheet.maps):
            dense = weights.dense()[0]
            torch.testing.assert_close(dense.sum(-1), torch.ones(dense.shape[:2]))
            side = panels[0 if first == 0 else 1]["rows"]
            shift = 2 * block
            windows = seen[first + block].dense()
            for row, column, other in ((0, 0, 1), (3, 5, side), (side - 1, side - 1, -1)):
                i, j = row * side + column, row * side + column + other
                places = window_tokens(side, side, 4, shift)
                (number, a), found = (places == i).nonzero()[0].tolist(), (places == j).nonzero()[0].tolist()
                expected = windows[number, :, a, found[1]] if found[0] == number else 0 * windows[number, :, a, 0]
                torch.testing.assert_close(dense[:, i, j], expected)


def test_swin_with_padded_windows_or_too_many_patches_is_refused():
    with pytest.raises(RegardError, match=r"15 x 15 patches, which are padded to whole windows of 4 x 4"):
        picture_sheets(watched(swin(30)))
    with pytest.raises(RegardError, match=r"56 x 56 patches takes 75 MiB.*layers=\["):
        picture_sheets(watched(swin(112, window_size=7)))


def test_folding_a_row():
    grid = PatchGrid(ROWS, COLUMNS, start=1)
    seen = watched(towers()[0])
    row = seen[0][0, 1, 0]
    folded = grid.fold(row)
    assert folded.shape == (1, ROWS, COLUMNS) and folded[0, 1, 2] == row[grid.token(1, 2)]
    assert float(folded.sum() + row[0]) == pytest.approx(1.0)


def test_images_are_shown_as_the_model_read_them():
    vision = towers()[0]
    sheet = pictured(picture_sheets(watched(vision)))
    (panel,) = sheet.about["picture"]["panels"]
    assert (panel["width"], panel["height"]) == (12, 8) and panel["image"].startswith("data:image/jpeg;base64,")


@pytest.mark.parametrize("kind", ["pil", "array", "floats", "tensor"])
def test_kinds_of_images_are_one_image(kind):
    from PIL import Image

    array = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    given = {
        "pil": Image.fromarray(array),
        "array": array,
        "floats": array / 255,
        "tensor": torch.from_numpy(array).permute(2, 0, 1) / 255,
    }[kind]
    assert np.array_equal(as_bytes(given), array)


@pytest.mark.parametrize("dtype", ["uint8", "int64", "bool", "float32"])
def test_a_tensor_and_an_array_of_the_same_numbers_are_the_same_image(dtype):
    """Integers of 0 and 1 are values of 255; truth values and floats are shares."""
    array = np.random.default_rng(0).integers(0, 2, (4, 5, 3)).astype(dtype)
    expected = array.astype(np.uint8) * (1 if np.issubdtype(array.dtype, np.integer) else 255)
    assert np.array_equal(as_bytes(array), expected) and np.array_equal(as_bytes(torch.from_numpy(array)), expected)


def test_an_embedded_image_is_bounded():
    from PIL import Image

    url = data_url(np.zeros((1000, 3000, 3), np.uint8))
    image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    assert image.size == (LONGEST, LONGEST // 3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"grid": (3, 4)}, r"grid=\(3, 4\).*12 patches.*6 patches in the map.*\(2, 3\) or \(3, 2\)"),
        ({"grid": (0, 4)}, "two numbers of at least 1"),
        ({"grid": 6}, "grid is .rows, columns."),
        ({"image": np.zeros((4, 4, 7))}, r"shape \(4, 4, 7\)"),
        ({"image": np.full((4, 4, 3), 300.0)}, "from 300 to 300"),
        ({"image": "face.png"}, "show.image=str"),
        ({"image": [np.zeros((4, 4)), np.zeros((4, 4))]}, "2 images were given, and the tokens show 1"),
    ],
)
def test_refusals_name_the_rule(options, said):
    seen = watched(towers()[0])
    with pytest.raises(RegardError, match=said):
        picture_sheets(seen, **options)


def test_a_text_model_has_no_picture():
    model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    with rg.watch(model) as seen:
        model(torch.randn(1, 5, 8))
    with pytest.raises(RegardError, match=r"grid=\(rows, columns\)"):
        picture_sheets(seen, image=np.zeros((4, 4, 3)))
    sheet = pictured(picture_sheets(seen, image=np.zeros((4, 4, 3)), grid=(2, 2)))
    assert sheet.about["tokens"][0] == "[CLS]", "one token more than patches"
    with pytest.raises(RegardError, match="3 patches, but there are 5"):
        picture_sheets(seen, image=np.zeros((4, 4, 3)), grid=(1, 3))


def test_a_layout_that_no_rule_finds_is_given_by_tokens():
    inputs = ModelInputs(None, {"pixel_values": pixels()})
    grid = PatchGrid(1, 3, tokens=(0, 2, 4))
    assert image_grids(inputs, "layers.0", 5, grid) == [grid] and grid.token(0, 2) == 4
    with pytest.raises(RegardError, match="the last patch is token 4"):
        image_grids(inputs, "layers.0", 4, grid)


def test_a_saved_run_keeps_its_picture(tmp_path):
    sheets = picture_sheets(watched(towers()[0]))
    rg.viewer.save_run(tmp_path, sheets)
    assert rg.viewer.load_run(tmp_path)[0].about["picture"] == sheets[0].about["picture"]


def test_roles_on_the_grid_are_those_of_patch_roles(tmp_path):
    config = transformers.ViTConfig(**(TOWER | {"image_size": 24}))
    model = sharpened(transformers.ViTModel._from_config(config, attn_implementation="sdpa").eval())
    with torch.no_grad():
        _say_rows(model)
    image = pixels(24, 24)
    with torch.no_grad(), rg.watch(model) as seen:
        model(image)
    with torch.no_grad(), rg.watch(model) as null:
        model(shuffle_patches(image, 6, 6))
    (sheet,) = [s for s in picture_sheets(seen, null=null) if s.about["picture"]]
    table = patch_roles(seen.maps, PatchGrid(6, 6, start=1), null=null.maps)
    shown = [
        (layer["number"], head, role["kind"], role["score"])
        for layer in sheet.about["layers"]
        for head, about in enumerate(layer["heads"])
        for role in about["roles"]
    ]
    assert sorted(shown) == sorted((r.layer, r.head, r.kind, round(r.score, 4)) for r in table.labeled)
    rg.viewer.save_run(tmp_path, [sheet])
    assert rg.viewer.load_run(tmp_path)[0].about["layers"] == sheet.about["layers"]
    assert ("row", 0) in {(kind, head) for _, head, kind, _ in shown}, "the first head compares rows"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": 10**9}, "start"),
        ({"columns": 0}, "below 1"),
        ({"tokens": [1, 2, 3, 4, 5, 99]}, "tokens"),
        ({"tokens": [1]}, "tokens"),
        ({"image": "https://example.org/a.png"}, "data URL"),
    ],
)
def test_an_edited_picture_is_refused_in_words(change, said, tmp_path):
    sheets = picture_sheets(watched(towers()[0]))
    sheets[0].about["picture"]["panels"][0] |= change
    rg.viewer.save_run(tmp_path, sheets)
    with pytest.raises(RegardError, match=rf"view: .* edited: picture.panels\[0\].*{said}"):
        rg.viewer.load_run(tmp_path)


def _say_rows(model):
    """Make the first layer see the row of a patch only: the first head attends to equal rows, the second to all."""
    model.embeddings.patch_embeddings.projection.weight.zero_()
    model.embeddings.position_embeddings.zero_()
    model.embeddings.position_embeddings[0, 1:, :6] = torch.eye(6).repeat_interleave(6, 0)
    for name, parameter in model.named_parameters():
        if re.search(r"layers?\.0\b", name) and (
            "q_proj" in name or "k_proj" in name or "query" in name or "key" in name
        ):
            parameter.copy_(3 * torch.eye(16) if parameter.ndim == 2 else torch.zeros(16))
