"""Facts of the catalog: families, years, and models that have a mechanism, checked in the files of transformers."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import transformers

import regard as rg
from extras import needs_transformers
from regard.catalog import mechanisms
from regard.catalog.entry import FAMILIES

MODELS = Path(transformers.__file__).parent / "models"
#: What the modeling or configuration file of a model with the mechanism holds.
EVIDENCE = {
    "alibi": "build_alibi_tensor|build_mpt_alibi_tensor",
    "axial_rope": r"class \w*VisionRotaryEmbedding",
    "bigbird": r"class BigBird\w*BlockSparseAttention",
    "block_local": r"class \w*LocalAttention|create_chunked_causal_mask",
    "cosine": r"normalize\(query_layer, dim=-1\)",
    "cross": "encoder_hidden_states",
    "differential": "lambda_q1",
    "gated_output": r"sigmoid\(gate",
    "deepseek_sparse": r"class \w*Indexer",
    "gated_deltanet": "chunk_gated_delta_rule",
    "grouped_query": "num_key_value_groups",
    "kimi_delta": "chunk_kimi_delta_attention",
    "lightning": "LightningAttention",
    "learned_positions": r"position_embeddings? = nn\.(Embedding|Parameter)|wpe = nn\.Embedding|LearnedPosition",
    "longrope": '"longrope"',
    "longformer": r"class (Longformer|LED\w*)SelfAttention",
    "mamba_1": "mamba_selective_scan|selective_scan_fn",
    "mamba_2": "mamba2_chunk_scan|mamba_chunk_scan_combined",
    "masked": "create_causal_mask",
    "mla": "kv_a_proj_with_mqa",
    "minimax_sparse": r"class \w*Indexer",
    "multi_head": "num_heads|num_attention_heads",
    "multi_query": "multi_query",
    "multimodal_rope": "mrope_section",
    "position_temperature": "attn_temperature_tuning|get_llama_4_attn_scale|_llama_4_scaling",
    "qk_norm": r"self\.q_norm = ",
    "neighborhood": "NeighborhoodAttention",
    "nystrom": "num_landmarks",
    "perceiver": "PerceiverSelfAttention",
    "rope": "apply_rotary_pos_emb",
    "self_attention": r"class \w*(Self)?Attention",
    "shaw": "relative_key",
    "short_convolution": r"class \w*ShortConv",
    "sinks": r"self\.sinks",
    "sinusoidal": "SinusoidalPositionalEmbedding|sinusoidal_pos_embds|create_sinusoidal_embeddings",
    "sliding_window": "sliding_window",
    "softcap": "attn_logit_softcapping",
    "t5": "_relative_position_bucket",
    "token_shift": r"self\.time_shift",
    "transformer_xl": "rel_shift|linear_pos",
    "yarn": '"yarn"|yarn_get_mscale',
}


@needs_transformers("5.23", "it has all models that the catalog names")
@pytest.mark.parametrize("name", mechanisms())
def test_a_mechanism_has_its_family_its_year_and_models_that_have_it(name):
    entry = mechanisms()[name]
    assert entry.family in FAMILIES
    assert str(entry.year) in re.findall(r"\b(?:19|20)\d\d\b", entry.paper)
    assert not entry.used_by or name in EVIDENCE, (
        f"used_by names models with {name!r}: add to EVIDENCE a regular expression that their code matches"
    )
    for model in entry.used_by:
        files = [*(MODELS / model).glob("modeling_*.py"), *(MODELS / model).glob("configuration_*.py")]
        code = "".join(path.read_text() for path in files)
        assert re.search(EVIDENCE[name], code) and code, f"{name}: {model}"


#: Options of which the mechanism of a paper has another default than its piece has elsewhere.
OTHER_DEFAULTS = {("reformer", "rounds")}


@pytest.mark.parametrize("name", mechanisms())
def test_an_option_has_the_default_of_the_piece_that_it_is_given_to(name):
    options = inspect.signature(mechanisms()[name].build).parameters
    attention, *_ = mechanisms()[name].example()
    for piece in attention.pieces() if isinstance(attention, rg.Attention) else ():
        for option, parameter in inspect.signature(type(piece)).parameters.items():
            is_free = parameter.default not in (parameter.empty, None) and (name, option) not in OTHER_DEFAULTS
            if is_free and option in options and options[option].default is not parameter.empty:
                assert options[option].default == parameter.default, option


def test_an_unknown_family_is_refused():
    with pytest.raises(rg.RegardError, match="Did you mean 'scored'"):
        rg.types.CatalogEntry(build=rg.mechanism("masked").build, formula="", paper="", cost="", family="scores")


@pytest.mark.parametrize(
    "name", ["FlashAttention", "flash_attention_2", "SDPA", "sdpa", "xFormers", "memory-efficient attention"]
)
def test_a_kernel_is_told_from_a_mechanism(name):
    with pytest.raises(rg.RegardError, match=r"a way to compute softmax attention.*'self_attention'.*regard\.plan"):
        rg.mechanism(name)
