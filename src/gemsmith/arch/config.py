"""A Gemma 4 as a set of numbers, from a Hugging Face config.json: its text model, and how it sees images.

Four variants have a tower, a transformer over patches of 16 pixels, pooled 3 by 3; the 12B projects patches of 48.

Axes, here and everywhere: B batch, L length, H heads, K kv heads, D head dim, E model, F hidden, R rank, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from gemsmith.errors import CheckpointError

MODEL_TYPES = ("gemma4", "gemma4_unified")

# What a Variant has no number for, as Gemma 4 has it; a key that is missing has the first of them.
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "attention_dropout": (0.0, None),
    "tie_word_embeddings": (True,),
    "use_bidirectional_attention": (None, "vision"),
    "rope_parameters.sliding_attention.rope_type": ("default",),
    "rope_parameters.full_attention.rope_type": ("proportional",),
    "rope_parameters.full_attention.factor": (None, 1.0),
}
# HF's key -> a Variant's field. Each is a whole number above 0.
COUNTS = {
    "num_hidden_layers": "layers", "hidden_size": "embed_dim", "intermediate_size": "ffn", "head_dim": "head_dim",
    "num_attention_heads": "heads", "num_key_value_heads": "kv_heads", "sliding_window": "sliding_window",
    "vocab_size": "vocabulary", "max_position_embeddings": "context",
}  # fmt: skip
EXPERT_COUNTS = {"num_experts": "experts", "top_k_experts": "experts_per_token", "moe_intermediate_size": "expert_ffn"}
_INSIDE = "vision_config."
# The same of vision_config, as every tower has it.
VISION_FIXED: dict[str, tuple[Any, ...]] = {
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
class ScanBlocks:
    """A block of `period` layers that repeats `repeats` times, from layer `first` on: what a model may scan over."""

    first: int
    period: int
    repeats: int

    @property
    def layers(self) -> slice:
        """The layers' numbers."""
        return slice(self.first, self.first + self.period * self.repeats)


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
    standardizes: bool = False  # whether pooled outputs are shifted and scaled by two vectors that the checkpoint has
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


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The numbers that fix a Gemma 4 text model, and how it sees. Defaults are what every published variant shares."""

    name: str
    layers: int
    global_every: int
    embed_dim: int
    ffn: int
    heads: int
    kv_heads: int
    global_kv_heads: int
    head_dim: int = 256
    global_head_dim: int = 512
    sliding_window: int = 1024
    attention_k_eq_v: bool = False
    per_layer_input: int = 0
    kv_shared_layers: int = 0
    wide_shared_mlp: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    vocabulary: int = 262_144
    context: int = 262_144
    softcap: float = 30.0
    rope_theta_local: float = 1e4
    rope_theta_global: float = 1e6
    rotary_fraction_global: float = 0.25
    rms_eps: float = 1e-6
    bidirectional_images: bool = False
    model_type: str = "gemma4"
    hub_ids: tuple[str, ...] = ()
    vision: Vision | None = None  # None where a checkpoint holds the text model alone

    def is_global(self, layer: int) -> bool:
        """Whether the layer attends to the whole context; the last one always does."""
        return (layer + 1) % self.global_every == 0 or layer == self.layers - 1

    def shares_kv(self, layer: int) -> bool:
        """Whether the layer takes keys and values from an earlier layer of its kind."""
        return self.kv_shared_layers > 0 and layer >= self.layers - self.kv_shared_layers

    def head_dim_of(self, layer: int) -> int:
        return self.global_head_dim if self.is_global(layer) else self.head_dim

    def kv_heads_of(self, layer: int) -> int:
        return self.global_kv_heads if self.is_global(layer) else self.kv_heads

    def ffn_of(self, layer: int) -> int:
        return 2 * self.ffn if self.wide_shared_mlp and self.shares_kv(layer) else self.ffn

    def has_v(self, layer: int) -> bool:
        """Whether the layer has a value projection of its own; where K = V it has none."""
        return not self.shares_kv(layer) and not (self.attention_k_eq_v and self.is_global(layer))

    @cached_property
    def scan_blocks(self) -> tuple[ScanBlocks, ...]:
        """The layers as repeated blocks: 31B, ten times five local layers and a global one; E2B, two kinds."""

        def kinds(first: int, period: int) -> list[tuple[Any, ...]]:
            numbers = range(first, first + period)
            return [(self.is_global(n), self.shares_kv(n), self.ffn_of(n), self.has_v(n)) for n in numbers]

        first_sharing = self.layers - self.kv_shared_layers
        found, first = [], 0
        while first < self.layers:
            # The layers of one scan all share kv, or none does.
            bound = first_sharing if first < first_sharing else self.layers
            period, end = min(self.global_every, bound - first), first
            while end + period <= bound and kinds(end, period) == kinds(first, period):
                end += period
            found.append(ScanBlocks(first=first, period=period, repeats=(end - first) // period))
            first = end
        return tuple(found)

    @cached_property
    def stacks(self) -> tuple[range, ...]:
        """The layers at each place of a block, which may be one array: in the 31B, 0, 6, …, 54 are the first of six."""
        return tuple(
            range(blocks.first + place, blocks.layers.stop, blocks.period)
            for blocks in self.scan_blocks
            for place in range(blocks.period)
        )

    @property
    def layer_types(self) -> list[str]:
        """HF's names of the layers' kinds, in order."""
        return ["full_attention" if self.is_global(n) else "sliding_attention" for n in range(self.layers)]


def read_variant(config: dict[str, Any]) -> Variant:
    """The variant that an HF config.json, or its text_config, describes. Raises CheckpointError where it is none."""
    model_type = config.get("model_type")
    if "text_config" in config and model_type not in MODEL_TYPES:
        raise CheckpointError(f"config.json has model_type {model_type!r}; allowed: {', '.join(MODEL_TYPES)}")
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise CheckpointError(f"config.json has text_config = {text!r}; it must hold the keys of the text model")
    text_type = str(text.get("model_type", "")).removesuffix("_text")
    if text_type not in MODEL_TYPES:
        raise CheckpointError(
            f"config.json has model_type {text.get('model_type')!r}; allowed: Gemma 4's, such as gemma4_text"
        )
    try:
        check_fixed({key: config[key] for key in ("tie_word_embeddings",) if key in config}, FIXED)
        check_fixed(text, FIXED)
        if text.get("hidden_size_per_layer_input"):
            check_fixed(text, {"vocab_size_per_layer_input": (text.get("vocab_size"),)})
        variant = replace(_from_text_config(text, text_type), vision=read_vision(config))
    except KeyError as missing:
        raise CheckpointError(f"config.json lacks the key {missing.args[0]!r} of text_config") from None
    if text["layer_types"] != variant.layer_types:
        raise CheckpointError(
            "config.json's layer_types are not a repeated pattern that ends in full_attention, as every Gemma 4's are"
        )
    if variant.heads % variant.kv_heads or variant.heads % variant.global_kv_heads:
        raise CheckpointError(
            f"config.json has {variant.heads} heads, which {variant.kv_heads} kv heads or {variant.global_kv_heads} "
            "global do not divide"
        )
    if variant.experts_per_token > variant.experts:
        raise CheckpointError(
            f"config.json has top_k_experts = {variant.experts_per_token} of num_experts = {variant.experts}"
        )
    first_sharing = variant.layers - variant.kv_shared_layers
    own = variant.layer_types[: max(0, first_sharing)]
    if alone := [kind for kind in variant.layer_types[first_sharing:] if variant.kv_shared_layers and kind not in own]:
        raise CheckpointError(
            f"config.json has num_kv_shared_layers = {variant.kv_shared_layers} of {variant.layers} layers: none "
            f"before them is {alone[0]}, whose keys and values they could share"
        )
    return variant


def _from_text_config(text: dict[str, Any], model_type: str) -> Variant:
    counts = COUNTS | (EXPERT_COUNTS if text.get("enable_moe_block") else {})
    numbers: dict[str, Any] = {field: read_count(text, key) for key, field in counts.items()}
    layer_types = text["layer_types"] or []
    if not isinstance(layer_types, list) or not all(isinstance(kind, str) for kind in layer_types):
        raise CheckpointError(f"config.json has layer_types = {layer_types!r:.200}; it must be a list of names")
    if len(layer_types) != text["num_hidden_layers"]:
        raise CheckpointError(
            f"config.json lists {len(layer_types)} layer_types for {text['num_hidden_layers']} num_hidden_layers"
        )
    first_global = layer_types.index("full_attention") if "full_attention" in layer_types else len(layer_types) - 1
    rope = read_object(text, "rope_parameters")
    local, full = (read_object(rope, kind, "rope_parameters.") for kind in ("sliding_attention", "full_attention"))
    global_head_dim, global_kv_heads = _global_heads(text)
    return Variant(
        name="custom",
        model_type=model_type,
        **numbers,
        global_every=first_global + 1,
        global_kv_heads=global_kv_heads,
        global_head_dim=global_head_dim,
        attention_k_eq_v=bool(text["attention_k_eq_v"]),
        per_layer_input=_read_count_if_any(text, "hidden_size_per_layer_input"),
        kv_shared_layers=_read_count_if_any(text, "num_kv_shared_layers"),
        wide_shared_mlp=bool(text.get("use_double_wide_mlp")),
        softcap=read_number(text, "final_logit_softcapping") if text["final_logit_softcapping"] else 0.0,
        rope_theta_local=read_number(local, "rope_theta", "rope_parameters.sliding_attention."),
        rope_theta_global=read_number(full, "rope_theta", "rope_parameters.full_attention."),
        rotary_fraction_global=read_number(
            {"partial_rotary_factor": 1.0} | full, "partial_rotary_factor", "rope_parameters.full_attention.", most=1.0
        ),
        rms_eps=read_number(text, "rms_norm_eps"),
        bidirectional_images=text.get("use_bidirectional_attention") == "vision",
    )


def _global_heads(text: dict[str, Any]) -> tuple[int, int]:
    """The global layers' head_dim and kv heads by layer, from per_layer_config, which transformers 5.19 writes.

    Its keys are numbers, with zeros before them where there are more than ten layers. Older ones write global_head_dim,
    and num_global_key_value_heads, which counts where K = V.
    """
    if "per_layer_config" not in text:
        kv_heads = _read_count_if_any(text, "num_global_key_value_heads") if text["attention_k_eq_v"] else 0
        return read_count(text, "global_head_dim"), kv_heads or text["num_key_value_heads"]
    names, given = ("head_dim", "num_key_value_heads"), text["per_layer_config"] or {}
    entries = given.items() if isinstance(given, dict) else [("", given)]
    layers = {f"{layer}": layer for layer in range(len(text["layer_types"]))}
    per_layer = {layers.get(key.lstrip("0") or key[-1:]): entry for key, entry in entries}
    if (
        None in per_layer
        or len(per_layer) < len(entries)
        or not all(isinstance(entry, dict) and set(entry) <= set(names) for entry in per_layer.values())
    ):
        raise CheckpointError(f"config.json's per_layer_config must map numbers of layers to {' and '.join(names)}")
    found = {"sliding_attention": {tuple(text[name] for name in names)}, "full_attention": set()}
    for number, kind in enumerate(text["layer_types"]):
        values = text | per_layer.get(number, {})
        found.setdefault(kind, set()).add(tuple(read_count(values, name) for name in names))
    if len(found["sliding_attention"]) != 1 or len(found["full_attention"]) != 1:
        raise CheckpointError(
            "config.json's per_layer_config must give all full_attention layers the same heads, and no other layer any"
        )
    ((head_dim, kv_heads),) = found["full_attention"]
    return head_dim, kv_heads


def _read_count_if_any(text: dict[str, Any], key: str) -> int:
    return read_count(text, key) if text.get(key) else 0


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
    check_fixed(given, VISION_FIXED, _INSIDE)
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
    if type(value) is not int or not 0 < value < 2**31:
        allowed = "a whole number above 0 and below 2^31"
        raise CheckpointError(f"config.json has {inside}{key} = {value!r:.200}; it must be {allowed}")
    return value


def read_number(values: dict[str, Any], key: str, inside: str = "", *, most: float = 1e12) -> float:
    """The number above 0 at the key. Raises CheckpointError where it is none, or none to compute with, KeyError."""
    value = values[key]
    if type(value) not in (int, float) or not 1e-12 <= value <= most:
        allowed = f"a number from 1e-12 to {most:g}"
        raise CheckpointError(f"config.json has {inside}{key} = {value!r:.200}; it must be {allowed}")
    return float(value)


def read_object(values: dict[str, Any], key: str, inside: str = "") -> dict[str, Any]:
    """The object at the key, an empty one where there is none or null. Raises CheckpointError for anything else."""
    value = values.get(key) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"config.json has {inside}{key} = {value!r:.200}; it must be an object")
    return value


def differing_fields(one: Variant, other: Variant) -> list[str]:
    """The numbers in which two text models differ, as `field a != b`; names and hub ids aside."""
    return [
        f"{field.name} {getattr(one, field.name)} != {getattr(other, field.name)}"
        for field in fields(Variant)
        if field.name not in ("name", "hub_ids", "vision") and getattr(one, field.name) != getattr(other, field.name)
    ]
