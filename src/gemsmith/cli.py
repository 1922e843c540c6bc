"""The command line: one function per verb, which reads its arguments, calls one function and prints.

Nothing heavy is imported before a verb needs it.
"""

import contextlib
import importlib
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

import click

from gemsmith import __version__
from gemsmith.characters import spell_out, spell_out_json
from gemsmith.errors import USERS_ERRNOS, GemsmithError, InputError, MachineError, Preempted, explain_os_error

_folder = click.Path(path_type=Path)


def _source_options(function: Callable[..., None], *, required: bool = True) -> Callable[..., None]:
    """The arguments that every verb takes; some verbs can do without a run."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print the stage's record as JSON on stdout."),
        click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the recipe; may be repeated."),
        click.option("--run", "run_path", metavar="DIR", type=_folder, help="The run directory; default: runs/<recipe's name>."),
        click.argument("source", type=_folder, required=required),
    ):
        function = option(function)
    return function


_unverified = click.option("--unverified", is_flag=True, help="Serve weights that verify has not passed; the record says so.")
_force = click.option("--force", is_flag=True, help="Do the stage again although its record is complete.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="gemsmith")
def cli() -> None:
    """Plan, fine-tune, export, verify, serve and compare Gemma 4 on TPU and GPU, from one recipe.

    \b
    gemsmith run recipes/demo.yaml                     every stage, into runs/demo
    gemsmith run my.yaml --set lora.rank=16            the same with one key changed
    gemsmith run runs/my                               go on with a run that was stopped
    gemsmith plan recipes/verilog_31b.yaml             what fits, how long, what it costs
    gemsmith data my.yaml --show 3                     three rows, trained tokens coloured
    gemsmith serve runs/my                             keep the tuned model up
    """


@cli.command()
@_source_options
def run(source: Path, run_path: Path | None, overrides: Sequence[str], as_json: bool) -> None:
    """Run every stage that is not complete: plan, data, train, export, verify, serve, bench, eval, report.

    SOURCE is a recipe (YAML) or a run directory. A run that was stopped goes on where it was.

    \b
    gemsmith run recipes/demo.yaml
    gemsmith run my.yaml --set data.train=rows.jsonl --set checkpoint=/models/gemma-4-E2B-it
    """
    opened = _open(source, run_path, overrides, trains=True)
    pipeline = _part("pipeline")
    records = pipeline.run_stages(opened)
    if as_json:
        click.echo(spell_out_json("{" + ",\n".join(f'"{record.stage}": {record.model_dump_json(indent=1)}' for record in records) + "}"))
        return
    _part("report.summary").print_summary(opened)


@cli.command()
@_source_options
def plan(source: Path, run_path: Path | None, overrides: Sequence[str], as_json: bool) -> None:
    """Say what fits on which machine, how long it takes and what it costs; by formula.

    SOURCE is a recipe (YAML) or a run directory. A recipe without --run is planned and nothing is written.

    \b
    gemsmith plan recipes/verilog_31b.yaml --set 'hardware.machines=[v5p-8, 8xh100]'
    """
    stage = _part("plan.stage")
    if source.is_dir() or run_path is not None:
        record = stage.plan(_open(source, run_path, overrides))
    else:
        record = stage.plan_only(_part("resolve").resolve_file(source, overrides)[0])
    if as_json:
        click.echo(spell_out_json(record.model_dump_json(indent=1)))
    else:
        _part("plan.table").print_plan(record)


@cli.command()
@_source_options
@_force
@click.option("--show", type=click.IntRange(min=1), metavar="N", help="Print N packed rows with the trained tokens coloured.")
def data(source: Path, run_path: Path | None, overrides: Sequence[str], as_json: bool, force: bool, show: int | None) -> None:
    """Read, render, mask and pack the rows.

    SOURCE is a recipe (YAML) or a run directory.

    \b
    gemsmith data my.yaml --show 3
    """
    if show is not None and not force and not overrides and (source / "recipe.yaml").exists():
        opened = _part("run").borrow_run(source, section="data")
        if _part("run").is_complete(opened, "data"):  # then nothing is written, so another process may be at work there
            _part("pipeline").run_stage(opened, "data")
            _part("data.show").show(opened, show)
            return
    opened = _run_stage("data", source, run_path, overrides, as_json=as_json and show is None, force=force)
    if show is not None:
        _part("data.show").show(opened, show)


@cli.command()
@_source_options
@_force
@click.option("--coordinator", metavar="HOST:PORT", help="Of several hosts: where the first is reached; a free port.")
@click.option("--processes", type=click.IntRange(min=1), metavar="N", help="Of several hosts: how many.")
@click.option("--process-id", type=click.IntRange(min=0), metavar="I", help="Of several hosts: which one this is, from 0.")
def train(source: Path, run_path: Path | None, overrides: Sequence[str], as_json: bool, force: bool, **hosts: str | int | None) -> None:
    """Train the adapter; a run that was stopped goes on from its last checkpoint.

    SOURCE is a recipe (YAML) or a run directory. --force starts again from step 0; what is there is deleted once the first step has run.
    Several hosts train together when each runs this command; those of a TPU slice find each other.

    \b
    gemsmith train my.yaml --run runs/a --set optimizer.learning_rate=2e-4
    gemsmith train runs/a --coordinator 10.0.0.1:8476 --processes 2 --process-id 0
    """
    names = {"coordinator": "JAX_COORDINATOR_ADDRESS", "processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
    os.environ.update({names[option]: str(value) for option, value in hosts.items() if value is not None})
    _run_stage("train", source, run_path, overrides, as_json=as_json, force=force)


@cli.command()
@partial(_source_options, required=False)
@_force
@click.option("--base", metavar="FOLDER", help="The base: a folder, a Hugging Face hub id, or gs://bucket/folder.")
@click.option("--adapter", type=_folder, metavar="FOLDER", help="Any PEFT LoRA adapter of that base.")
@click.option("--from-tunix", type=_folder, metavar="FOLDER", help="Instead: an Orbax checkpoint of an ordinary Tunix and Qwix run.")
@click.option("--out", type=_folder, metavar="FOLDER", help="Where adapter/, merged/ and export.json go; must not be there yet.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier export at --out, once the new one is complete.")
@click.option("--step", type=click.IntRange(min=1), metavar="N", help="With --from-tunix: the saved step; default: the last.")
@click.option("--rank", type=click.IntRange(min=1), metavar="R", help="With --from-tunix: what the rank must be; it is read.")
@click.option("--alpha", type=float, metavar="A", help="With --from-tunix: alpha, as given to qwix.LoraProvider.")
def export(source: Path | None, run_path: Path | None, overrides: Sequence[str], as_json: bool, force: bool, **options: Any) -> None:
    """Write the PEFT adapter and the merged safetensors.

    SOURCE is a recipe (YAML) or a run directory. Without it, --base and --out name folders, and --adapter or --from-tunix what is merged.

    \b
    gemsmith export runs/my --set export.step=200 --force
    gemsmith export --base google/gemma-4-31B-it --adapter my-lora --out tuned
    gemsmith export --base gemma-4-31B-it --from-tunix checkpoints --alpha 64 --out tuned
    """
    given = {name: value for name, value in options.items() if value not in (None, False)}
    if source is not None:
        if given:
            raise InputError(f"--{next(iter(given)).replace('_', '-')}: goes without SOURCE, for exports that need no run; leave one out")
        _run_stage("export", source, run_path, overrides, as_json=as_json, force=force)
        return
    record = _part("export.folder").export_folder(of_a_run=bool(force or run_path or overrides), **given)
    _part("pipeline").print_notices(record)
    if as_json:
        click.echo(spell_out_json(record.model_dump_json(indent=1)))


@cli.command(name="import")
@click.argument("adapter", type=_folder)
@click.option("--base", metavar="FOLDER", required=True, help="The base it was trained on: a folder, a hub id, or gs://bucket/folder.")
@click.option("--recipe", type=_folder, metavar="FILE", help="A recipe to take all other keys from.")
@click.option("--out", type=_folder, metavar="FILE", help="Where the new recipe goes; default: stdout.")
def import_(adapter: Path, base: str, recipe: Path | None, out: Path | None) -> None:
    """Write a recipe that trains on from a PEFT adapter, once it has been checked against the base.

    Rank, alpha, rslora and targets are the adapter's. Without --recipe, data.train is left for you to fill in.

    \b
    gemsmith import my-lora --base google/gemma-4-31B-it --recipe my.yaml --out on.yaml && gemsmith run on.yaml
    """
    text = _part("export.reverse").start_recipe(base, adapter, recipe=recipe, out=out)
    if out is None:
        click.echo(text, nl=False)


@cli.command()
@_source_options
@_force
@click.option("--base", metavar="FOLDER", help="Of a folder that export wrote without a run: the base, where it has moved.")
@click.option("--served", is_flag=True, help="Also ask vLLM: base, base with adapter, and merged weights, greedily.")
def verify(
    source: Path, run_path: Path | None, overrides: Sequence[str], as_json: bool, force: bool, base: str | None, served: bool
) -> None:
    """Check that the exported weights are exactly what training produced.

    SOURCE is a recipe (YAML) or a run directory; or a folder that gemsmith export --out wrote.

    \b
    gemsmith verify runs/my --json
    gemsmith verify tuned --served
    """
    if (source / "export.json").is_file() and not (source / "recipe.yaml").exists():
        record = _part("export.verify").verify_folder(source, base_source=base)
        _part("pipeline").print_notices(record)
        if served:
            record = _part("evals.served").check_served_folder(source, base_source=base)
    else:
        if base is not None:
            raise InputError(f"--base: {source} is not a folder that gemsmith export --out wrote; a run's base is in its recipe")
        opened = _run_stage("verify", source, run_path, overrides, as_json=as_json and not served, force=force)
        if not served:
            return
        record = _part("evals.served").check_served_run(opened)
    if as_json:
        click.echo(spell_out_json(record.model_dump_json(indent=1)))


@cli.command()
@_source_options
@_unverified
def serve(source: Path, run_path: Path | None, overrides: Sequence[str], as_json: bool, unverified: bool) -> None:
    """Keep the tuned model up behind vLLM's OpenAI API until Ctrl-C; prints a curl line.

    SOURCE is a recipe (YAML) or a run directory; with the latter, --set changes keys of serve for this time only, and no record. With
    --json the server is started, asked once, recorded and stopped. Weights that verify has not passed as they are now are refused. Once
    the model is up, other commands may use the run directory.

    \b
    gemsmith serve runs/my --set serve.port=8000
    """
    if as_json:
        _run_stage("serve", source, run_path, overrides, as_json=True, force=True, unverified=unverified)
        return
    with contextlib.ExitStack() as lock:
        if source.is_dir() and (source / "recipe.yaml").exists():
            lock.enter_context(_part("lock").locked(source))
            opened = _part("run").borrow_run(source, overrides, section="serve")
        else:
            opened = _open(source, run_path, overrides, redo="serve", lock=lock)
            _part("run").confirm_recipe(opened)
        _part("serve.stage").keep_serving(opened, unverified=unverified, ready=lock.close)


@cli.command()
@_source_options
@_force
@_unverified
def bench(source: Path, run_path: Path | None, overrides: Sequence[str], as_json: bool, **options: bool) -> None:
    """Load-test the tuned model: TTFT, TPOT, ITL and throughput at each input length and request rate.

    SOURCE is a recipe (YAML) or a run directory.

    \b
    gemsmith bench runs/my --set 'bench.request_rates=[1, 8, 64]' --force
    """
    _run_stage("bench", source, run_path, overrides, as_json=as_json, **options)


@cli.command(name="eval")
@_source_options
@_force
@_unverified
def evaluate(source: Path, run_path: Path | None, overrides: Sequence[str], as_json: bool, **options: bool) -> None:
    """Score base and tuned model on the held-out rows, greedily, through the served API.

    SOURCE is a recipe (YAML) or a run directory.

    \b
    gemsmith eval runs/my --set eval.limit=50 --force
    """
    _run_stage("eval", source, run_path, overrides, as_json=as_json, **options)


@cli.command()
@_source_options
def report(source: Path, run_path: Path | None, overrides: Sequence[str], as_json: bool) -> None:
    """Write report.html from the records alone.

    SOURCE is a recipe (YAML) or a run directory.

    \b
    gemsmith report runs/my
    """
    opened = _open(source, run_path, overrides)
    page = _part("report.stage").report(opened)
    click.echo(json.dumps({"report": str(page)}) if as_json else spell_out(str(page)))


@cli.command()
@click.argument("sources", nargs=-1, required=True, type=_folder, metavar="SOURCE...")
@click.option("--out", type=_folder, metavar="FILE", help="Where the recipe goes, the table then to stdout; must not be there yet.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="A key of the recipe, whatever SOURCE says; may be repeated.")
@click.option("--devices", type=click.IntRange(min=1), metavar="N", help="GPUs that SOURCE was made for; for rows_per_step.")
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Updates of SOURCE's run, where its warm-up is a share of them.")
@click.option("--allow-differences", is_flag=True, help="Write the recipe although it would train differently from SOURCE.")
@click.option("--json", is_flag=True, help="Print the table, and the recipe, as JSON on stdout.")
def port(sources: Sequence[Path], **options: Any) -> None:
    """Turn a GPU recipe into one of Gemsmith's, with a table of what became of every key.

    SOURCE is PEFT's adapter_config.json, TrainingArguments or an SFTConfig (JSON, YAML), a YAML of TRL's command line, of Axolotl or of
    LLaMA-Factory, or a folder that holds some; several are read as those of one run.

    \b
    gemsmith port qlora.yaml --out my.yaml --devices 8
    gemsmith port adapter_config.json sft_config.json --set data.train=rows.jsonl > my.yaml
    """
    _part("port.command").port_files(sources, **options)


@cli.command()
def schema() -> None:
    """Print the recipe's JSON schema, for editors."""
    click.echo(json.dumps(_part("recipe").recipe_schema(), indent=2))


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    \b
    eval "$(gemsmith completion bash)"
    """
    from click.shell_completion import get_completion_class

    complete = get_completion_class(shell)
    assert complete is not None
    click.echo(complete(cli, {}, "gemsmith", "_GEMSMITH_COMPLETE").source())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs a command line and exits: 0 done, 1 our failure, 2 the user's input, 130 Ctrl-C, 143 SIGTERM."""
    signal.signal(signal.SIGTERM, _stop_on_sigterm)
    unheard = sys.unraisablehook
    hook = sys.unraisablehook = partial(_raise_again, unheard)
    if isinstance(sys.stdout, io.TextIOWrapper):  # where the locale's encoding lacks a letter, it is spelled out
        sys.stdout.reconfigure(errors="backslashreplace")
    # pydantic looks for plugins in all that is installed; Gemsmith has none, and the search takes 30 ms.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        # Returns None after a verb, an exit code after --help or --version.
        code = cli.main(args=arguments, prog_name="gemsmith", standalone_mode=False) or 0
    except click.ClickException as error:
        code = _complain(error.format_message(), 2)
    except (KeyboardInterrupt, click.Abort):
        code = _complain("stopped by Ctrl-C; the same command goes on where it was", 130)
    except GemsmithError as error:
        code = _complain(str(error), error.exit_code)
    except OSError as error:
        if error.errno not in USERS_ERRNOS:
            raise
        code = _complain(explain_os_error(error), 2)
    finally:
        # Not where training has put its own before it, for what its threads still say of a full disk or a damaged checkpoint.
        if sys.unraisablehook is hook:
            sys.unraisablehook = unheard
    sys.exit(code)


def _complain(message: str, code: int) -> int:
    kind = "error" if code in (1, 2) else "note"
    # What the user can mend is one line; what an engine wrote may be several.
    click.echo(f"{kind}: {spell_out(message, lines=code != 2)}", err=True)
    return code


def _stop_on_sigterm(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise Preempted("stopped by SIGTERM; the same command goes on where it was")


def _raise_again(unheard: Callable[[Any], object], swallowed: Any) -> None:
    """Sends a signal once more whose exception fell into a callback of the garbage collector, such as JAX's, where it is lost."""
    number = {KeyboardInterrupt: signal.SIGINT, Preempted: signal.SIGTERM}.get(swallowed.exc_type)
    if number is None:
        unheard(swallowed)
    else:
        threading.Timer(0.1, os.kill, (os.getpid(), number)).start()


def _part(name: str) -> ModuleType:
    """A module of Gemsmith, imported when it is needed; a missing extra is one line."""
    try:
        return importlib.import_module(f"gemsmith.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gemsmith"):
            raise
        raise MachineError(f"{error.name} is not installed, which this needs; run: pip install 'gemsmith[train]'") from None


def _open(
    source: Path,
    run_path: Path | None,
    overrides: Sequence[str],
    *,
    redo: str | None = None,
    trains: bool = False,
    lock: contextlib.ExitStack | None = None,
) -> Any:
    """The run, its directory locked until the command ends, or until `lock` is closed."""
    enter = lock.enter_context if lock else click.get_current_context().with_resource

    def claim(folder: Path) -> None:
        # Of the processes of one training, the first writes there for all.
        if not (trains and _part("train.first_host").is_later_host()):
            enter(_part("lock").locked(folder))

    return _part("run").open_source(source, run_path, overrides, redo=redo, claim=claim)


def _run_stage(
    name: str, source: Path, run_path: Path | None, overrides: Sequence[str], *, as_json: bool, force: bool, **options: bool
) -> Any:
    opened = _open(source, run_path, overrides, redo=name if force else None, trains=name == "train")
    record = _part("pipeline").run_stage(opened, name, force=force, **options)
    if as_json:
        click.echo(spell_out_json(record.model_dump_json(indent=1)))
    return opened


if __name__ == "__main__":
    main()
