"""The five published variants, and a tiny one of each kind for tests and the demo.

Source: the published config.json files, as read on 2026-08-21. To add a variant, add a row and its parameter count to
tests/arch.
"""

import re
from typing import Any

from gemsmith.arch.config import PatchProjection, Variant, VisionTower
from gemsmith.errors import RecipeError, suggest

_SMALL_TOWER = VisionTower(layers=16, embed_dim=768, ffn=3072, heads=12, head_dim=64, clips=True)
_LARGE_TOWER = VisionTower(layers=27, embed_dim=1152, ffn=4304, heads=16, head_dim=72, standardizes=True)
_Fields = dict[str, Any]
# What several share. Each tiny variant keeps the irregular parts of its kind: K = V, kv sharing and per-layer inputs,
# experts, the 12B's own classes.
_SMALL: _Fields = {"sliding_window": 512, "per_layer_input": 256, "context": 131_072, "vision": _SMALL_TOWER}
_LARGE: _Fields = {"attention_k_eq_v": True, "bidirectional_images": True}
_TINY: _Fields = {"head_dim": 32, "global_head_dim": 64, "sliding_window": 64, "vocabulary": 1024, "context": 2048}
_ALL = (
    Variant(name="gemma4-e2b", layers=35, global_every=5, embed_dim=1536, ffn=6144, heads=8, kv_heads=1,
            global_kv_heads=1, kv_shared_layers=20, wide_shared_mlp=True, **_SMALL,
            hub_ids=("google/gemma-4-E2B", "google/gemma-4-E2B-it")),
    Variant(name="gemma4-e4b", layers=42, global_every=6, embed_dim=2560, ffn=10_240, heads=8, kv_heads=2,
            global_kv_heads=2, kv_shared_layers=18, **_SMALL,
            hub_ids=("google/gemma-4-E4B", "google/gemma-4-E4B-it")),
    Variant(name="gemma4-12b", layers=48, global_every=6, embed_dim=3840, ffn=15_360, heads=16, kv_heads=8,
            global_kv_heads=1, model_type="gemma4_unified", vision=PatchProjection(embed_dim=3840), **_LARGE,
            hub_ids=("google/gemma-4-12B", "google/gemma-4-12B-it")),
    Variant(name="gemma4-26b-a4b", layers=30, global_every=6, embed_dim=2816, ffn=2112, heads=16, kv_heads=8,
            global_kv_heads=2, experts=128, experts_per_token=8, expert_ffn=704, vision=_LARGE_TOWER, **_LARGE,
            hub_ids=("google/gemma-4-26B-A4B", "google/gemma-4-26B-A4B-it")),
    Variant(name="gemma4-31b", layers=60, global_every=6, embed_dim=5376, ffn=21_504, heads=32, kv_heads=16,
            global_kv_heads=4, vision=_LARGE_TOWER, **_LARGE,
            hub_ids=("google/gemma-4-31B", "google/gemma-4-31B-it")),
    Variant(name="tiny-31b", layers=6, global_every=3, embed_dim=128, ffn=384, heads=4, kv_heads=2,
            global_kv_heads=1, **_LARGE, **_TINY),
    Variant(name="tiny-e2b", layers=6, global_every=2, embed_dim=64, ffn=128, heads=4, kv_heads=1,
            global_kv_heads=1, per_layer_input=16, kv_shared_layers=2, wide_shared_mlp=True, **_TINY),
    Variant(name="tiny-26b-a4b", layers=4, global_every=2, embed_dim=64, ffn=96, heads=4, kv_heads=2,
            global_kv_heads=1, experts=8, experts_per_token=2, expert_ffn=32, **_LARGE, **_TINY),
    Variant(name="tiny-12b", layers=4, global_every=2, embed_dim=64, ffn=128, heads=4, kv_heads=2,
            global_kv_heads=1, model_type="gemma4_unified", **_LARGE, **_TINY),
)  # fmt: skip
VARIANTS: dict[str, Variant] = {variant.name: variant for variant in _ALL}


HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # the form of a Hugging Face hub id, owner/name


def find_variant(name: str) -> Variant:
    """The variant of that name. Raises RecipeError with the names that exist."""
    if name not in VARIANTS:
        raise RecipeError(f"model: {name!r} is not known{suggest(name, VARIANTS)}; allowed: {', '.join(VARIANTS)}")
    return VARIANTS[name]


def variant_of_hub_id(hub_id: str) -> Variant | None:
    """The published variant that a Hugging Face hub id holds, or None."""
    return next((variant for variant in VARIANTS.values() if hub_id.lower() in map(str.lower, variant.hub_ids)), None)
