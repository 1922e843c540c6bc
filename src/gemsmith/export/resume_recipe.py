"""The way back: a recipe whose training starts from a PEFT adapter."""

from pathlib import Path
from typing import Any

import yaml

from gemsmith.arch import ALL_LINEAR, Variant, kinds_of, lora_targets
from gemsmith.checkpoints import open_checkpoint
from gemsmith.checkpoints.peft import Adapter, check_finite, check_fit, read_peft_adapter
from gemsmith.errors import CheckpointError, RunError
from gemsmith.export.stage import check_base
from gemsmith.recipe.load import build_recipe, load_recipe
from gemsmith.system.files import write_text


def start_recipe(base_source: str, adapter_folder: Path, *, recipe: Path | None = None, out: Path | None = None) -> str:
    """The text of a recipe that trains on from the adapter, with train.init_adapter and its lora; written to `out`.

    Raises InputError where the adapter is damaged, does not fit the base, or has modules that no choice of lora.targets
    gives.
    """
    if out is not None and out.exists():
        raise RunError(f"--out {out}: already exists; name another")
    adapter = read_peft_adapter(adapter_folder)
    base = open_checkpoint(base_source)
    check_base(base, adapter.base_sha256, base.fingerprint(), source=str(adapter_folder))
    targets = _targets(adapter, base.variant, adapter_folder)
    check_fit(adapter, lora_targets(base.variant, targets), source=str(adapter_folder))
    check_finite(adapter, source=str(adapter_folder), otherwise="start from another")
    values: dict[str, Any] = {"data": {"train": "FILL-IN.jsonl"}}
    if recipe is not None:
        values = load_recipe(recipe).model_dump(mode="json", exclude_unset=True)
    values["checkpoint"] = str(Path(base_source).absolute()) if Path(base_source).is_dir() else base_source
    values.pop("model", None)
    lora = {"rank": adapter.rank, "alpha": adapter.alpha, "rslora": adapter.rslora, "targets": list(targets)}
    values["lora"] = (values.get("lora") or {}) | lora
    values["train"] = (values.get("train") or {}) | {"init_adapter": str(adapter_folder.absolute())}
    build_recipe(values, source=f"recipe {recipe}" if recipe else "recipe")
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    if out is not None:
        write_text(out, text)
    return text


def _targets(adapter: Adapter, variant: Variant, folder: Path) -> tuple[str, ...]:
    """The kinds of projection whose modules the adapter has. What is missing or too much, check_fit names."""
    by_module = {target.module: target.role for target in lora_targets(variant, kinds_of(variant))}
    kinds = tuple(dict.fromkeys(by_module[module] for module in adapter.modules if module in by_module))
    if not kinds:
        raise CheckpointError(
            f"adapter {folder}: none of its modules is one that can be trained here; is it another model's adapter?"
        )
    every = {target.module for target in lora_targets(variant, [ALL_LINEAR])}
    return (ALL_LINEAR,) if adapter.modules.keys() == every and every - by_module.keys() else kinds
