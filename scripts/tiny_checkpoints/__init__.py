"""Tiny Gemma 4 checkpoints with all that a real folder has: for tests, benchmarks, and as the start of the demo's base.

Files, keys, dtypes, sharding, special tokens and their ids, and the chat template's form are those of the published
checkpoints; only the numbers are small, and random.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gemsmith.arch import PatchProjection, Tensor, Variant, Vision, VisionTower, text_tensors, vision_tensors
from gemsmith.arch import config as text_keys

SPECIAL_TOKENS = {
    0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>", 46: "<|tool>", 47: "<tool|>", 48: "<|tool_call>",
    49: "<tool_call|>", 50: "<|tool_response>", 51: "<tool_response|>", 52: '<|"|>', 98: "<|think|>",
    100: "<|channel>", 101: "<channel|>", 105: "<|turn>", 106: "<turn|>",
}  # fmt: skip
IMAGE_TOKENS = {
    "video_token": (91, "<|video|>"), "boi_token": (92, "<|image>"), "image_token": (93, "<|image|>"),
    "eoi_token": (94, "<image|>"), "boa_token": (95, "<|audio>"), "audio_token": (96, "<|audio|>"),
    "eoa_token": (97, "<audio|>"),
}  # fmt: skip
"""What a tokenizer has beside, where its model has vision: the key of tokenizer_config.json, id and token."""


def with_vision(variant: Variant) -> Variant:
    """The tiny variant with a tiny tower of its kind, or with the 12B's embedding of patches. Patches have 4 pixels."""
    small = VisionTower(layers=3, embed_dim=48, ffn=80, heads=3, head_dim=16, clips=True, patch=4, positions=128)
    large = VisionTower(layers=3, embed_dim=48, ffn=68, heads=2, head_dim=24, standardizes=True, patch=4, positions=128)
    unified = PatchProjection(embed_dim=48, patch=4, positions=96)
    vision: Vision = small if variant.per_layer_input else large
    return replace(variant, vision=unified if variant.model_type == "gemma4_unified" else vision)


def make_checkpoint(
    variant: Variant,
    folder: Path,
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
    shards: int = 2,
    chat_template: bool = True,
) -> Path:
    """The folder of a random checkpoint of the variant; the same seed gives the same bytes."""
    random = np.random.default_rng(seed)
    tensors = (*text_tensors(variant), *vision_tensors(variant))
    weights = {tensor.name: _random_weight(random, tensor) for tensor in tensors}
    write_checkpoint(variant, weights, folder, dtype=dtype, shards=shards)
    make_tokenizer(folder, chat_template=chat_template, vision=variant.vision is not None)
    return folder


def write_checkpoint(
    variant: Variant, weights: Mapping[str, np.ndarray], folder: Path, *, dtype: str = "bfloat16", shards: int = 2
) -> None:
    """Writes config.json, generation_config.json, the sharded weights and their index."""
    import ml_dtypes
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", make_config(variant, dtype))
    generation = {"bos_token_id": 2, "do_sample": True, "eos_token_id": [1, 106, 50], "pad_token_id": 0}
    _write_json(folder / "generation_config.json", generation)
    if (vision := variant.vision) is not None:
        patches = {"patch_size": vision.patch, "pooling_kernel_size": vision.pooling}
        model = "Gemma4Unified" if isinstance(vision, PatchProjection) else "Gemma4"
        processors = {  # as much of it as depends on the patches
            "processor_class": f"{model}Processor",
            "feature_extractor": {"feature_extractor_type": f"{model}AudioFeatureExtractor"},
            "image_processor": {"image_processor_type": f"{model}ImageProcessor", **patches},
            "video_processor": {"video_processor_type": f"{model}VideoProcessor", **patches},
        }
        _write_json(folder / "processor_config.json", processors)
    stored = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    total, seen = sum(weight.size for weight in weights.values()), 0
    files: list[dict[str, np.ndarray]] = [{} for _ in range(shards)]  # of about the same size
    for name, weight in weights.items():
        files[min(seen * shards // total, shards - 1)][name] = weight.astype(stored)
        seen += weight.size
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files, start=1):
        shard = f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard)
    index = {"metadata": {"total_size": total * stored.itemsize}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)


def make_config(variant: Variant, dtype: str = "bfloat16") -> dict[str, Any]:
    """The config.json of a checkpoint in the multimodal layout, with vision where the variant has it."""
    unified = "Unified" if variant.model_type == "gemma4_unified" else ""
    values = {
        "architectures": [f"Gemma4{unified}ForConditionalGeneration"],
        "dtype": dtype,
        "model_type": variant.model_type,
        "text_config": text_config(variant) | {"dtype": dtype},
        "tie_word_embeddings": True,
        "vision_config": vision_config(variant.vision) | {"dtype": dtype} if variant.vision else None,
        "audio_config": None,
    }
    names = {"eoa_token": "eoa_token_index"}
    ids = {names.get(key, f"{key}_id"): number for key, (number, _) in IMAGE_TOKENS.items()}
    return values | (ids if variant.vision else {})


def text_config(variant: Variant) -> dict[str, Any]:
    """The HF `text_config` of a variant, in the layout of the published checkpoints."""
    text: dict[str, Any] = {
        "model_type": f"{variant.model_type}_text",
        **{key: allowed[0] for key, allowed in text_keys.FIXED.items() if "." not in key},
        **{key: getattr(variant, field) for key, field in text_keys.COUNTS.items()},
        "attention_k_eq_v": variant.attention_k_eq_v,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "dtype": "bfloat16",
        "final_logit_softcapping": variant.softcap,
        "global_head_dim": variant.global_head_dim,
        "layer_types": variant.layer_types,
        "num_global_key_value_heads": variant.global_kv_heads if variant.attention_k_eq_v else None,
        "num_kv_shared_layers": variant.kv_shared_layers,
        "rms_norm_eps": variant.rms_eps,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": variant.rotary_fraction_global,
                "rope_theta": variant.rope_theta_global,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": variant.rope_theta_local, "rope_type": "default"},
        },
        "use_bidirectional_attention": "vision" if variant.bidirectional_images else None,
        "use_double_wide_mlp": variant.wide_shared_mlp,
    }
    if variant.model_type == "gemma4":
        text |= {
            "enable_moe_block": variant.experts > 0,
            "hidden_size_per_layer_input": variant.per_layer_input,
            **{key: getattr(variant, field) or None for key, field in text_keys.EXPERT_COUNTS.items()},
            "vocab_size_per_layer_input": variant.vocabulary,
        }
    return text


def vision_config(vision: Vision) -> dict[str, Any]:
    """The HF `vision_config` of a tower or of the 12B's, in the layout of the published checkpoints."""
    if isinstance(vision, PatchProjection):
        return {
            "model_type": "gemma4_unified_vision",
            **{key: getattr(vision, field) for key, (field, _) in text_keys.SHARED_COUNTS.items()},
            "mm_embed_dim": vision.embed_dim,
            "mm_posemb_size": vision.positions,
            "output_proj_dims": vision.embed_dim,
            "rms_norm_eps": vision.rms_eps,
        }
    return {
        "model_type": "gemma4_vision",
        **{key: allowed[0] for key, allowed in text_keys.VISION_FIXED.items()},
        **{key: getattr(vision, field) for key, (field, _) in text_keys.TOWER_COUNTS.items()},
        "num_key_value_heads": vision.heads,
        "rms_norm_eps": vision.rms_eps,
        "rope_parameters": {"rope_theta": vision.rope_theta, "rope_type": "default"},
        "standardize": vision.standardizes,
        "use_clipped_linears": vision.clips,
    }


def make_tokenizer(folder: Path, *, chat_template: bool = True, vision: bool = False) -> None:
    """Writes the tiny tokenizer (1024 ids, Gemma 4's special ids) and the chat template; with `vision` for images."""
    files = Path(__file__).parent
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = (files / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(_with_image_tokens(tokenizer) if vision else tokenizer, encoding="utf-8")
    config: dict[str, Any] = {"tokenizer_class": "GemmaTokenizer"}
    config |= {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk", "mask")}
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": 1_000_000}
    config |= {key: token for key, (_, token) in IMAGE_TOKENS.items()} if vision else {}
    _write_json(folder / "tokenizer_config.json", config)
    if chat_template:
        template = (files / "chat_template.jinja").read_text(encoding="utf-8")
        if vision:
            text_part = "{{- part.text | trim -}}"
            assert text_part in template
            any_part = "{{- '<|image|>' if part.type == 'image' else part.text | trim -}}"
            template = template.replace(text_part, any_part)
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _with_image_tokens(text: str) -> str:
    """The tokenizer.json with unused ids renamed."""
    tokenizer = json.loads(text)
    vocabulary = tokenizer["model"]["vocab"]
    for number, token in IMAGE_TOKENS.values():
        assert vocabulary.pop(f"<unused{number}>") == number
        vocabulary[token] = number
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": number, "content": token, **flags, "special": True})
    tokenizer["added_tokens"].sort(key=lambda added: added["id"])
    return json.dumps(tokenizer, ensure_ascii=False)


def _random_weight(random: np.random.Generator, tensor: Tensor) -> np.ndarray:
    """Weights of a size that keeps a tiny model's logits lively: norms near 1, matrices near 1/sqrt(in)."""
    if tensor.role == "scalar":
        return np.ones(tensor.shape, np.float32)
    if tensor.role == "vision_bound":  # some of what goes in and comes out is beyond 2.5
        sign = -1 if tensor.name.endswith("_min") else 1
        return np.array(sign * (2.5 + 0.3 * random.random()), np.float32)
    normal = random.standard_normal(tensor.shape)
    if tensor.name.endswith("bias"):
        return (0.1 * normal).astype(np.float32)
    if len(tensor.shape) == 1:
        return (1 + 0.1 * normal).astype(np.float32)
    if tensor.role == "vision_position":
        return (0.3 * normal).astype(np.float32)
    scale = 0.5 if tensor.role in ("embed", "per_layer_embed") else 1.0
    return (scale * normal / np.sqrt(tensor.shape[-1])).astype(np.float32)


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
