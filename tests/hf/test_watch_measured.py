"""Maps that are measured with unit values: attention in blocks, by hashing, at sampled places, of several softmaxes."""

from __future__ import annotations

import pytest
import torch
import transformers

import regard as rg
from miniatures import BERT, T, V, sharpened, tokens
from watching import assert_identical, watched

LONG = {"attention_window": [4, 4], "max_position_embeddings": 64}
BIRD = {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1}
REFORMER = {"attn_layers": ["local", "lsh"], "hidden_size": 16, "num_attention_heads": 2, "attention_head_size": 8}
REFORMER |= {"axial_pos_embds_dim": [8, 8], "axial_pos_shape": [4, 4], "feed_forward_size": 16, "vocab_size": V}
REFORMER |= {"num_buckets": 4, "lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4, "is_decoder": False}
REFORMER |= {"hash_seed": None, "num_hashes": 2, "pad_token_id": 0}
NYSTROM = {"num_landmarks": 4, "segment_means_seq_len": 16, "conv_kernel_size": 3}
PROPHET = {"hidden_size": 16, "num_encoder_layers": 1, "num_decoder_layers": 1, "encoder_ffn_dim": 16, "ngram": 2}
PROPHET |= {"num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2, "decoder_ffn_dim": 16, "vocab_size": V}


def built(kind, **settings):
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**settings)
    return sharpened(getattr(transformers, f"{kind}Model")(config).eval())


def values_and_sums(model, name, inputs, of_values, of_sums=None):
    """What the projection of values gives, and what the output projection receives, or the module returns."""
    kept = {}
    module = model.get_submodule(name)
    hooks = [
        module.get_submodule(of_values).register_forward_hook(lambda _, __, output: kept.update(values=output)),
        module.get_submodule(of_sums).register_forward_pre_hook(lambda _, given: kept.update(sums=given[0]))
        if of_sums
        else module.register_forward_hook(lambda _, __, output: kept.update(sums=output[0])),
    ]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return kept["values"], kept["sums"]


def assert_law(weights, values, sums):
    """Weights times values are the sums, head by head."""
    H = weights.shape[1]
    v = values.unflatten(-1, (H, -1)).transpose(1, 2)
    torch.testing.assert_close((weights.dense() @ v).transpose(1, 2).flatten(2), sums, atol=2e-5, rtol=0)


def test_longformer_with_global_tokens_has_the_weights_that_it_returns_in_bands():
    model, inputs = built("Longformer", **BERT | LONG), {"input_ids": tokens(16)}
    inputs["global_attention_mask"] = torch.zeros(2, 16, dtype=torch.long)
    inputs["global_attention_mask"][:, 3] = 1
    outputs, seen = watched(model, inputs)
    with torch.no_grad():
        returned = model(**inputs, output_attentions=True)
    assert_identical(outputs[0], returned[0])
    assert not seen.missing and all(check.ok for check in seen.verify().values())
    for number, (local, whole) in enumerate(zip(returned.attentions, returned.global_attentions, strict=True)):
        weights = seen[number].dense()
        torch.testing.assert_close(weights[:, :, 3], whole[..., 0], atol=1e-5, rtol=0)  # the global token's row
        for i in (0, 7, 15):  # its weights on the global token, and on two tokens before to two after
            band = [j for j in range(max(i - 2, 0), min(i + 3, 16)) if j != 3]
            expected = local[:, :, i, [1 + j - i + 2 for j in band]]
            torch.testing.assert_close(weights[:, :, i, band], expected, atol=1e-5, rtol=0)
            torch.testing.assert_close(weights[:, :, i, 3], local[:, :, i, 0], atol=1e-5, rtol=0)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 16))


def test_big_bird_in_blocks_has_the_weights_that_it_computes_with():
    model, inputs = built("BigBird", **BERT | BIRD), {"input_ids": tokens(24)}
    _, seen = watched(model, inputs)
    with torch.no_grad():
        returned = model(**inputs, output_attentions=True).attentions
    assert "BlockSparse" in type(model.encoder.layer[0].attention.self).__name__
    for name, expected in zip(seen.names, returned, strict=True):
        weights = seen[name].dense()
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 24))
        assert_law(seen[name], *values_and_sums(model, name, inputs, "value"))
        assert (weights == 0).float().mean() > 0.1  # blocks that no query reads
        # In evaluation the random block is block 0, which is global too. transformers returns one of its two weights.
        torch.testing.assert_close(weights[..., 2:], expected[..., 2:], atol=1e-5, rtol=0)
        assert expected.sum(-1).min() < 0.9


def test_reformer_has_the_weights_of_its_chunks_and_of_its_hashes():
    model, inputs = built("Reformer", **REFORMER), {"input_ids": tokens(16)}
    torch.manual_seed(5)
    outputs, seen = watched(model, inputs)
    torch.manual_seed(5)
    with torch.no_grad():
        plain = model(**inputs)
    assert_identical(outputs[0], plain[0])
    assert len(seen) == 2 and not seen.missing
    for weights in seen.maps.values():
        assert weights.shape == (2, 2, 16, 16)
        torch.testing.assert_close(weights.dense().sum(-1), torch.ones(2, 2, 16), atol=1e-4, rtol=0)
    local = seen[0].dense()
    assert local[:, :, 12:, :4].abs().max() == 0  # chunks of 4 tokens see themselves and the chunk before
    torch.manual_seed(5)
    name = next(iter(seen.names[1:]))
    values, sums = values_and_sums(model, name, inputs, "value")
    assert_law(seen[1], values, sums)


def test_prophetnet_has_a_row_for_each_of_its_streams():
    model = built("ProphetNet", **PROPHET)
    inputs = {"input_ids": tokens(T), "decoder_input_ids": tokens(6)}
    with rg.watch(model) as seen, torch.no_grad():
        model(**inputs, use_cache=False)
    name = next(name for name in seen.names if "decoder" in name and seen[name].shape[-1] == 18)
    assert seen[name].shape == (2, 2, 18, 18) and not seen.missing
    with torch.no_grad():
        returned = model(**inputs, output_attentions=True)
    main, predicted = returned.decoder_attentions[0], returned.decoder_ngram_attentions[0]
    weights = seen[name].dense()
    torch.testing.assert_close(weights[:, :, :6, :6], main, atol=1e-5, rtol=0)
    for stream in range(2):  # reads the main stream and itself
        rows = weights[:, :, 6 * (stream + 1) : 6 * (stream + 2)]
        own = torch.cat([rows[..., :6], rows[..., 6 * (stream + 1) : 6 * (stream + 2)]], -1)
        torch.testing.assert_close(own, predicted[:, stream], atol=1e-5, rtol=0)


def test_nystromformer_with_landmarks_has_the_product_of_its_three_maps_and_its_convolution():
    model, inputs = built("Nystromformer", **BERT | NYSTROM), {"input_ids": tokens(16)}
    _, seen = watched(model, inputs)
    assert len(seen) == 2 and not seen.missing
    name = seen.names[0]
    values, sums = values_and_sums(model, name, inputs, "value")
    assert_law(seen[0], values, sums)
    assert seen[0].is_signed and seen[0].dense().min() < -1e-3  # by the inverse of the landmarks, and the convolution
    with pytest.raises(rg.RegardError, match="shares"):
        seen[0].entropy()


def test_deformable_attention_is_a_sparse_map_over_the_pixels():
    kind = transformers.models.deformable_detr.modeling_deformable_detr.DeformableDetrMultiscaleDeformableAttention
    torch.manual_seed(0)
    config = transformers.DeformableDetrConfig(d_model=16, num_feature_levels=2)
    module = sharpened(kind(config, num_heads=2, n_points=3).eval())
    shapes = [(4, 5), (2, 3)]
    places, pixels, queries = torch.rand(2, 5, 2, 2), torch.randn(2, 26, 16), torch.randn(2, 5, 16)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = module

        def forward(self):
            return self.attention(
                queries,
                encoder_hidden_states=pixels,
                reference_points=places,
                spatial_shapes=torch.tensor(shapes),
                spatial_shapes_list=shapes,
                level_start_index=torch.tensor([0, 20]),
            )[0]

    model = Layer()
    _, seen = watched(model, {})
    values, sums = values_and_sums(model, "attention", {}, "value_proj", "output_proj")
    assert seen[0].shape == (2, 2, 5, 26)
    assert_law(seen[0], values, sums)
    weights = seen[0].dense()
    assert weights.min() >= 0 and (weights > 0).sum(-1).max() <= 2 * 3 * 4  # four pixels around each of six places


class Squared(torch.nn.Module):
    """Attention whose values are squared after their projection: no weights say what it computes."""

    def __init__(self):
        super().__init__()
        self.num_heads = 2
        self.query, self.key, self.value = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in (self.query, self.key, self.value))
        weights = (q @ k.mT).softmax(-1)
        return (weights.masked_fill(weights < 0.21, 0) @ v.square()).transpose(1, 2).flatten(2)


class SquaredAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.other = Squared(), torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(self.other(x, x, x)[0])


def test_a_module_that_is_not_linear_in_its_values_is_missing_with_the_reason():
    _, seen = watched(SquaredAttention().eval(), {"x": torch.randn(2, 5, 8)})
    assert "masked_fill" in seen.missing["attention"] and "not linear in its values" in seen.missing["attention"]


@pytest.mark.parametrize("change", ["weight", "none"])
def test_a_measured_map_is_refused_after_the_parameters_changed(change):
    model, inputs = built("Longformer", **BERT | LONG), {"input_ids": tokens(16)}
    _, seen = watched(model, inputs)
    if change == "weight":
        with torch.no_grad():
            model.encoder.layer[0].attention.self.value.weight.mul_(2)
        with pytest.raises(rg.RegardError, match="parameters or inputs were changed"):
            seen[0].dense()
    else:
        assert seen[0].dense().shape == (2, 4, 16, 16)


def test_statistics_of_a_measured_map_are_those_of_its_weights():
    model, inputs = built("Longformer", **BERT | LONG), {"input_ids": tokens(16)}
    _, seen = watched(model, inputs)
    _, kept = watched(model, inputs, keep="statistics", reductions=[rg.maps.Entropy()])
    name = seen.names[0]
    expected = torch.special.entr(seen[name].dense()).sum(-1)
    torch.testing.assert_close(seen[name].summarize(rg.maps.Entropy())[0], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(kept.statistics[name].of(rg.maps.Entropy), expected, atol=1e-5, rtol=0)
    assert sum(len(kept._parts[n].calls) for n in kept.names) == 2  # the runs that measure are no calls


@pytest.mark.parametrize("name", ["GroundingDinoBiMultiHeadAttention"])
def test_attention_in_two_directions_is_one_map_of_both_sequences(name):
    torch.manual_seed(0)
    config = transformers.GroundingDinoConfig(d_model=16, encoder_ffn_dim=32, encoder_attention_heads=4)
    module = getattr(transformers.models.grounding_dino.modeling_grounding_dino, name)(config).eval()
    pixels, words = torch.randn(2, 6, 16), torch.randn(2, 4, 16)
    holder = torch.nn.Module()
    holder.attention = sharpened(module)
    holder.forward = lambda: holder.attention(pixels, words)
    (of_pixels, of_words), seen = watched(holder, {})
    weights = seen[0].dense()
    assert weights.shape == (2, 2, 10, 10)
    torch.testing.assert_close(weights[:, :, :6, 6:].flatten(0, 1), of_pixels[1], atol=1e-5, rtol=0)
    torch.testing.assert_close(weights[:, :, 6:, :6].flatten(0, 1), of_words[1], atol=1e-5, rtol=0)
    assert weights[:, :, :6, :6].abs().max() == 0 == weights[:, :, 6:, 6:].abs().max()


def test_values_that_are_given_are_measured_too():
    kind = transformers.models.d_fine.modeling_d_fine.DFineMultiscaleDeformableAttention
    torch.manual_seed(0)
    config = transformers.DFineConfig(d_model=16, decoder_attention_heads=2, num_feature_levels=2, decoder_n_points=2)
    holder = torch.nn.Module()
    holder.attention = sharpened(kind(config).eval())
    pixels, queries, boxes = torch.randn(2, 26, 16), torch.randn(2, 5, 16), torch.rand(2, 5, 1, 4)
    levels = {"spatial_shapes": torch.tensor([(4, 5), (2, 3)]), "spatial_shapes_list": [(4, 5), (2, 3)]}
    holder.forward = lambda: holder.attention(queries, None, boxes, pixels, **levels)
    outputs, seen = watched(holder, {})
    assert seen[0].shape == (2, 2, 5, 26)
    assert_law(seen[0], pixels, outputs[0])


def test_attention_in_windows_with_pooled_queries_is_measured_over_all_tokens():
    torch.manual_seed(0)
    kind = transformers.models.hiera.modeling_hiera.HieraMaskUnitAttention
    holder = torch.nn.Module()
    holder.attention = sharpened(kind(16, 16, 2, query_stride=2, window_size=2, use_mask_unit_attn=True).eval())
    holder.forward = lambda x: holder.attention(x, output_attentions=True)
    (_, returned), seen = watched(holder, {"x": torch.randn(2, 12, 16)})
    weights = seen[0].dense()  # 3 windows of 4 keys and 2 queries, interleaved: token t is in window t % 3
    assert weights.shape == (2, 2, 6, 12)
    for window in range(3):
        expected = returned[:, :, window]
        torch.testing.assert_close(weights[:, :, window::3, window::3], expected, atol=1e-5, rtol=0)
    assert torch.allclose(weights.sum(-1), torch.ones(2, 2, 6))
