"""Serving whatever is named, on a machine that is named: a run, a recipe, a checkpoint's folder, a hub id."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from gemsmith.arch import find_variant, read_variant, variant_of_hub_id
from gemsmith.checkpoints.folder import check_source, fetch_folder, is_hub_id, name_variant, read_config
from gemsmith.errors import CheckpointError, RecipeError
from gemsmith.recipe.load import build_recipe
from gemsmith.recipe.schema import Recipe
from gemsmith.runs.resolve import recipe_variant, resolve_file
from gemsmith.runs.run import Run, find_run
from gemsmith.serve.command import PROMPT_AND_OUTPUT, RUNTIMES, Weights, deploy, published_config
from gemsmith.serve.container import as_shell, machine_named, this_machine_as
from gemsmith.serve.server import running_server
from gemsmith.serve.settings import ServedAdapter, api_headers, engine_python, refuse_without_template, settings_of
from gemsmith.serve.stage import ask_first, make_settings, other_weights, wait_for_the_end
from gemsmith.serve.vllm_issues import SERVER_MODULE
from gemsmith.system.characters import escape_control_chars
from gemsmith.system.console import open_console
from gemsmith.system.files import expanduser

_OF_A_CHECKPOINT = ("serve.", "seed", "data.template", "data.thinking", "hardware.catalog", "model")
"""Keys of a recipe that matter where there is no recipe."""


def is_checkpoint(source: str) -> bool:
    """Whether something other than a recipe or a run directory is named."""
    path = Path(source)
    if path.is_dir():
        return not (path / "recipe.yaml").exists()
    return not path.exists() and ("://" in source or is_hub_id(source)) and path.suffix not in (".yaml", ".yml")


def print_deployment(source: str, run_path: Path | None, overrides: Sequence[str], machine_name: str | None) -> None:
    """Prints the command that serves it there on stdout, and why it is so, as a shell's comments, on stderr.

    Without weights or network: a run or a recipe need not have been trained, a hub id not fetched.
    """
    if is_checkpoint(source):
        name, recipe = _name_of(source), _recipe_of(source, overrides)
        settings, weights = settings_of(recipe, prefix_caching=True), _checkpoint_weights(source, recipe)
    else:
        path = Path(source)
        folder = path if path.is_dir() else run_path or Path("runs") / path.stem
        recipe = find_run(path, overrides) if path.is_dir() else resolve_file(path, overrides)[0]
        name, run, adapter = folder.resolve().name, Run(path=folder, recipe=recipe), None
        if recipe.serve.weights == "adapter":
            adapter = ServedAdapter(folder=str(run.adapter), rank=recipe.lora.rank)
        settings, weights = make_settings(run, adapter=adapter, prefix_caching=True), _run_weights(run)
    machine = machine_named(machine_name or "cpu", recipe.hardware.catalog)
    # On a CPU in vLLM's own Python, else in Docker.
    program = () if machine.chip.kind != "cpu" else (str(engine_python(settings.python)), "-m", SERVER_MODULE)
    deployment = deploy(machine, weights, settings, name=name, program=program, keyed=bool(api_headers()))
    lines = [f"{name} on {machine.name}; estimated, where it says so"]
    if (runtime := RUNTIMES.get(machine.chip.name)) is not None:
        lines.append(f"TPU VM: runtime image {runtime}; another boots and cannot be reached")
    lines += other_weights(recipe, recipe.export.merge_into)
    lines += [f"{choice.what}: {choice.why}" for choice in deployment.choices]
    lines += [f"${name}: taken from the environment of whoever runs this" for name in deployment.passed]
    folders = [weights.source] if weights.is_folder else []
    folders += [settings.adapter.folder] if settings.adapter is not None else []
    lines += [f"not there yet: {folder}" for folder in folders if not Path(folder).is_dir()]
    console = open_console()
    for line in lines:
        console.print(f"# {line}")
    print(escape_control_chars(as_shell(deployment)), flush=True)


def _run_weights(run: Run) -> Weights:
    """Those of the base where its adapter is served, else those of merged/."""
    base, variant, merged = run.recipe.checkpoint, recipe_variant(run.recipe), run.recipe.serve.weights != "adapter"
    checkpoint = run.merged if merged and (run.merged / "config.json").exists() else expanduser(base)
    config = read_config(checkpoint) if (checkpoint / "config.json").is_file() else published_config(variant)
    source, is_folder = (str(run.merged), True) if merged else (base, not is_hub_id(base))
    return Weights(source=source, is_folder=is_folder, variant=variant, config=config)


def serve_checkpoint(source: str, overrides: Sequence[str], machine_name: str | None) -> None:
    """Serves a checkpoint's folder or hub id until Ctrl-C; nothing is recorded, and nothing is left."""
    recipe = _recipe_of(source, overrides)
    where = this_machine_as(machine_name, recipe.hardware.catalog)
    folder = _checkpoint_folder(source) or fetch_folder(source)
    length = recipe.serve.max_model_len or min(PROMPT_AND_OUTPUT, read_variant(read_config(folder)).context)
    hub_id = source if is_hub_id(source) else None
    settings = settings_of(recipe, prefix_caching=True, max_model_len=length, hub_id=hub_id, **where)
    refuse_without_template(folder, settings)
    with tempfile.TemporaryDirectory(prefix="gemsmith-serve-") as logs:
        log = Path(logs) / "vllm.log"
        with running_server(folder, name=_name_of(source), settings=settings, log=log) as server:
            ask_first(server)
            wait_for_the_end(server)


def _checkpoint_weights(source: str, recipe: Recipe) -> Weights:
    if (folder := _checkpoint_folder(source)) is not None:
        config = read_config(folder)
        variant = name_variant(read_variant(config))
    else:
        check_source(source)
        known = find_variant(recipe.model) if recipe.model else variant_of_hub_id(source)
        if known is None:
            raise RecipeError(
                f"{source}: is not here to read what model it is; add --set model=gemma4-31b, or another that it is"
            )
        variant, config = known, published_config(known)
    return Weights(source=str(folder or source), is_folder=folder is not None, variant=variant, config=config)


def _recipe_of(source: str, overrides: Sequence[str]) -> Recipe:
    """The recipe's defaults, with what the user sets of what matters here."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not key.startswith(_OF_A_CHECKPOINT):
            raise RecipeError(
                f"--set {key}: {source} is no run and no recipe; allowed: keys of serve, seed, data.template, "
                "data.thinking, hardware.catalog, model"
            )
    recipe = build_recipe({"checkpoint": source, "data": {"train": "unused"}}, overrides)
    if recipe.serve.weights == "adapter":
        raise RecipeError(
            f"serve.weights: adapter was given, but {source} is no run; name the run that has the adapter"
        )
    return recipe


def _checkpoint_folder(source: str) -> Path | None:
    """The local folder that holds the weights: the one named, or merged/ of one that gemsmith export --out wrote."""
    folder = expanduser(source)
    if not folder.is_dir():
        return None
    if (folder / "config.json").is_file():
        return folder
    if (folder / "merged" / "config.json").is_file():
        return folder / "merged"
    raise CheckpointError(
        f"{source}: holds neither recipe.yaml nor config.json; give a run directory, a recipe, a checkpoint's folder "
        "or a hub id (owner/name)"
    )


def _name_of(source: str) -> str:
    """What a checkpoint is called: the last part of its name that tells it from others."""
    path = Path(source).resolve()
    return path.parent.name if path.name == "merged" else path.name
