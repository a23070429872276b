"""Builds a small model with random weights from any configuration class of transformers, and draws inputs for it.

Names of the settings decide their small values. Several profiles are tried, from the smallest to the default sizes
with few layers, because some classes check sizes against each other.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from itertools import count
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.configuration_utils import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

LARGEST = 100e6
VOCABULARY, DRAWN = 64, 40
#: Patterns of settings -> their small value; the first that fits decides.
LAYERS = (
    (r"^(num_hidden_layers|n_layers?|num_layers|depth|num_blocks|num_encoder_blocks)$", 2),
    (r"^num_(encoder|decoder|attention|main|resampler|global|local)_(layers|blocks)$", 2),
    (
        r"(^|_)(encoder|decoder|text|vision|backbone|attention|attn|predictor|resampler|perceiver)"
        r"_?(num_)?(hidden_)?(layers|depth|n_layer|blocks)$",
        2,
    ),
    (r"^(num_nextn_predict_layers|num_kv_shared_layers)$", 0),
    (r"^(entity_)?vocab_size$", VOCABULARY),
)
WIDTHS = (
    (r"(^|_)(num_key_value_heads|num_kv_heads|n_kv_heads|multi_query_group_num)$", 2),
    (r"(^|_)(num_attention_heads|attention_heads|n_heads?|num_heads|index_n_heads|mamba_n_heads)$", 4),
    (r"^(mamba_d_head|linear_key_head_dim|linear_value_head_dim|mamba_d_state|state_size|ssm_state_size)$", 16),
    (r"^(linear_num_key_heads|linear_num_value_heads)$", 4),
    (r"^(head_dim|attention_head_dim|v_head_dim|d_kv|rotary_dim)$", 8),
    (r"^(qk_rope_head_dim|qk_nope_head_dim|index_head_dim)$", 8),
    (r"^qk_head_dim$", 16),
    (r"^(q_lora_rank|kv_lora_rank|o_lora_rank)$", 16),
    (r"^(hidden_size|d_model|n_embd|dim|embed_dim|hidden_dim|embedding_size|emb_dim|d_embed|projection_dim)$", 32),
    (r"^(out|decoder|encoder|text|fusion|attention)_hidden_size$", 32),
    (r"^(encoder_hidden_dim|word_embed_proj_dim|hidden_size_per_layer_input)$", 32),
    (r"(^|_)(intermediate_size|ffn_dim|d_ff|d_inner|mlp_dim|n_inner|intermediate_dim)$", 32),
    (r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts)$", 4),
    (r"^(num_experts_per_tok|moe_topk|num_experts_per_token|moe_k)$", 2),
    (r"^(n_groups?|topk_group|first_k_dense_replace|n_shared_experts|num_shared_experts)$", 1),
    (r"^(max_position_embeddings|n_positions|max_target_positions|max_2d_position_embeddings)$", 64),
    (r"^(index_topk|sliding_window|attention_chunk_size|local_attention)$", 4),
    (r"^(d_latents|num_latents|num_self_attends_per_block)$", 8),
    (r"^(num_mel_bins|latent_query_num)$", 16),
    (r"^spec_size$", 64),
    (r"^max_source_positions$", 24),
    (r"^num_conv_pos_embeddings$", 16),
    (r"^num_conv_pos_embedding_groups$", 2),
)
#: Settings that are None by default and that a small model needs.
UNSET = {"prediction_length": 4, "vocab_size": VOCABULARY, "num_experts_per_tok": 2, "n_routed_experts": 4}
UNSET |= {"head_dim": 8, "pad_token_id": 0, "mask_token_id": 3, "num_key_value_heads": 2, "sliding_window": 4}
UNSET |= {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 32, "attn_layer_indices": [1]}
#: As many key heads as heads: latent attention has no other form.
EQUAL = ((r"(^|_)(num_key_value_heads|num_kv_heads)$", 4),)
PICTURES = ((r"^image_size$", 32), (r"^patch_size$", 8), (r"^num_queries$", 8), (r"^num_frames$", 4))
#: Enough layers for hybrids, which attend in every fourth or eighth layer only.
DEEP = ((r"^num_hidden_layers$", 8), (r"^(attn_layer_period|full_attention_interval)$", 2), (r"^attn_layer_offset$", 1))
PROFILES: tuple[tuple[tuple[str, int], ...], ...] = (
    LAYERS + WIDTHS + PICTURES,
    LAYERS + EQUAL + WIDTHS + PICTURES,
    DEEP + LAYERS + WIDTHS + PICTURES,
    LAYERS + WIDTHS,
    LAYERS + PICTURES,
    LAYERS,
    (),
)
Profile = tuple[tuple[str, int], ...]
SPECIAL = re.compile(r"_token_(id|index)$|^(eos|bos|pad)_token_id$")
PLACEHOLDER = re.compile("image|video|audio|media|speech|patch")
FOUR_STAGES = {"out_features": ["stage1", "stage2", "stage3", "stage4"], "out_indices": None}
#: Layers that share their attention: the first lends its parameters to the second.
HYBRIDS: dict[str, Any] = {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3}
HYBRIDS |= {"attention_hidden_size": 64, "attention_head_dim": 16}
#: An EfficientNet of two convolutional blocks.
FEW_CONVOLUTIONS: dict[str, Any] = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "kernel_sizes": [3, 3]}
FEW_CONVOLUTIONS |= {"in_channels": [32, 8], "out_channels": [8, 32], "strides": [1, 2], "num_block_repeats": [1, 1]}
FEW_CONVOLUTIONS |= {"expand_ratios": [1, 6]}
#: Settings of single classes, by their `model_type`, that no pattern gives.
OF_CLASS: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "zamba": HYBRIDS,
    "zamba2": HYBRIDS | {"mamba_headdim": 8, "chunk_size": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "clap_audio_model": {"depths": [1, 1], "num_attention_heads": [2, 4], "num_hidden_layers": 2, "hidden_size": 192},
    "xmod": {"default_language": "en_XX"},
    "align_vision_model": FEW_CONVOLUTIONS,
    "efficientnet": FEW_CONVOLUTIONS | {"hidden_dim": 1280},
    "mistral4": {"head_dim": 16},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "csm": {"codec_config": {"upsample_groups": 32}},
    "chameleon": {"vocabulary_map": {"<image>": 5, "IMGIMGAZ": 6}, "vq_config": {"base_channels": 32}},
    "emu3": {
        "vocabulary_map": {"<image>": 5, "<|extra_200|>": 6, "<|visual token 000000|>": 7},
        "vq_config": {"base_channels": 32},
    },
    "dia_decoder": {"cross_hidden_size": 32},
    "gemma3n": {"vision_soft_tokens_per_image": 16},
    "gemma3n_vision": {"hidden_size": 2048, "model_args": {"channel_multiplier": 0.05, "msfa_output_resolution": 4}},
    "timm_wrapper": {"architecture": "test_vit"},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "sam2": {"prompt_encoder_config": {"patch_size": 16}},
    "sam2_vision_model": {"backbone_feature_sizes": [[8, 8], [4, 4], [2, 2]]},
    "sam_hq": {"prompt_encoder_config": {"image_embedding_size": 4}, "mask_decoder_config": {"vit_dim": 32}},
    "sam3_tracker": {"vision_config": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]], "fpn_hidden_size": 32}},
    "qwen2_5_omni": {"enable_audio_output": False},
    "qwen3_omni_moe": {"enable_audio_output": False},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "t5gemma2_encoder": {"dropout_rate": 0.0},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 32},
    "instructblipvideo": {"video_token_id": 5},
    "shieldgemma2": {"mm_tokens_per_image": 4, "yes_token_index": 1, "no_token_index": 2},
    "depth_pro": {"image_size": 32, "intermediate_hook_ids": [1, 0]},
    "sam_hq_vision_model": {"output_channels": 32, "num_pos_feats": 16},
    "musicgen": {"text_encoder": "t5", "audio_encoder": "encodec", "decoder": "musicgen_decoder"},
    "musicgen_melody": {"text_encoder": "t5", "audio_encoder": "encodec", "decoder": "musicgen_melody_decoder"},
}
OF_CLASS |= {key: {"backbone_config": FOUR_STAGES} for key in ("mask2former", "oneformer")}
BACKBONE = {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}


class NotBuilt(Exception):
    """A configuration class of which no small model can be built."""


def small_models(key: str) -> Iterator[tuple[nn.Module, str] | Exception]:
    """Small models of `CONFIG_MAPPING[key]` with random, sharp weights, the smallest first; or why one has none."""
    for number, config in enumerate(small_configs(key)):
        if isinstance(config, Exception):
            yield config
            continue
        kinds = model_classes(key, type(config))
        if not kinds:
            yield NotBuilt("transformers has no model class of its own for this configuration")
            return
        for kind in kinds:
            try:
                model = _built(kind, config)
            except Exception as problem:
                yield problem
                continue
            yield from ((part, f"{kind.__name__}{name}, profile {number}") for name, part in _callable(model))
            if not any(_callable(model)):
                yield NotBuilt(f"{kind.__name__} has no forward: it runs by generate alone")


def _callable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model, or its models that have a forward if it has none."""
    if _has_forward(model):
        yield "", model
        return
    for name, part in model.named_children():
        if isinstance(part, transformers.PreTrainedModel) and _has_forward(part):
            yield f".{name}", part


def _has_forward(model: nn.Module) -> bool:
    return type(model).forward is not nn.Module.forward


def small_configs(key: str) -> Iterator[PretrainedConfig | Exception]:
    """Small configurations, the smallest first; an exception for each profile that the class refuses."""
    try:
        kind = CONFIG_MAPPING[key]
        base = kind()
    except Exception as problem:
        yield problem
        return
    for profile in PROFILES:
        try:
            yield kind(**shrunk(base, profile, count(DRAWN + 1)))
        except Exception as problem:
            yield problem


def shrunk(config: PretrainedConfig, profile: Profile, numbers: Iterator[int]) -> dict[str, Any]:
    """The settings of a configuration that a profile changes, those of its parts included."""
    changed: dict[str, Any] = {}
    given = inspect.signature(type(config).__init__).parameters
    has_words = profile and isinstance(setting(config, "vocab_size", None), int)
    for name in {**{name: None for name in given if name not in ("self", "kwargs")}, **vars(config)}:
        try:
            value = getattr(config, name, None)
        except Exception:  # a setting that differs from layer to layer
            continue
        if isinstance(value, PretrainedConfig):
            changed[name] = _shrunk_part(value, profile, numbers)
        elif value is None and has_words and re.search("image_token_i", name):
            changed[name] = next(numbers)
        elif SPECIAL.search(name) and type(value) is int and has_words:
            if value >= DRAWN or PLACEHOLDER.search(name):
                changed[name] = next(numbers)
        elif type(value) is int and (small := _small(name, value, profile)) is not None:
            changed.setdefault(name, small)
        elif value is None and WIDTHS[0] in profile and name in UNSET:
            changed[name] = UNSET[name]
        elif name == "depths" and profile and isinstance(value, list | tuple):
            changed[name] = [1] * len(value)
        elif name in ("num_heads", "num_attention_heads") and WIDTHS[0] in profile and isinstance(value, list | tuple):
            changed[name] = [2, 4, 4, 4, 4, 4][: len(value)]
        elif name in ("image_size", "input_size") and PICTURES[0] in profile and isinstance(value, list | tuple):
            changed[name] = [32] * len(value)
        elif name == "layer_types" and profile and value and len(set(value)) > 1:
            changed |= {name: list(dict.fromkeys(value))[:4], "num_hidden_layers": min(len(set(value)), 4)}
        elif name == "per_layer_config" and profile:
            changed[name] = None
        elif isinstance(value, dict) and "rope_type" in value and profile[len(LAYERS) :] and _has_sections(config):
            whole = {"partial_rotary_factor": 1.0} if "partial_rotary_factor" in value else {}
            changed[name] = {**value, **whole, "mrope_section": [2, 1, 1]}
    if changed.get("num_hidden_layers") and isinstance(getattr(config, "out_features", None), list):
        count = min(len(config.out_features), 4)
        changed |= {
            "num_hidden_layers": 4,
            "out_features": [f"stage{n}" for n in range(5 - count, 5)],
            "out_indices": None,
        }
    if {"expand", "num_heads", "head_dim", "hidden_size"} <= changed.keys() | vars(
        config
    ).keys() and "num_heads" in changed:
        changed["head_dim"] = changed["hidden_size"] * config.expand // changed["num_heads"]
    own = OF_CLASS.get(config.model_type, {}) if profile else {}
    for name, value in own.items():
        joined = {**changed.get(name, {}), **value} if isinstance(value, dict) else value
        changed[name] = _part(joined, profile, numbers)
    return changed


def _part(value: Any, profile: Profile, numbers: Iterator[int]) -> Any:
    """The small configuration of the class that `value` names, or `value` itself."""
    if not isinstance(value, str) or value not in CONFIG_MAPPING:
        return value
    return _shrunk_part(CONFIG_MAPPING[value](), profile, numbers)


def _shrunk_part(part: PretrainedConfig, profile: Profile, numbers: Iterator[int]) -> dict[str, Any]:
    if part.model_type == "timm_backbone":  # a package that is not installed
        return {**BACKBONE, "out_features": [f"stage{n}" for n in range(5 - len(part.out_indices or [1]), 5)]}
    layers = getattr(part, "num_hidden_layers", None)
    settings = part.to_dict().items()
    kept = {name: value for name, value in settings if name != "per_layer_config" and not _of_layers(value, layers)}
    return {**kept, **shrunk(part, profile, numbers), "model_type": part.model_type}


def _has_sections(config: PretrainedConfig) -> bool:
    """Whether the positions of this class are split into sections for time, height and width."""
    module = _modeling(type(config))
    return hasattr(module, "__file__") and "mrope_section" in inspect.getsource(module)


def _of_layers(value: Any, num_layers: Any) -> bool:
    """Whether a setting has an entry for each layer, so that it is not that of a model with fewer layers."""
    return isinstance(value, list | tuple) and len(value) == num_layers


def _small(name: str, value: int, profile: Profile) -> int | None:
    for pattern, small in profile:
        if re.search(pattern, name):
            return small if value > small else None
    return None


def model_classes(key: str, kind: type[PretrainedConfig]) -> list[type[nn.Module]]:
    """The model classes of a configuration class, the bare model first; those with a head only if it has none."""
    module = _modeling(kind)
    names = MODEL_MAPPING_NAMES.get(key, ())
    named = [getattr(transformers, name, None) for name in ([names] if isinstance(names, str) else names)]
    bare = [found for found in named if inspect.isclass(found) and _takes(found, kind)]
    if bare:
        return bare[:1]
    own = [
        found
        for found in vars(module).values()
        if inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel) and found.config_class is kind
    ]
    own = [found for found in own if "forward" in vars(found) or not found.__name__.endswith("PreTrainedModel")]
    return sorted(own, key=lambda found: (found.__name__.endswith("PreTrainedModel"), len(found.__name__)))[:3]


def _takes(model: type[nn.Module], kind: type[PretrainedConfig]) -> bool:
    """Whether a model class is built from this configuration class: some mappings name a part of the model."""
    return getattr(model, "config_class", None) is None or issubclass(kind, model.config_class)


def _modeling(kind: type[PretrainedConfig]) -> Any:
    """The module with the model classes of a configuration class; an empty one if there is none."""
    try:
        return importlib.import_module(kind.__module__.replace("configuration_", "modeling_"))
    except ModuleNotFoundError:
        return ModuleType("none")


def _built(kind: type[nn.Module], config: PretrainedConfig) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(config).parameters())
    if size > LARGEST:
        raise NotBuilt(f"{size / 1e6:,.0f} million parameters at its smallest, more than {LARGEST / 1e6:.0f}")
    torch.manual_seed(1)
    return sharpened(kind._from_config(config).eval())


@torch.no_grad()
def sharpened(model: nn.Module) -> nn.Module:
    """Matrices large enough for weights far from uniform: at the usual scale every map looks alike."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and parameter.is_floating_point():
            parameter.normal_(0, 1.0 if "embed" in name else 1.6 * parameter[0].numel() ** -0.5)
    return model


def inputs_of(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Inputs that the model's `forward` may take, the likeliest first."""
    config = model.config
    names = inspect.signature(model.forward).parameters
    drawn = _drawn(config)
    if any("grid_thw" in name for name in names):
        drawn["pixel_values"] = drawn["hidden_states"]
    first = {name: value for name, value in drawn.items() if name in names}
    main = getattr(model, "main_input_name", "input_ids")
    main = main if isinstance(main, str) else main[0]
    words = {"input_ids", "decoder_input_ids", "bbox"}
    beside = {
        "pixel_values",
        "image_attention_mask",
        "image_grid_thw",
        "input_features",
        "input_values",
        "past_values",
        "image_embeds_position_mask",
        "decoder_input_values",
        *words,
    }
    required = [n for n, p in names.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    beside |= set(required)
    if {"spatial_shapes", "pixel_position_ids"} & names.keys():
        yield {**{n: v for n, v in first.items() if n in beside}, **_pictures_in_patches(config, names)}
    pictures = {name for name in first if name.startswith(("pixel", "input_feat", "input_val", "image", "audio"))}
    without = {name: value for name, value in first.items() if name not in pictures}
    yield {name: value for name, value in first.items() if name == main or name in beside}
    yield first
    if {"input_ids", "pixel_values", "input_features"} <= first.keys():  # pictures without a sound
        yield {name: value for name, value in first.items() if name in ("input_ids", "pixel_values")}
    yield {name: value for name, value in first.items() if name == main or name in words}
    if "input_ids" in without:
        yield without
    if {"input_values", "input_features"} <= first.keys():  # one of two kinds of sound
        yield {name: value for name, value in first.items() if name not in ("input_features", "inputs")}
    if "input_ids" in first and hasattr(config, "audio_length_per_tok"):  # a token for each frame of the sound
        yield {**first, "input_ids": first["input_ids"][:, :6]}
    if "input_features" in first:  # time before frequencies
        yield {**{n: v for n, v in first.items() if n in beside}, "input_features": drawn["input_features"].mT}
    if "pixel_values" in first and first["pixel_values"].ndim == 4:
        yield {**{n: v for n, v in first.items() if n in beside}, "pixel_values": drawn["pixel_values_videos"]}
        for frames in (1, 2):
            repeated = torch.stack([first["pixel_values"]] * frames, 1)
            yield {**{n: v for n, v in first.items() if n in beside}, "pixel_values": repeated}
    yield {name: value for name, value in first.items() if name == main}
    yield {name: value for name, value in first.items() if name in pictures}
    if main in names and main in first and first[main].is_floating_point():
        for shape in (
            (2, 9, _width(config)),
            (2, 16, _width(config)),
            (2, 400),
            (2, 1, 4000),
            (2, 16, 64),
            (2, 64, 16),
        ):
            yield {main: torch.randn(shape)}
    elif main in names and "num_codebooks" in vars(config):
        yield {main: drawn["input_ids"].repeat(config.num_codebooks, 1)}
        for width in (config.num_codebooks, config.num_codebooks + 1):  # with a text token beside those of the sound
            yield {main: torch.randint(3, 20, (2, 9, width))}
    elif main in names:
        for shape in ((2, 9, _width(config)), (2, 3, 32, 32), (2, 4000), (2, 1, 4000)):
            yield {main: torch.randn(shape)}
    yield {name: first.get(name, torch.randn(2, 9, _width(config))) for name in required}


def _pictures_in_patches(config: PretrainedConfig, names: Any) -> dict[str, Any]:
    """Two pictures of four by four patches, with the place or the number of the patches."""
    patch = _pair(setting(config, "patch_size", 8))[0]
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(2, -1, -1)
    drawn = {
        "pixel_values": torch.rand(2, 16, 3 * patch * patch),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": torch.full((2, 2), 4),
        "pixel_position_ids": places,
    }
    return {name: value for name, value in drawn.items() if name in names}


def _drawn(config: PretrainedConfig) -> dict[str, Any]:
    """A drawn value for every name of an input that is known."""
    torch.manual_seed(2)
    vocabulary = setting(config, "vocab_size", None)
    largest = max(min(DRAWN, vocabulary if isinstance(vocabulary, int) else DRAWN), 4)
    height, width = _pair(setting(config, "image_size", 64))
    channels = setting(config, "num_channels", 3)
    channels = channels if isinstance(channels, int) else 3
    frames = setting(config, "num_frames", 4)
    mels = setting(config, "num_mel_bins", None) or setting(config, "feature_size", None) or 16
    sounds = 2 * (setting(config, "max_source_positions", 24) or 24)
    image = torch.randn(2, channels, height, width)
    patch = _pair(setting(config, "patch_size", 8))[0]
    temporal = setting(config, "temporal_patch_size", 1) or 1
    depth = setting(config, "in_channels", None) or channels
    depth = depth if isinstance(depth, int) else channels
    past = (setting(config, "context_length", 8) or 8) + max(setting(config, "lags_sequence", None) or [0])
    future = setting(config, "prediction_length", 4) or 4
    series = setting(config, "num_input_channels", None) or setting(config, "input_size", 1) or 1
    width_of = (series,) if series > 1 or setting(config, "num_input_channels", None) else ()
    grid = torch.tensor([[1, 4, 4]])
    patches = torch.randn(16, depth * temporal * patch * patch)
    boxes = torch.randint(0, 20, (2, 9, 4)).cumsum(-1)
    static = setting(config, "num_static_categorical_features", 0) or 0
    times = (setting(config, "num_time_features", 0) or 0) + (setting(config, "num_dynamic_real_features", 0) or 0)
    codebooks = getattr(getattr(config, "decoder", None), "num_codebooks", 1)
    queries = setting(config, "latent_query_num", 0)
    drawn = {
        "input_ids": torch.randint(3, largest, (2, 9 + queries)),
        "image_embeds_position_mask": torch.tensor([[0] + [1] * queries + [0] * 8] * 2),
        "decoder_input_values": torch.randn(2, 6, _width(config)),
        "states": torch.randn(2, 9, setting(config, "state_dim", 17)),
        "actions": torch.randn(2, 9, setting(config, "act_dim", 4)),
        "returns_to_go": torch.randn(2, 9, 1),
        "rewards": torch.randn(2, 9, 1),
        "timesteps": torch.arange(9).expand(2, 9),
        "task_inputs": torch.randint(3, largest, (2, setting(config, "task_seq_len", 9))),
        "past_values_padding": torch.zeros(2, past, dtype=torch.long),
        "freq": torch.zeros(2, 1, dtype=torch.long),
        "flattened_patches": _flattened_patches(config),
        "decoder_input_ids": torch.randint(3, largest, (2 * codebooks, 6)),
        "bbox": boxes,
        "pixel_values": image,
        "pixel_values_videos": torch.randn(2, frames if isinstance(frames, int) else 4, channels, height, width),
        "images": image,
        "input_features": torch.randn(2, mels, sounds),
        "input_values": torch.randn(2, 4000),
        "audio_values": torch.randn(2, 1, 4000),
        "hidden_states": patches,
        "grid_thw": grid,
        "image_grid_thw": grid,
        "past_values": torch.randn(2, past, *width_of),
        "past_time_features": torch.randn(2, past, times),
        "past_observed_mask": torch.ones(2, past, *width_of),
        "future_values": torch.randn(2, future, *width_of),
        "future_time_features": torch.randn(2, future, times),
        "context_values": torch.randn(2, past),
        "inputs": torch.randn(2, 9, setting(config, "d_model", 32) or 32),
        "qformer_input_ids": torch.randint(3, largest, (2, 5)),
        "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(2, 1, 4, dtype=torch.long),
        "input_features_mask": torch.ones(2, sounds, dtype=torch.bool),
        "audio_mel": torch.randn(2, sounds, mels),
        "audio_mel_mask": torch.zeros(2, sounds, dtype=torch.bool),
        "input_points": torch.rand(2, 1, 2, 2) * 20,
        "image_attention_mask": torch.ones(2, 9, 1),
        "xpath_tags_seq": torch.zeros(2, 9, 50, dtype=torch.long),
        "visual_feats": torch.randn(2, 4, setting(config, "visual_feat_dim", 16) or 16),
        "visual_pos": torch.rand(2, 4, 4),
        "entity_ids": torch.randint(3, largest, (2, 3)),
        "entity_position_ids": torch.tensor([[[0, 1, -1], [2, 3, -1], [4, -1, -1]]] * 2),
    }
    if (delays := getattr(config, "delay_pattern", None)) is not None:  # a token for each channel of a sound
        drawn["decoder_input_ids"] = torch.randint(3, largest, (2, 6, len(delays)))
    if (size := setting(config, "spec_size", None)) is not None:  # a sound as a picture
        drawn["input_features"] = torch.randn(2, 1, size * size // mels, mels)
    if isinstance(length := setting(config, "max_length", None), int) and hasattr(config, "time_stride"):
        drawn["input_values"] = torch.randn(2, length, mels)
    if static:
        drawn["static_categorical_features"] = torch.zeros(2, static, dtype=torch.long)
    real = setting(config, "num_static_real_features", 0) or 0
    if real:
        drawn["static_real_features"] = torch.randn(2, real)
    return drawn


def _flattened_patches(config: PretrainedConfig) -> Tensor:
    """Patches that begin with their row and their column."""
    places = torch.cartesian_prod(torch.arange(1, 4), torch.arange(1, 4)).expand(2, -1, -1)
    return torch.cat([places, torch.randn(2, 9, setting(config, "patch_embed_hidden_size", 768))], -1)


def with_the_width_of(problem: str, model: nn.Module) -> Iterator[dict[str, Any]]:
    """The main input again, as wide as the first layer expects that refused it."""
    main = getattr(model, "main_input_name", "input_ids")
    found = re.search(r"shape \[\*, (\d+)\]|\(\d+x\d+ and (\d+)x\d+\)|to have (\d+) channels", problem)
    if found is None or not isinstance(main, str) or main not in names_of(model) or main == "input_ids":
        return
    width = int(next(filter(None, found.groups())))
    others = [n for n in _drawn(model.config) if n.startswith("decoder_input") and n in names_of(model)]
    for shape in ((2, 16, width), (2, width, 16), (16, width)):
        yield {main: torch.randn(shape), **{n: _drawn(model.config)[n] for n in others}}


def setting(config: PretrainedConfig, name: str, default: Any) -> Any:
    """A setting of the configuration, or of the first of its parts that has it."""
    try:
        if hasattr(config, name):
            return getattr(config, name)
    except Exception:  # it differs from layer to layer
        return default
    for part in vars(config).values():
        if isinstance(part, PretrainedConfig):
            found = setting(part, name, None)
            if found is not None:
                return found
    return default


def _width(config: PretrainedConfig) -> int:
    width = setting(config, "hidden_size", None) or setting(config, "d_model", 32)
    return width if isinstance(width, int) else 32


def _pair(size: Any) -> tuple[int, int]:
    return (
        (size, size) if isinstance(size, int) else (int(size[-2]), int(size[-1])) if len(size) > 1 else (size[0],) * 2
    )


def in_one_line(problem: Exception) -> str:
    """The kind of an exception and the beginning of its message."""
    text = " ".join(str(problem).split())
    return f"{type(problem).__name__}: {text[:240]}"


def with_placeholders(model: nn.Module, inputs: dict[str, Any], problem: str) -> dict[str, Any] | None:
    """The inputs with a placeholder in the text for each feature of an image or a sound, if these were missing."""
    found = re.search(
        r"(image|video|audio|speech)?.*tokens:? *(?:tensor\()?(\d+)\)?[,.]? *(?:and )?features:? *(\d+)", problem, re.I
    )
    if found is None or "input_ids" not in inputs:
        return None
    kind, number = (found[1] or "image").lower(), int(found[3])
    names = (f"{kind}_token_id", f"{kind}_token_index", "image_token_id", "image_token_index", "media_token_id")
    placeholder = next((setting(model.config, name, None) for name in names if setting(model.config, name, None)), None)
    num_texts = 1 if any("grid" in name for name in inputs) or number % 2 else 2
    if placeholder is None or number > 4000:
        return None
    text = inputs["input_ids"][:num_texts]
    filled = torch.full((num_texts, number // num_texts), placeholder)
    words = torch.cat([text[:, :2], filled, text[:, 2:]], 1)
    typed = {"mm_token_type_ids": (words == placeholder).long()} if kind == "image" else {}
    return {**inputs, "input_ids": words, **{name: typed[name] for name in typed if name in names_of(model)}}


def names_of(model: nn.Module) -> set[str]:
    """The names that the model's `forward` takes."""
    return set(inspect.signature(model.forward).parameters)
