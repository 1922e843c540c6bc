"""Rules that the projects share, each for the keys that the project calls them by."""

import math
from typing import Any

from gemsmith.errors import RecipeError
from gemsmith.importers.table import Row, Rule, SourceConfig, Status, flag, is_on, number, positive, read_as, row, whole

_SAME_ADAMW = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_torch_xla",
    "adamw_torch_npu_fused",
    "adamw_apex_fused",
    "adamw_hf",
    "adamw",
)
_PAGED_ADAMW = ("paged_adamw_32bit", "paged_adamw")
_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant_with_warmup": "constant", "constant": "constant"}
STEPS_HINT = "give --steps with the updates that its run made or would make (its log's `Total optimization steps`)"


def batch_rule(per_device: str, accumulation: str, *, total: str | None = None) -> Rule:
    """The rule for the keys that make global_batch_size: rows on a device x accumulation x devices."""

    def rule(key: str, value: Any, reading: SourceConfig) -> Row:
        if value is None:
            return row(reading, key, value, "none", "not set")
        names = [per_device, accumulation] if total is None or reading.value(total) is None else [total]
        if key not in names:
            return row(reading, key, value, "none", f"{total} says how many rows a step has on a device")
        factors = [
            read_as(positive, name, reading.value(name), reading) for name in names if reading.value(name) is not None
        ]
        devices = devices_of(reading)
        rows = math.prod(factors) * (devices or 1)
        sum_of = " x ".join(map(str, factors)) + f" x {devices or 1} device{'s' * (devices not in (None, 1))}"
        why = f"{' x '.join(names)} x devices = {sum_of}" + ("" if devices else ", as --devices is not given")
        return row(reading, key, value, "derived", why, train__global_batch_size=rows)

    return rule


def devices_of(reading: SourceConfig) -> int | None:
    """The devices that each take other rows: --devices, or what the file says of them, over those that share a row."""
    shared = 1
    for key in ("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree"):
        if reading.value(key) is not None:
            shared *= read_as(positive, key, reading.value(key), reading)
    if reading.devices:
        if reading.devices % shared:
            raise RecipeError(
                f"--devices {reading.devices}: {reading.file} has {shared} devices share a row; give a multiple of "
                f"{shared}"
            )
        return reading.devices // shared
    parts = [reading.value(key) for key in ("dp_shard_size", "dp_replicate_size")]
    if any(part is not None for part in parts):
        return math.prod(
            read_as(positive, "dp_shard_size or dp_replicate_size", part, reading) for part in parts if part is not None
        )
    for key in ("num_processes", "ray_num_workers", "world_size"):
        if reading.value(key) is not None:
            return max(1, read_as(positive, key, reading.value(key), reading) // shared)
    return None


def count_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of a key that says how many devices, or how many of them share a row."""
    if value is None:
        return row(reading, key, value, "none", "not set")
    return row(reading, key, value, "derived", "counted in train.global_batch_size; train.mesh lays out the machine")


def several_devices(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of a key that only several devices need: without their number global_batch_size would be too few."""
    parent = key.partition(".")[0] + "."
    # Of a section one row says so, the first that is on.
    says = next((name for name, item in reading.given.items() if name.startswith(parent) and _is_set(item)), key) == key
    if (
        not _is_set(value)
        or not says
        or devices_of(reading) is not None
        or "train.global_batch_size" in reading.overridden
    ):
        return row(reading, key, value, "none", "how it runs; train.mesh lays out the machine")
    return row(
        reading, key, value, "differs", "made for several devices, whose number is not in the file; give --devices"
    )


def _is_set(value: Any) -> bool:
    return value not in (None, "", [], {}, False)


def schedule_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of the learning rate's schedule, by the Trainer's names."""
    name = _schedule_name(value)
    if name in _SCHEDULES:
        why = "without warm-up" if name == "constant" else ""
        return row(reading, key, value, "mapped", why, optimizer__schedule=_SCHEDULES[name])
    suggest = "cosine" if "cosine" in name else "linear" if "linear" in name or name == "polynomial" else "constant"
    why = f"allowed: {', '.join(_SCHEDULES)}; {suggest} comes nearest"
    return row(reading, key, value, "differs", why, optimizer__schedule=suggest)


def warmup_rule(schedule: str, *, rounding: str = "up") -> Rule:
    """The rule for warm-up in steps or as a share of them.

    Of a share the Trainer rounds up as we do, Axolotl down and 1 to 2.
    """

    def rule(key: str, value: Any, reading: SourceConfig) -> Row:
        if value is None or _other_decides(key, reading):
            return row(
                reading, key, value, "none", "not set" if value is None else "the other of steps and ratio decides"
            )
        if is_constant(reading.value(schedule)):
            return row(reading, key, value, "mapped", "a constant schedule has no warm-up", optimizer__warmup_steps=0)
        amount = read_as(number, key, value, reading)
        if amount == 0 or (key == "warmup_steps" and amount >= 1):
            given = read_as(whole, key, value, reading)
            steps = not_one(given) if rounding == "down" else given
            return row(
                reading, key, value, "mapped" if steps == given else "derived", "", optimizer__warmup_steps=steps
            )
        steps = reading.steps or max_steps_of(reading)
        if rounding == "up" or steps is None:
            why = "" if rounding == "up" else f"a share is rounded down there, up here; {STEPS_HINT}"
            return ratio_row(reading, key, value, "derived" if why else "mapped", why, ratio=amount)
        return row(
            reading,
            key,
            value,
            "derived",
            f"{amount:g} of {steps} steps",
            optimizer__warmup_steps=not_one(int(amount * steps)),
        )

    return rule


def ratio_row(reading: SourceConfig, key: str, value: Any, status: Status, why: str, *, ratio: float) -> Row:
    """The row of warm-up as a share of the steps, which steps on the command line overrule."""
    if "optimizer.warmup_steps" in reading.overridden:
        return row(reading, key, value, "set", "--set optimizer.warmup_steps decides")
    return row(reading, key, value, status, why, optimizer__warmup_ratio=ratio)


def number_or_none(value: Any) -> float | None:
    """The number, or None for what is not one."""
    try:
        return number(value)
    except (TypeError, ValueError):
        return None


def not_one(warmup: int) -> int:
    """Axolotl makes two steps of warm-up of one."""
    return 2 if warmup == 1 else warmup


def is_constant(schedule: Any) -> bool:
    """Whether a schedule is the Trainer's constant one, which has no warm-up."""
    return _schedule_name(schedule) == "constant"


def _schedule_name(value: Any) -> str:
    return str(value).lower().removeprefix("schedulertype.")


def _other_decides(key: str, reading: SourceConfig) -> bool:
    """Whether the key is warmup_steps = 0 (or a default) beside a ratio, or a ratio beside steps.

    Steps above 0 win in the Trainer.
    """
    steps, ratio = (
        number_or_none(reading.given.get("warmup_steps")) or 0,
        number_or_none(reading.given.get("warmup_ratio")) or 0,
    )
    return (key == "warmup_steps" and not steps and ratio > 0) or (key == "warmup_ratio" and steps > 0)


def max_steps_of(reading: SourceConfig) -> int | None:
    """The updates that the file asks for, or None where epochs decide."""
    value = number_or_none(reading.value("max_steps"))
    return int(value) if value is not None and value >= 1 else None


def max_steps_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of max_steps; the Trainer's -1 leaves it to the epochs."""
    if value is None or read_as(whole, key, value, reading) <= 0:
        return row(reading, key, value, "none", "epochs decide")
    return row(reading, key, value, "mapped", "", train__max_steps=read_as(positive, key, value, reading))


def epochs_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of the number of epochs, which may be a fraction."""
    if value is None:
        return row(reading, key, value, "none", "not set")
    epochs = read_as(number, key, value, reading)
    if max_steps_of(reading):
        return row(reading, key, value, "none", "max_steps decides")
    if epochs == int(epochs) and epochs >= 1:
        return row(reading, key, value, "mapped", "", train__epochs=int(epochs))
    if reading.steps:
        return row(reading, key, value, "derived", "not whole; --steps decides", train__max_steps=reading.steps)
    return row(
        reading,
        key,
        value,
        "differs",
        f"not a whole number above 0; {STEPS_HINT}",
        train__epochs=max(1, math.ceil(epochs)),
    )


def optimizer_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of the optimizer's name: those that take AdamW's steps in float32 are one to Gemsmith."""
    name = str(value).lower().removeprefix("optimizernames.")
    if value is None or name in _SAME_ADAMW + _PAGED_ADAMW:
        return row(reading, key, value, "none", "AdamW with float32 moments, as Gemsmith's")
    if "adamw" in name and ("8bit" in name or "4bit" in name):
        return row(reading, key, value, "differs", "its moments are rounded; Gemsmith's AdamW keeps them in float32")
    return row(reading, key, value, "differs", "Gemsmith has AdamW only")


def clip_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of the gradient's norm; 0 and null switch clipping off in the Trainer."""
    if value is None or read_as(number, key, value, reading) <= 0:
        status: Status = "mapped" if key in reading.given and value is not None else "derived"
        return row(reading, key, value, status, "no clipping", **{"optimizer.max_grad_norm": None})
    return row(reading, key, value, "mapped", "", optimizer__max_grad_norm=read_as(number, key, value, reading))


def save_steps_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of steps between checkpoints, which may be a share of all."""
    steps = None if value is None else read_as(number, key, value, reading)
    if (
        steps
        and steps >= 1
        and str(reading.value("save_strategy") or "steps").removeprefix("SaveStrategy.").lower() == "steps"
    ):
        return row(reading, key, value, "mapped", "", train__save_steps=read_as(positive, key, value, reading))
    return row(reading, key, value, "none", "when checkpoints are written; train.save_steps does that")


def keep_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of how many checkpoints are kept; 0 and below keep all in the Trainer."""
    count = read_as(whole, key, value, reading) if value is not None else 0
    if count < 1:
        return row(
            reading,
            key,
            value,
            "none",
            "not set" if value is None else "all are kept there; train.save_total_limit says how many here",
        )
    return row(reading, key, value, "mapped", "", train__save_total_limit=count)


def remat_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of gradient checkpointing."""
    if value is None:
        return row(reading, key, value, "none", "not set")
    on = (
        True
        if isinstance(value, str) and value.startswith(("offload", "unsloth"))
        else read_as(flag, key, value, reading)
    )
    return row(
        reading, key, value, "mapped", "memory for time; the same numbers", train__remat="layer" if on else "none"
    )


def four_bits_rule(kind: str, nested: str) -> Rule:
    """The rule for a base of bitsandbytes' 4 bits.

    `kind` names the key of nf4 or fp4, `nested` that of double quantization.
    """

    def rule(key: str, value: Any, reading: SourceConfig) -> Row:
        if not is_on(value):
            return row(reading, key, value, "none", "not quantized")
        if str(reading.value(kind) or "nf4").lower() != "nf4":
            return row(reading, key, value, "differs", "fp4; Gemsmith's 4 bits are nf4", train__dtype="nf4")
        if is_on(reading.value(nested)):
            why = f"nf4, but {nested} also rounds the scales, which Gemsmith's does not"
            return row(reading, key, value, "differs", why, train__dtype="nf4")
        return row(reading, key, value, "mapped", "nf4", train__dtype="nf4")

    return rule


def eight_bits_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of a base of bitsandbytes' 8 bits."""
    if not is_on(value):
        return row(reading, key, value, "none", "not quantized")
    why = "the weights are rounded alike, but LLM.int8 rounds what is multiplied with them too"
    return row(reading, key, value, "differs", why, train__dtype="int8")


def quantized(reading: SourceConfig) -> bool:
    """Whether the base is held in 4 or 8 bits, so that another key decides train.dtype."""
    bits = ("load_in_4bit", "load_in_8bit", "quantization_bit")
    return any(is_on(reading.value(key)) for key in bits)


def half_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of bf16: true, `auto` or `full`, or false, where float32 is left."""
    auto = isinstance(value, str) and value.lower() in ("auto", "full")
    if value is None:
        return row(reading, key, value, "none", "not set")
    on = auto or read_as(flag, key, value, reading)
    other = ("fp16", "float16", "bfloat16", "pure_bf16")
    if quantized(reading) or (not on and any(is_on(reading.value(name)) for name in other)):
        return row(reading, key, value, "none", "another key decides train.dtype")
    if not on and str(reading.value("dtype") or reading.value("torch_dtype") or "") in (
        "bfloat16",
        "torch.bfloat16",
        "auto",
    ):
        return row(reading, key, value, "none", "the weights' dtype decides")
    why = (
        "products in bfloat16, adapters and moments in float32"
        if on
        else "no autocast: float32, unless the weights were loaded in another"
    )
    return row(reading, key, value, "mapped", why, train__dtype="bfloat16" if on else "float32")


def fp16_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of fp16, which Gemsmith does not have."""
    if not is_on(value):
        return row(reading, key, value, "none", "off")
    dtype = {} if quantized(reading) else {"train.dtype": "bfloat16"}
    return row(reading, key, value, "differs", "float16; Gemsmith has bfloat16 and float32", **dtype)


def start_adapter_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of an adapter whose matrices training starts from."""
    if value is None:
        return row(reading, key, value, "none", "not set")
    if not isinstance(value, str) or "," in value:
        return row(reading, key, value, "differs", "several adapters; training starts from one")
    return row(reading, key, value, "mapped", "", train__init_adapter=value)
