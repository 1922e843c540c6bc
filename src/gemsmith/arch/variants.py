"""The five published variants, and a tiny one of each kind for tests and the demo.

Source: the published config.json files, as read on 2026-08-21. To add a variant, add a row and its parameter count to
tests/arch.
"""

from typing import Any

from gemsmith.arch.config import Variant
from gemsmith.arch.vision_config import PatchProjection, VisionTower
from gemsmith.errors import RecipeError, suggest

_SMALL_TOWER = VisionTower(layers=16, embed_dim=768, ffn=3072, heads=12, head_dim=64, clips=True)
_LARGE_TOWER = VisionTower(layers=27, embed_dim=1152, ffn=4304, heads=16, head_dim=72, standardizes=True)
_E2B = Variant(
    name="gemma4-e2b",
    layers=35,
    global_every=5,
    embed_dim=1536,
    ffn=6144,
    heads=8,
    kv_heads=1,
    global_kv_heads=1,
    sliding_window=512,
    per_layer_input=256,
    kv_shared_layers=20,
    wide_shared_mlp=True,
    context=131_072,
    vision=_SMALL_TOWER,
    hub_ids=("google/gemma-4-E2B", "google/gemma-4-E2B-it"),
)
_E4B = Variant(
    name="gemma4-e4b",
    layers=42,
    global_every=6,
    embed_dim=2560,
    ffn=10_240,
    heads=8,
    kv_heads=2,
    global_kv_heads=2,
    sliding_window=512,
    per_layer_input=256,
    kv_shared_layers=18,
    context=131_072,
    vision=_SMALL_TOWER,
    hub_ids=("google/gemma-4-E4B", "google/gemma-4-E4B-it"),
)
_12B = Variant(
    name="gemma4-12b",
    layers=48,
    global_every=6,
    embed_dim=3840,
    ffn=15_360,
    heads=16,
    kv_heads=8,
    global_kv_heads=1,
    attention_k_eq_v=True,
    bidirectional_images=True,
    model_type="gemma4_unified",
    vision=PatchProjection(embed_dim=3840),
    hub_ids=("google/gemma-4-12B", "google/gemma-4-12B-it"),
)
_26B_A4B = Variant(
    name="gemma4-26b-a4b",
    layers=30,
    global_every=6,
    embed_dim=2816,
    ffn=2112,
    heads=16,
    kv_heads=8,
    global_kv_heads=2,
    attention_k_eq_v=True,
    experts=128,
    experts_per_token=8,
    expert_ffn=704,
    bidirectional_images=True,
    vision=_LARGE_TOWER,
    hub_ids=("google/gemma-4-26B-A4B", "google/gemma-4-26B-A4B-it"),
)
_31B = Variant(
    name="gemma4-31b",
    layers=60,
    global_every=6,
    embed_dim=5376,
    ffn=21_504,
    heads=32,
    kv_heads=16,
    global_kv_heads=4,
    attention_k_eq_v=True,
    bidirectional_images=True,
    vision=_LARGE_TOWER,
    hub_ids=("google/gemma-4-31B", "google/gemma-4-31B-it"),
)

# Each tiny variant keeps the irregular parts of its kind: K = V, kv sharing and per-layer inputs, experts, the 12B's
# own classes.
_TINY: dict[str, Any] = {
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 64,
    "vocabulary": 1024,
    "context": 2048,
}
_TINY_31B = Variant(
    name="tiny-31b",
    layers=6,
    global_every=3,
    embed_dim=128,
    ffn=384,
    heads=4,
    kv_heads=2,
    global_kv_heads=1,
    attention_k_eq_v=True,
    bidirectional_images=True,
    **_TINY,
)
_TINY_E2B = Variant(
    name="tiny-e2b",
    layers=6,
    global_every=2,
    embed_dim=64,
    ffn=128,
    heads=4,
    kv_heads=1,
    global_kv_heads=1,
    per_layer_input=16,
    kv_shared_layers=2,
    wide_shared_mlp=True,
    **_TINY,
)
_TINY_26B_A4B = Variant(
    name="tiny-26b-a4b",
    layers=4,
    global_every=2,
    embed_dim=64,
    ffn=96,
    heads=4,
    kv_heads=2,
    global_kv_heads=1,
    attention_k_eq_v=True,
    experts=8,
    experts_per_token=2,
    expert_ffn=32,
    bidirectional_images=True,
    **_TINY,
)
_TINY_12B = Variant(
    name="tiny-12b",
    layers=4,
    global_every=2,
    embed_dim=64,
    ffn=128,
    heads=4,
    kv_heads=2,
    global_kv_heads=1,
    attention_k_eq_v=True,
    bidirectional_images=True,
    model_type="gemma4_unified",
    **_TINY,
)

VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (_E2B, _E4B, _12B, _26B_A4B, _31B, _TINY_31B, _TINY_E2B, _TINY_26B_A4B, _TINY_12B)
}


def find_variant(name: str) -> Variant:
    """The variant of that name. Raises RecipeError with the names that exist."""
    if name not in VARIANTS:
        raise RecipeError(f"model: {name!r} is not known{suggest(name, VARIANTS)}; allowed: {', '.join(VARIANTS)}")
    return VARIANTS[name]


def variant_of_hub_id(hub_id: str) -> Variant | None:
    """The published variant that a Hugging Face hub id holds, or None."""
    return next((variant for variant in VARIANTS.values() if hub_id.lower() in map(str.lower, variant.hub_ids)), None)
