"""How a Gemma 4 turns images into soft tokens, as a set of numbers, from the `vision_config` of a config.json.

Four variants have a tower, a transformer over patches of 16 pixels, pooled 3 by 3; the 12B projects patches of 48.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gemsmith.errors import CheckpointError

_INSIDE = "vision_config."
# What has no number here, as every tower has it; a key that is missing has the first of them.
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False, None),
    "attention_dropout": (0.0, None),
}
# HF's key -> the field here, a whole number above 0, and what transformers' classes take for it where a config.json
# leaves it out. Those are no published model's numbers.
SHARED_COUNTS = {
    "patch_size": ("patch", 16),
    "pooling_kernel_size": ("pooling", 3),
    "default_output_length": ("soft_tokens", 280),
}
TOWER_COUNTS = {
    "num_hidden_layers": ("layers", 16), "hidden_size": ("embed_dim", 768), "intermediate_size": ("ffn", 3072),
    "num_attention_heads": ("heads", 12), "head_dim": ("head_dim", 64),
    "position_embedding_size": ("positions", 10_240), **SHARED_COUNTS,
}  # fmt: skip
PROJECTION_COUNTS = {"mm_embed_dim": ("embed_dim", 3840), "mm_posemb_size": ("positions", 1120), **SHARED_COUNTS}


@dataclass(frozen=True, kw_only=True)
class VisionTower:
    """The numbers that fix a vision tower. Defaults are what every published tower shares."""

    layers: int
    embed_dim: int
    ffn: int
    heads: int
    head_dim: int
    clips: bool = False
    """Whether the inputs and outputs of its linear layers are clipped to bounds that the checkpoint has."""
    standardizes: bool = False
    """Whether pooled outputs are shifted and scaled by two vectors that the checkpoint has."""
    patch: int = 16
    pooling: int = 3
    positions: int = 10_240
    rope_theta: float = 100.0
    rms_eps: float = 1e-6
    soft_tokens: int = 280

    @property
    def patch_dim(self) -> int:
        """Values of one patch, ordered by row, column and channel."""
        return 3 * self.patch**2

    @property
    def patches_per_token(self) -> int:
        return self.pooling**2


@dataclass(frozen=True, kw_only=True)
class PatchProjection:
    """The numbers that fix the 12B's embedding of patches, each of which is one soft token."""

    embed_dim: int
    patch: int = 16
    pooling: int = 3
    positions: int = 1120
    rms_eps: float = 1e-6
    soft_tokens: int = 280

    @property
    def patch_dim(self) -> int:
        """Values of one patch of patch · pooling pixels, ordered by row, column and channel."""
        return 3 * (self.patch * self.pooling) ** 2

    @property
    def patches_per_token(self) -> int:
        return 1


Vision = VisionTower | PatchProjection


def read_vision(config: dict[str, Any]) -> Vision | None:
    """What a whole config.json's `vision_config` describes, None without one. Raises CheckpointError."""
    given = config.get("vision_config")
    if not given:
        return None
    if not isinstance(given, dict):
        raise CheckpointError(f"config.json has vision_config = {given!r}; it must hold the keys of the vision model")
    rms_eps = read_number({"rms_norm_eps": 1e-6} | given, "rms_norm_eps", _INSIDE)
    if config.get("model_type") == "gemma4_unified":
        counts, outputs = _read_counts(given, PROJECTION_COUNTS), given.get("output_proj_dims", 3840)
        if outputs != counts["embed_dim"]:
            raise CheckpointError(
                f"config.json has vision_config.output_proj_dims = {outputs!r}; the 12B's is its mm_embed_dim, "
                f"{counts['embed_dim']}"
            )
        return PatchProjection(rms_eps=rms_eps, **counts)
    check_fixed(given, FIXED, _INSIDE)
    counts, kv_heads = _read_counts(given, TOWER_COUNTS), given.get("num_key_value_heads", 12)
    if kv_heads != counts["heads"]:
        raise CheckpointError(
            f"config.json has vision_config.num_key_value_heads = {kv_heads!r}; Gemma 4 has as many as heads, "
            f"{counts['heads']}"
        )
    rope = {"rope_theta": VisionTower.rope_theta} | read_object(given, "rope_parameters", _INSIDE)
    return VisionTower(
        clips=bool(given.get("use_clipped_linears")),
        standardizes=bool(given.get("standardize")),
        rope_theta=read_number(rope, "rope_theta", f"{_INSIDE}rope_parameters."),
        rms_eps=rms_eps,
        **counts,
    )


def _read_counts(given: dict[str, Any], counts: Mapping[str, tuple[str, int]]) -> dict[str, int]:
    return {field: read_count({key: count} | given, key, _INSIDE) for key, (field, count) in counts.items()}


def check_fixed(values: dict[str, Any], fixed: Mapping[str, tuple[Any, ...]], inside: str = "") -> None:
    """Raises CheckpointError where a dotted key is there and has none of its values; `inside`: where values stand."""
    for key, allowed in fixed.items():
        value: Any = values
        for part in key.split("."):
            value = value.get(part, allowed[0]) if isinstance(value, dict) else allowed[0]
        if value not in allowed:
            raise CheckpointError(
                f"config.json has {inside}{key} = {value!r}; Gemma 4 has {' or '.join(map(repr, allowed))}"
            )


def read_count(values: dict[str, Any], key: str, inside: str = "") -> int:
    """The whole number above 0 at the key. Raises CheckpointError where it is none, KeyError."""
    value = values[key]
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json has {inside}{key} = {value!r:.200}; it must be a whole number above 0")
    return value


def read_number(values: dict[str, Any], key: str, inside: str = "") -> float:
    """The number above 0 at the key. Raises CheckpointError where it is none, KeyError."""
    value = values[key]
    if not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise CheckpointError(f"config.json has {inside}{key} = {value!r:.200}; it must be a number above 0")
    return float(value)


def read_object(values: dict[str, Any], key: str, inside: str = "") -> dict[str, Any]:
    """The object at the key, an empty one where there is none or null. Raises CheckpointError for anything else."""
    value = values.get(key) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"config.json has {inside}{key} = {value!r:.200}; it must be an object")
    return value
