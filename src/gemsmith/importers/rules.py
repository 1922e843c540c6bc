"""Rules that several projects share, each for the keys that the project calls them by."""

import math
from collections.abc import Mapping

from gemsmith.errors import RecipeError
from gemsmith.importers.table import (
    Row,
    Rule,
    Setting,
    SourceConfig,
    Status,
    flag,
    if_set,
    is_on,
    number,
    number_or_none,
    positive,
    read_rules,
    whole,
)

STEPS_HINT = "give --steps with the updates that its run made or would make (its log's `Total optimization steps`)"


def batch_rule(per_device: str, *, total: str | None = None) -> Rule:
    """The rule for the keys that make global_batch_size: rows on a device x accumulation x devices."""

    @if_set
    def row_of(setting: Setting) -> Row:
        config = setting.config
        names = [per_device, "gradient_accumulation_steps"]
        names = names if total is None or config.value(total) is None else [total]
        if setting.key not in names:
            return setting.ignored(f"{total} says how many rows a step has on a device")
        factors = [config.read(name, positive) for name in names if config.value(name) is not None]
        devices = count_devices(config)
        product = " x ".join(map(str, factors)) + f" x {devices or 1} device{'s' * (devices not in (None, 1))}"
        why = f"{' x '.join(names)} x devices = {product}" + ("" if devices else ", as --devices is not given")
        return setting.derived({"train.global_batch_size": math.prod(factors) * (devices or 1)}, why)

    return row_of


def count_devices(config: SourceConfig) -> int | None:
    """The devices that each take other rows: --devices, or what the file says of them, over those that share a row."""

    def counts(*keys: str) -> list[int]:
        return [config.read(key, positive) for key in keys if config.value(key) is not None]

    shared = math.prod(counts("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree"))
    if config.devices:
        if config.devices % shared:
            remedy = f"{config.file} has {shared} devices share a row; give a multiple of {shared}"
            raise RecipeError(f"--devices {config.devices}: {remedy}")
        return config.devices // shared
    if replicas := counts("dp_shard_size", "dp_replicate_size"):
        return math.prod(replicas)
    for key in ("num_processes", "ray_num_workers", "world_size"):
        if config.value(key) is not None:
            return max(1, config.read(key, positive) // shared)
    return None


def several_devices(setting: Setting) -> Row:
    """The row of a key that only several devices need: without their number global_batch_size would be too few."""
    config, parent = setting.config, setting.key.partition(".")[0] + "."
    empty: tuple[object, ...] = (None, "", [], {}, False)
    # Of a section one row says so, the first that is on.
    section = [name for name, item in config.given.items() if name.startswith(parent) and item not in empty]
    is_counted = count_devices(config) is not None or "train.global_batch_size" in config.overridden
    if setting.value in empty or section[:1] not in ([], [setting.key]) or is_counted:
        return setting.ignored("how it runs; train.mesh lays out the machine")
    return setting.differs("made for several devices, whose number is not in the file; give --devices")


def has_no_warmup(schedule: object) -> bool:
    """Whether a schedule is the Trainer's constant one."""
    return str(schedule).lower().removeprefix("schedulertype.") == "constant"


def warmup_rule(schedule: str, *, rounding: str = "up") -> Rule:
    """The rule for warm-up in steps or a share of them, which the Trainer rounds up as we do, Axolotl down, 1 to 2."""

    @if_set
    def row_of(setting: Setting) -> Row:
        key, config = setting.key, setting.config
        # Steps above 0 win in the Trainer, and a ratio wins over steps that are 0 or a default.
        steps, ratio = (number_or_none(config.given.get(name)) or 0 for name in ("warmup_steps", "warmup_ratio"))
        if (key == "warmup_steps" and not steps and ratio > 0) or (key == "warmup_ratio" and steps > 0):
            return setting.ignored("the other of steps and ratio decides")
        if has_no_warmup(config.value(schedule)):
            return setting.mapped({"optimizer.warmup_steps": 0}, "a constant schedule has no warm-up")
        amount = setting.read(number)
        if amount == 0 or (key == "warmup_steps" and amount >= 1):
            given = setting.read(whole)
            count = not_one(given) if rounding == "down" else given
            return setting.row("mapped" if count == given else "derived", "", {"optimizer.warmup_steps": count})
        updates = config.steps or max_steps(config)
        if rounding == "up":
            return ratio_row(setting, amount, "mapped")
        if updates is None:
            return ratio_row(setting, amount, "derived", f"a share is rounded down there, up here; {STEPS_HINT}")
        warmup = {"optimizer.warmup_steps": not_one(int(amount * updates))}
        return setting.derived(warmup, f"{amount:g} of {updates} steps")

    return row_of


def ratio_row(setting: Setting, ratio: float, status: Status, why: str = "") -> Row:
    """The row of warm-up as a share of the steps, which steps on the command line overrule."""
    if "optimizer.warmup_steps" in setting.config.overridden:
        return setting.overridden("--set optimizer.warmup_steps decides")
    return setting.row(status, why, {"optimizer.warmup_ratio": ratio})


def not_one(warmup: int) -> int:
    """Axolotl makes two steps of warm-up of one."""
    return 2 if warmup == 1 else warmup


def max_steps(config: SourceConfig) -> int | None:
    """The updates that the file asks for, or None where epochs decide."""
    value = number_or_none(config.value("max_steps"))
    return int(value) if value is not None and value >= 1 else None


def max_steps_rule(setting: Setting) -> Row:
    """The row of max_steps; the Trainer's -1 leaves it to the epochs."""
    if setting.value is None or setting.read(whole) <= 0:
        return setting.ignored("epochs decide")
    return setting.mapped({"train.max_steps": setting.read(positive)})


@if_set
def epochs_rule(setting: Setting) -> Row:
    epochs, config = setting.read(number), setting.config
    if max_steps(config):
        return setting.ignored("max_steps decides")
    if epochs == int(epochs) and epochs >= 1:
        return setting.mapped({"train.epochs": int(epochs)})
    if config.steps:
        return setting.derived({"train.max_steps": config.steps}, "not whole; --steps decides")
    return setting.differs(f"not a whole number above 0; {STEPS_HINT}", {"train.epochs": max(1, math.ceil(epochs))})


def clip_rule(setting: Setting) -> Row:
    """The row of the gradient's norm; 0 and null switch clipping off in the Trainer."""
    norm = None if setting.value is None else setting.read(number)
    if norm is not None and norm > 0:
        return setting.mapped({"optimizer.max_grad_norm": norm})
    is_given = norm is not None and setting.key in setting.config.given
    return setting.row("mapped" if is_given else "derived", "no clipping", {"optimizer.max_grad_norm": None})


def save_steps_rule(setting: Setting) -> Row:
    # It may be a share of all steps.
    steps = None if setting.value is None else setting.read(number)
    strategy = str(setting.config.value("save_strategy") or "steps").removeprefix("SaveStrategy.").lower()
    if steps and steps >= 1 and strategy == "steps":
        return setting.mapped({"train.save_steps": setting.read(positive)})
    return setting.ignored("when checkpoints are written; train.save_steps does that")


@if_set
def eval_steps_rule(setting: Setting) -> Row:
    """The row of the steps from one loss on held-out rows to the next; without such rows there is none."""
    config, steps = setting.config, setting.read(number)  # it may be a share of all steps
    unset = "steps" if config.project == "Axolotl" else "no"
    strategy = next((value for key in _EVAL_STRATEGY if (value := config.value(key)) is not None), unset)
    if steps < 1 or str(strategy).removeprefix("IntervalStrategy.").lower() != "steps":
        return setting.ignored("when held-out rows are scored; train.eval_steps does that")
    every = setting.read(positive)
    held_out = any(is_on(config.value(key)) for key in _HELD_OUT) or "data.eval" in config.overridden
    if not held_out:
        return setting.ignored(f"no rows are held out; with data.eval: train.eval_steps={every}")
    return setting.mapped({"train.eval_steps": every})


@if_set
def keep_rule(setting: Setting) -> Row:
    """The row of how many checkpoints are kept; 0 and below keep all in the Trainer."""
    count = setting.read(whole)
    if count < 1:
        return setting.ignored("all are kept there; train.save_total_limit says how many here")
    return setting.mapped({"train.save_total_limit": count})


@if_set
def remat_rule(setting: Setting) -> Row:
    on = str(setting.value).startswith(("offload", "unsloth")) or setting.read(flag)
    return setting.mapped({"train.remat": "layer" if on else "none"}, "memory for time; the same numbers")


@if_set
def half_rule(setting: Setting) -> Row:
    """The row of bf16: true, `auto` or `full`, or false, where float32 is left."""
    config = setting.config
    on = str(setting.value).lower() in ("auto", "full") or setting.read(flag)
    quantized = ("load_in_4bit", "load_in_8bit", "quantization_bit")
    others = quantized if on else (*quantized, "fp16", "float16", "bfloat16", "pure_bf16")
    if any(map(config.is_on, others)):
        return setting.ignored("another key decides train.dtype")
    loaded = str(config.value("dtype") or config.value("torch_dtype") or "")
    if on:
        return setting.mapped({"train.dtype": "bfloat16"}, "products in bfloat16, adapters and moments in float32")
    if loaded in ("bfloat16", "torch.bfloat16", "auto"):
        return setting.ignored("the weights' dtype decides")
    return setting.mapped({"train.dtype": "float32"}, "no autocast: float32, unless the weights were loaded in another")


@if_set
def start_adapter_rule(setting: Setting) -> Row:
    """The row of an adapter whose matrices training starts from."""
    if not isinstance(setting.value, str) or "," in setting.value:
        return setting.differs("several adapters; training starts from one")
    return setting.mapped({"train.init_adapter": setting.value})


def full_rule(setting: Setting) -> Row:
    """The row of a key by which every weight is trained."""
    return setting.mapped({"train.method": "full"}, "the text model's, in float32; what embeds images is frozen")


_EVAL_STRATEGY = ("eval_strategy", "evaluation_strategy")
# What makes data.eval, in Axolotl's YAML and LLaMA-Factory's.
_HELD_OUT = ("val_set_size", "test_datasets[0].path", "val_size", "eval_dataset")

# Keys of the Trainer that Axolotl's YAML takes under the same names.
SHARED_RULES: Mapping[str, Rule] = {
    **read_rules("shared"),
    "max_steps": max_steps_rule,
    "gradient_checkpointing": remat_rule,
    "save_steps": save_steps_rule,
    "eval_steps": eval_steps_rule,
    "fsdp": several_devices,
    "fsdp_config.*": several_devices,
    "deepspeed": several_devices,
}
