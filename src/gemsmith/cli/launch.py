"""Launch a run on a machine that is rented for it, follow it, and bring it home."""

from pathlib import Path
from typing import Any

import click

from gemsmith.cli.main import cli, lazy_import, print_json, require_extra
from gemsmith.cli.options import FOLDER, Number, option, set_option
from gemsmith.cli.serve import OF_A_RUN, SAMPLING, max_tokens_option, seed_option, temperature_option, top_p_option
from gemsmith.errors import InputError

_yes = option("--yes", is_flag=True, help="Do not ask.")


class _Launch(click.Group):
    """A group whose first argument may also be a recipe: then the verb is `start`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "-h", "--help"):
            args = ["start", *args]
        return super().parse_args(ctx, args)


@cli.group(cls=_Launch, subcommand_metavar="RECIPE | COMMAND ...", short_help="Run stages on a rented machine.")
def launch() -> None:
    """Run a recipe's stages on Cloud Run, a TPU VM, Kubernetes or SkyPilot, and bring the results home.

    \b
    gemsmith launch my.yaml --provider cloud-run --project P --bucket gs://runs --print out   see what is submitted
    gemsmith launch my.yaml --provider cloud-run --project P --bucket gs://runs --submit      submit it
    gemsmith launch status my
    gemsmith launch fetch my                                                                  into runs/my
    gemsmith launch clean my                                                                  remove what it created
    """


@launch.command(short_help="Render a launch, and submit it.")
@click.argument("recipe", type=FOLDER)
@option("--provider", required=True, type=click.Choice(["cloud-run", "tpu-vm", "gke", "sky"]), help="Where to.")
@option("--bucket", required=True, metavar="gs://…", help="Where the run goes: gs://bucket or a folder in one.")
@option("--project", required=True, metavar="ID", help="The Google Cloud project.")
@option("--machine", metavar="NAME", help="Of the catalog; default: the cheapest that fits.")
@option(
    "--stages", metavar="A,B,…", help="Default: plan,data,train,export,verify; on cloud-run also eval. Last: predict."
)
@option("--name", metavar="NAME", help="Of the launch; default: the recipe's.")
@option("--region", metavar="REGION", help="Default: the cheapest that the catalog knows.")
@option("--zone", metavar="ZONE", help="For tpu-vm, and for gke where the cluster is in one zone.")
@option("--image", metavar="IMAGE", help="A container image of your own with Gemsmith in it.")
@option(
    "--wheel",
    metavar="DIR",
    help="For tpu-vm: no container; a folder with Gemsmith's wheel and locks, which uv installs there.",
)
@option("--service-account", metavar="EMAIL", help="Default: gemsmith's in the project; with sky SkyPilot's.")
@option("--secret", metavar="NAME", help="With a Hugging Face token, for a checkpoint that is not public.")
@option("--spot", is_flag=True, help="Cheaper, and may be taken away; the run then resumes from the bucket.")
@option("--network", metavar="NAME", help="A VPC network.")
@option("--subnet", metavar="NAME", help="Its subnet; for cloud-run /26 or larger.")
@option("--timeout-hours", type=Number(0, 8760, min_open=True), help="Of one attempt.")
@option("--retries", type=click.IntRange(0, 10), default=3, show_default=True, help="After a failure.")
@option("--cluster", metavar="NAME", help="For gke: the cluster.")
@option("--queue", metavar="NAME", help="For gke: Kueue's local queue.")
@option("--serve-machine", metavar="NAME", help="For gke: make a service of the tuned model, too, on this machine.")
@option(
    "--load",
    type=click.Choice(["mount", "stream"]),
    help="For the service of the tuned model: its weights from the bucket as a folder (default), or streamed.",
)
@option("--max-replicas", type=click.IntRange(1, 1000), metavar="N", help="Of the service, at most; default: 1.")
@option("--rows", metavar="ROWS", help="With --stages predict: a file or folder of prompts here, hub:… or gs://….")
@option("--tasks", metavar="N", default=1, show_default=True, help="On cloud-run, of predict alone: to share the rows.")
@option("--model", type=click.Choice(OF_A_RUN), default="tuned", show_default=True, help="With --rows: which answers.")
@temperature_option
@top_p_option
@max_tokens_option
@seed_option
@set_option
@option("--print", "folder", metavar="DIR", help="Write what would be submitted, and stop there.")
@option("--submit", is_flag=True, help="Submit it, after a preflight and a question.")
@option("--max-usd", type=Number(min=0), metavar="USD", help="Refuse what can cost more.")
@_yes
def start(
    recipe: Path, provider: str, folder: Path | None, submit: bool, max_usd: float | None, yes: bool, **options: Any
) -> None:
    """Render a launch, and submit it; `gemsmith launch RECIPE` is short for this."""
    if (folder is None) is not submit:
        raise InputError("--print DIR or --submit: give one of them")
    console = lazy_import("system.console").open_console()
    target, submission = lazy_import("launch.providers").TARGETS[provider], lazy_import("launch.submit")
    sampling = {name: options.pop(name) for name in ("model", *SAMPLING)}
    asked = lazy_import("launch.provider").LaunchOptions(**options, sampling=sampling)
    with require_extra():
        request = lazy_import("launch.request").make_request(recipe, target, provider, asked)
        if submit:
            submission.submit(request, target, provider, max_usd=max_usd, assume_yes=yes, console=console)
            return
        files = submission.print_files(request, target, folder)
    for file in files:
        click.echo(str(file))
    upload = lazy_import("launch.upload")
    for line in (*upload.cost_lines(request), *upload.upload_lines(request)):
        console.print(line)


@launch.command()
@click.argument("name")
@option("--json", "as_json", is_flag=True, help="Print the launch's record as JSON instead.")
def status(name: str, as_json: bool) -> None:
    """Say how a launch is doing, in its target's own words."""
    record = lazy_import("launch.provider").read_launch(name)
    if as_json:
        print_json(record)
        return
    lazy_import("launch.submit").show(lazy_import("launch.commands").follow_command(record, "status"))


@launch.command()
@click.argument("name")
def logs(name: str) -> None:
    """Print what a launch has said so far."""
    record = lazy_import("launch.provider").read_launch(name)
    lazy_import("launch.submit").show(lazy_import("launch.commands").follow_command(record, "logs"))


@launch.command(short_help="Bring records, adapter and logs home.")
@click.argument("name")
@option("--run", "run_path", metavar="DIR", help="Default: runs/NAME.")
@option("--merged", is_flag=True, help="The merged weights, too, which are as large as the model.")
def fetch(name: str, run_path: Path | None, merged: bool) -> None:
    """Bring records, adapter and logs home, as far as there are any; the run continues."""
    record = lazy_import("launch.provider").read_launch(name)
    path = run_path or Path("runs") / name
    with require_extra(), lazy_import("system.locks").locked(path):
        count = lazy_import("launch.sync").fetch_home(record.root, path, merged=merged)
    click.echo(f"{path}: {count} files; next: gemsmith report {path}")


@launch.command(short_help="End all of a launch that costs money.")
@click.argument("name")
@_yes
def stop(name: str, yes: bool) -> None:
    """End all of a launch that costs money; the same launch can resume later from its bucket."""
    record, console = lazy_import("launch.provider").read_launch(name), lazy_import("system.console").open_console()
    lazy_import("launch.submit").stop(record, assume_yes=yes, console=console)


@launch.command()
@click.argument("name")
@_yes
def clean(name: str, yes: bool) -> None:
    """Remove what a launch created, and say what outlives it."""
    record, console = lazy_import("launch.provider").read_launch(name), lazy_import("system.console").open_console()
    lazy_import("launch.submit").clean(record, assume_yes=yes, console=console)


@launch.command(hidden=True)
@click.argument("listed", type=FOLDER)
@click.argument("folder", type=FOLDER)
@click.argument("out", type=FOLDER)
def pack(listed: Path, folder: Path, out: Path) -> None:
    """What submit.sh runs: the listed images of a folder as a few files, if each is still what the list says."""
    lazy_import("launch.shards").pack(listed, folder, out)


@launch.command(hidden=True)
@click.argument("root", metavar="gs://…")
@option("--folder", metavar="FOLDER", required=True, help="Where the run directory goes.")
@option("--stages", required=True, metavar="A,B,…")
@option("--asked", metavar="JSON", help="With predict: rows, model and sampling.")
def worker(root: str, folder: Path, stages: str, asked: str | None) -> None:
    """What the machine of a launch runs: the stages of the recipe at gs://…/launched, kept there as they go."""
    with require_extra():
        console = lazy_import("system.console").open_console()
        lazy_import("launch.worker").run_on_worker(
            root, folder.resolve(), stages.split(","), lazy_import("pipeline").run_stage, console, asked=asked
        )
