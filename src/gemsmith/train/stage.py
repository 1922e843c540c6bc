"""The train stage: hands the run to the backend that `train.backend` names."""

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from gemsmith.data.batches import count_steps
from gemsmith.errors import InputError, MachineError, RunError, last_line
from gemsmith.recipe.schema import Train
from gemsmith.runs.records import DataRecord, TrainRecord
from gemsmith.runs.resolve import recipe_variant
from gemsmith.runs.run import Run, find_run, is_up_to_date, read_record
from gemsmith.system.console import print_warnings
from gemsmith.system.locks import locked
from gemsmith.train.schedule import check_export_step, say_schedule


def is_later_host() -> bool:
    """Whether this process trains with others and is not the first, which alone writes; known before they join."""
    if number := os.environ.get("JAX_PROCESS_ID"):
        return number != "0"
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        return os.environ["RANK"] != "0"
    if importlib.util.find_spec("libtpu") is None:
        return False
    from gemsmith.train.jax.upstream import tpu_host_number

    return tpu_host_number() > 0


def longer(path: Path, steps: str | None, epochs: int | None) -> tuple[str, ...]:
    """What to set in the recipe of a finished run, for so many steps in all, +N more, or so many epochs in all.

    A warm-up that follows from the number of steps stays what it was, so that there is no other. Raises RunError where
    training has not ended, InputError where there would be no step more.
    """
    option, run = f"--steps {steps}" if steps else f"--epochs {epochs}", Run(path=path, recipe=find_run(path))
    record, data = read_record(run, TrainRecord), read_record(run, DataRecord)
    if not is_up_to_date(run, "train"):
        raise RunError(f"{option}: training has not ended in {path}; end it first with: gemsmith train {path}")
    done = len(record.steps)
    if steps and not re.fullmatch(r"\+?\d{1,9}", steps):
        raise InputError(f"{option}: must be a number of steps in all, such as {2 * done}, or of more, such as +{done}")
    given = {"max_steps": int(steps) + done * steps.startswith("+")} if steps else {"epochs": epochs, "max_steps": None}
    total = count_steps(run.recipe.train.model_copy(update=given), data.packed_rows)
    settings = tuple(f"train.{key}={json.dumps(value)}" for key, value in given.items())
    in_data = f"gemsmith data {path} --set {' --set '.join(settings)} --force"
    optimizer, warmup = run.recipe.optimizer, record.warmup_steps
    if optimizer.warmup_steps is None and warmup is not None and optimizer.warmup(total) != warmup:
        settings += ("optimizer.warmup_ratio=null",) * (optimizer.warmup_ratio is not None)
        settings += (f"optimizer.warmup_steps={warmup}",)
    if total <= done or total == data.steps:
        raise InputError(
            f"{option}: makes {total:,} steps in all; {done:,} are done, of {data.steps:,} that were planned; ask for "
            f"others, such as --steps +{done}, or start again with: {in_data}, then: gemsmith train {path} --force"
        )
    if record.hosts > 1:
        in_data = f"gemsmith data {path} --set {' --set '.join(settings)} --force"
        raise InputError(
            f"{option}: is for training on one host, and this was on {record.hosts}; first: {in_data}, then on each "
            f"host: gemsmith train {path}"
        )
    return settings


# Of each backend, the extra that installs it, and what it imports; that of a tracker is called as it is.
_PACKAGES = {
    "tunix": ("jax", ("jax", "flax", "qwix", "tunix", "optax", "orbax")),
    "trl": ("trl", ("torch", "transformers", "peft", "accelerate", "trl")),
    "tensorboard": ("jax", ("tensorboardX",)),
}


def train(run: Run, *, restart: bool = False) -> TrainRecord:
    """The record of a finished training, also written to train.json; continues from the last checkpoint, if any.

    `restart` starts at step 0, and deletes what an earlier training left once the first step has run: nothing is lost
    before. Raises RunError where another process saves to the same folder, RecipeError where export.step will not be
    saved, and whatever the backend raises; what check_training raises is not asked again. A bucket has no locks: there
    nothing keeps a second training out.
    """
    steps = read_record(run, DataRecord).steps
    check_export_step(run, steps, restart=restart)
    run.told.update(say_schedule(run.recipe, steps))
    takes_no_lock = "://" in str(run.recipe.train.checkpoint_folder) or is_later_host()
    with contextlib.nullcontext() if takes_no_lock else locked(run.checkpoints, what="train.checkpoint_folder"):
        if run.recipe.train.backend == "trl":
            from gemsmith.train.torch.distributed import train_in_processes

            if record := train_in_processes(run, restart=restart):
                return record
            from gemsmith.train.torch.backend import train_with_trl

            return train_with_trl(run, restart=restart)
        from gemsmith.train.jax.backend import train_with_tunix

        return train_with_tunix(run, restart=restart)


XLA_S = 60  # the longest that XLA may take to say whether it takes its flags; a TPU is there after about 10


def ask_xla(train: Train) -> None:
    """Raises InputError for a flag of the environment's or the recipe's that XLA does not take.

    A process of its own asks, since XLA ends one with an unknown XLA_FLAGS or LIBTPU_INIT_ARGS. No answer: a warning.
    """
    given = [name for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") if os.environ.get(name)]
    names = " and ".join([*given, *(["train.compiler_options"] if train.compiler_options else [])])
    if not names:
        return
    ask = [sys.executable, "-m", "gemsmith.train.jax.compile"]
    env = os.environ | {"PYTHONSAFEPATH": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(
            ask, input=train.model_dump_json(), env=env, timeout=XLA_S, check=False, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        print_warnings("train", [f"{names}: XLA did not say within {XLA_S} s whether it takes these flags"])
        return
    if done.returncode == 2:
        raise InputError(done.stdout.strip())
    if done.returncode and (said := re.search(r"^(?:[EF]\d{4} .*?\] |ERROR: )(.*\bflags?\b.*)", done.stderr, re.M)):
        raise MachineError(f"{' and '.join(given)}: XLA ends at once: {said[1]}; mend it, or unset it")
    if done.returncode:
        reason = last_line(done.stderr or f"it ended with {done.returncode}")
        print_warnings("train", [f"{names}: XLA could not be asked about these flags ({reason})"])


def check_training(run: Run) -> None:
    """Raises InputError for what is known before there are rows.

    That is a backend that is not installed, an adapter to start from or a folder for checkpoints that cannot be used,
    callbacks where others than this process train, and an export.step that will not be saved.
    """
    from gemsmith.train.inputs import load_init_adapter

    recipe, backend = run.recipe, run.recipe.train.backend
    needs, extras = list[str](), list[str]()
    for key, name in (("backend", backend), *(("report_to", name) for name in recipe.train.report_to)):
        extra, packages = _PACKAGES.get(name, (name, (name,)))
        if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
            needs.append(f"train.{key}: {name} needs {missing[0]}")
            extras.append(extra)
    if needs:
        what = f"{', '.join(needs)}, which {'is' if len(needs) == 1 else 'are'} not installed"
        raise MachineError(f"{what}; run: pip install 'gemsmith[{','.join(dict.fromkeys(extras))}]'")
    if run.callbacks and backend == "trl":
        from gemsmith.train.torch.distributed import count_gpus, started_by_torchrun, wanted_processes

        if not started_by_torchrun() and (processes := wanted_processes(recipe, count_gpus())) > 1:
            raise InputError(
                f"callbacks: {processes} new processes would train, which cannot call them; set train.mesh to "
                "{replica: 1, fsdp: 1}, or leave them out"
            )
    load_init_adapter(recipe, recipe_variant(recipe))
    folder = run.checkpoints  # looks for what a bucket needs
    if "://" not in str(recipe.train.checkpoint_folder) and folder.exists() and not folder.is_dir():
        raise InputError(f"train.checkpoint_folder: {folder} is a file; name a folder, which may be new")
    if recipe.train.max_steps is not None:
        check_export_step(run, recipe.train.max_steps)
