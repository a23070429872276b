"""Maps as files: every mechanism comes back weight for weight, and a file can name nothing but pieces."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

import regard as rg
from cataloged import SINGLE
from damage import changed, parts
from regard.maps.stored import VERSION, load_map, save_map

stored = pytest.importorskip("safetensors.torch")


def header(path):
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        return json.loads(file.metadata()["map"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def rewrite(path, about, tensors, **metadata):
    told = {"format": "regard map", "version": "1", "map": json.dumps(about)} | metadata
    stored.save_file(tensors, path, told)


@pytest.mark.parametrize("name", SINGLE)
def test_every_mechanism_comes_back_weight_for_weight(name, tmp_path):
    attention, query, key, value = rg.mechanism(name).example()
    weights = attention(query, key, value).weights
    save_map(tmp_path / "map.safetensors", weights)
    again = load_map(tmp_path / "map.safetensors")
    assert not isinstance(again, rg.maps.DenseMap), "stored as pieces, not as weights"
    torch.testing.assert_close(again.dense(), weights.dense(), rtol=0, atol=0)
    torch.testing.assert_close(again[1, -1, 3:5, ::5], weights[1, -1, 3:5, ::5])
    assert [path.name for path in tmp_path.iterdir()] == ["map.safetensors"]


def test_a_chosen_batch_entry_keeps_its_padding(tmp_path):
    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    weights = rg.Attention(mask=rg.padding([6, 3]))(q, k, v).weights
    one = weights.select(torch.tensor([1]), torch.arange(4))
    save_map(tmp_path / "map.safetensors", one)
    torch.testing.assert_close(load_map(tmp_path / "map.safetensors").dense(), weights.dense()[1:], rtol=0, atol=0)


def test_a_mask_given_as_a_function_is_stored_as_its_weights(tmp_path):
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    weights = rg.Attention(mask=rg.mask_mod(lambda b, h, i, j: (i + j) % 2 == 0))(q, k, v).weights
    save_map(tmp_path / "map.safetensors", weights)
    torch.testing.assert_close(load_map(tmp_path / "map.safetensors").dense(), weights.dense(), rtol=0, atol=0)


def test_weights_too_large_for_a_table_are_refused_with_the_number(tmp_path, monkeypatch):
    monkeypatch.setattr("regard.maps.stored.LARGEST_TABLE", 100)
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    weights = rg.Attention(mask=rg.mask_mod(lambda b, h, i, j: i >= j))(q, k, v).weights
    with pytest.raises(rg.RegardError, match=r"function cannot be stored by name.*MiB"):
        save_map(tmp_path / "map.safetensors", weights)
    assert not list(tmp_path.iterdir())


def test_a_matrix_is_a_map_like_any_other():
    weights = torch.rand(1, 2, 4, 7)
    seen = rg.maps.DenseMap(weights)
    torch.testing.assert_close(seen[0, 1, [2, 0], 3:], weights[0, 1, [2, 0], 3:])
    torch.testing.assert_close(seen.received(), weights.sum(-2))


def test_a_matrix_tells_apart_more_keys_than_float32_can_count():
    weights = torch.zeros(1, 1, 1, 2**24 + 2, dtype=torch.bfloat16)
    weights[..., -1] = 1
    assert rg.maps.DenseMap(weights)[..., 2**24 :].flatten().tolist() == [0, 1]


@pytest.mark.parametrize(
    "piece", ["os:system", "builtins:eval", "regard.base.errors:RegardError", "regard.nowhere:Dot", "Dot"]
)
def test_a_file_can_name_nothing_but_pieces(piece, tmp_path):
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    path = tmp_path / "map.safetensors"
    save_map(path, rg.Attention()(q, k, v).weights)
    about, tensors = header(path)
    about["pieces"]["score"] = {"piece": piece, "fields": {}}
    rewrite(path, about, tensors)
    with pytest.raises(rg.RegardError, match="damaged"):
        load_map(path)


@pytest.mark.parametrize("place", [0, 1])
def test_a_file_without_queries_or_keys_is_refused(place, tmp_path):
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    save_map(tmp_path / "map.safetensors", rg.Attention()(q, k, v).weights)
    about, tensors = header(tmp_path / "map.safetensors")
    about["prepared"][place] = None
    rewrite(tmp_path / "map.safetensors", about, tensors)
    with pytest.raises(rg.RegardError, match="queries or the keys are missing"):
        load_map(tmp_path / "map.safetensors")


def test_what_is_no_map_is_refused(tmp_path):
    (tmp_path / "text").write_text("no tensors")
    stored.save_file({"a": torch.zeros(1)}, tmp_path / "other")
    rewrite(tmp_path / "later", {}, {"a": torch.zeros(1)}, version=str(VERSION + 1))
    rewrite(tmp_path / "earlier", {}, {"a": torch.zeros(1)}, version="0")
    rewrite(tmp_path / "empty", {}, {"a": torch.zeros(1)})
    stored.save_file({"a": torch.zeros(1)}, tmp_path / "no version", {"format": "regard map", "map": "{}"})
    for name, reason in {
        "text": "cannot be read",
        "none": "cannot be read",
        "other": "is no map",
        "later": "is no map",
        "earlier": "is no map",
        "no version": "is no map",
    }.items():
        with pytest.raises(rg.RegardError, match=reason):
            load_map(tmp_path / name)
    with pytest.raises(rg.RegardError, match="damaged"):
        load_map(tmp_path / "empty")


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "saved_maps").iterdir()), ids=lambda path: path.stem)
def test_maps_that_earlier_versions_wrote_open_with_the_names_of_today(path):
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        assert file.metadata()["version"] == ("2" if "table" in path.stem else "1")
        expected = file.get_tensor("expected")  # the dense weights, as that version computed them
    again = load_map(path)
    torch.testing.assert_close(again.dense(), expected, atol=1e-6, rtol=1e-5)
    assert again.is_signed == bool((expected < 0).any())


#: What may stand in place of a part of a header.
WRONG = (None, "", -1, 10**30, 0.5, True, [], {}, [[1]], {"tensor": "tensor_0"}, {"float": "nan"}, {"float": "x"})
MAPS = {
    "spans": lambda: rg.Attention(mask=rg.causal() & rg.window(3)),
    "tables": lambda: rg.Attention(bias=rg.biases.T5Bias(2), position=rg.RoPE(8)),
    "documents": lambda: rg.Attention(normalizer=rg.normalizers.Sparsemax(), mask=rg.masks.documents([3, 4])),
    "sums": lambda: rg.Attention(score=rg.scores.FeatureScore(), normalizer=rg.normalizers.SumNormalizer()),
    "numbers": lambda: rg.Attention(mask=rg.padding([5]) & rg.mask_tensor(torch.ones(7, 7).tril().bool())),
}


@pytest.mark.parametrize("name", MAPS)
def test_a_damaged_part_is_refused_when_the_file_is_read_or_harms_nothing(name, tmp_path):
    path = tmp_path / "map.safetensors"
    save_map(path, MAPS[name]()(*torch.randn(3, 1, 2, 7, 8)).weights)
    about, tensors = header(path)
    chance, num_refused = random.Random(0), 0
    damaged = [(part, wrong) for part in parts(about) for wrong in WRONG]
    for part, wrong in chance.sample(damaged, 100):
        rewrite(path, changed(about, part, wrong), tensors)
        try:
            weights = load_map(path)
        except rg.RegardError as error:
            num_refused += "is damaged" in str(error)
            continue
        assert weights.dense().shape == weights.shape and weights.received().shape[-1] == weights.shape[3], (
            part,
            wrong,
        )
    assert num_refused > 40


@pytest.mark.parametrize("name", MAPS)
def test_tensors_of_other_sizes_are_refused(name, tmp_path):
    path = tmp_path / "map.safetensors"
    save_map(path, MAPS[name]()(*torch.randn(3, 1, 2, 7, 8)).weights)
    about, tensors = header(path)
    for wanted in ("prepared", 0), ("prepared", 1), ("where", 2), ("where", 3):
        tensor = about[wanted[0]][wanted[1]]["tensor"]
        for wrong in (tensors[tensor].flatten()[:1], tensors[tensor].new_zeros(1, 1, 1, 1), tensors[tensor][..., :0]):
            rewrite(path, about, {**tensors, tensor: wrong.contiguous()})
            with pytest.raises(rg.RegardError, match="is damaged"):
                load_map(path)


@pytest.mark.parametrize("name", MAPS)
def test_a_tensor_of_another_size_is_refused_when_the_file_is_read_or_harms_nothing(name, tmp_path):
    path = tmp_path / "map.safetensors"
    save_map(path, MAPS[name]()(*torch.randn(3, 1, 2, 7, 8)).weights)
    about, tensors = header(path)
    for wanted, tensor in tensors.items():
        for wrong in (
            tensor.flatten(),
            tensor.flatten()[:1],
            tensor[..., :0],
            tensor[1:],
            tensor.new_zeros(1, 1, 1, 1),
        ):
            rewrite(path, about, {**tensors, wanted: wrong.contiguous()})
            try:
                weights = load_map(path)
            except rg.RegardError as error:
                assert "is damaged" in str(error)
                continue
            for rows in ([0], [0, 6], range(7)):
                assert weights[:, :, list(rows)].shape[2] == len(rows)
            assert weights.received().shape == (1, 2, 7)


class Own(rg.scores.Dot):
    """A score of a user, which a file cannot name, though it computes as its base does."""


def test_a_piece_of_a_user_is_stored_as_its_weights(tmp_path):
    weights, path = rg.Attention(Own())(*torch.randn(3, 1, 2, 5, 4)).weights, tmp_path / "map.safetensors"
    save_map(path, weights)
    assert b"test_stored" not in path.read_bytes()
    torch.testing.assert_close(load_map(path).dense(), weights.dense(), rtol=0, atol=0)
