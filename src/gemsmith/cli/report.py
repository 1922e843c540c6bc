"""The verbs that only read records: report and runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from gemsmith.cli.main import cli, echo, lazy_import, print_json
from gemsmith.cli.options import FOLDER, Number, RunArgs, conflicts, option, requires, set_option, skip_verify_option
from gemsmith.errors import InputError

_FORMS = ("html", "md", "csv", "json")
_WEIGHTS = click.Choice(["adapter", "merged"])
_SORT = click.Choice(["name", "state", "stage", "loss", "score", "speed", "cost", "started"])


@cli.command(short_help="Write the page of a run, or compare runs.")
@click.argument("sources", nargs=-1, type=FOLDER, metavar="[SOURCE...]")
@option("--run", "run_path", metavar="DIR", help="Of one SOURCE: the run directory.")
@option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Of one SOURCE: override a key.")
@option("--html", metavar="FILE", help="Write the page there; of one run: default report.html in it.")
@option("--md", is_flag=True, help="Print Markdown.")
@option("--csv", is_flag=True, help="Print CSV: a line for each difference and each ratio.")
@option("--json", is_flag=True, help="Print JSON; of one run: where its page is.")
@option(
    "--varying",
    multiple=True,
    metavar="KEY",
    help="What is compared on purpose, so that it confounds nothing; may be "
    "repeated. Default: the one key of the recipes that differs.",
)
@option(
    "--hours",
    type=Number(min=0, min_open=True),
    multiple=True,
    metavar="N",
    help="Hours of serving that are priced with training; may be repeated. Default: 1, 8, 24.",
)
@option(
    "--trained-on",
    multiple=True,
    metavar="[RUN=]MACHINE",
    help="A machine of the run's plan, where the records do not tell which it was.",
)
@option("--served-on", multiple=True, metavar="[RUN=]MACHINE", help="The same of its load test.")
@option("--paper", is_flag=True, help="The tables of arXiv 2605.25645, drawn again, and runs compared with them.")
@conflicts("html", "md", "csv", "json")
@conflicts("md", "csv", "json")
@conflicts("csv", "json")
@conflicts("paper", "run_path", "overrides")
def report(sources: Sequence[Path], run_path: Path | None, overrides: Sequence[str], **options: Any) -> None:
    """Write report.html of a run, or compare runs, from the records alone.

    SOURCE is a recipe (YAML), a run directory, or gs://bucket/folder/NAME of a launch, whose records are fetched into
    the run directory first. Several are compared with the first: what differs, then each ratio with what confounds it.

    \b
    gemsmith report runs/my
    gemsmith report runs/a runs/b
    gemsmith report runs/tpu runs/gpu --varying train:machine --html comparison.html
    gemsmith report --paper
    gemsmith report --paper runs/my
    """
    form = next((name for name in _FORMS if options[name]), None)
    if options["paper"]:
        if (options["trained_on"] or options["served_on"]) and not sources:
            raise InputError("--trained-on and --served-on: are for runs compared with the paper; give a run directory")
        _compare(sources, form, options)
    elif not sources:
        raise InputError("SOURCE is missing; give a run directory, several to compare them, or --paper")
    elif len(sources) == 1:
        for name in ("varying", "hours", "trained_on", "served_on", "md", "csv"):
            if options[name]:
                raise InputError(f"--{name.replace('_', '-')}: is for a comparison; give two run directories or more")
        source, run_path = _fetched(sources[0], run_path)
        args = RunArgs(source=source, run_path=run_path, overrides=tuple(overrides), as_json=form == "json")
        opened, html = args.open_run(), options["html"]
        found = lazy_import("analysis.summary").read_findings(opened).problems
        damaged = [text for stage, text in found.items() if opened.record_file(stage).exists()]
        lazy_import("system.console").print_warnings("report", damaged)
        page = lazy_import("report.page").report(opened, html)
        echo(json.dumps({"report": str(page)}) if form == "json" else str(page))
    else:
        if run_path or overrides:
            raise InputError("--run and --set: are for one SOURCE; to compare, give run directories as they are")
        _compare(sources, form, options)


@cli.command(short_help="List runs: state, loss, speed and cost.")
@click.argument("folder", type=FOLDER, default=Path("runs"))
@option("--sort", type=_SORT, default="started", show_default=True, help="What to sort by; runs without it come last.")
@option("--reverse", is_flag=True, help="The other way round.")
@option("--state", "states", multiple=True, metavar="STATE", help="Only runs in this state; may be repeated.")
@option("--name", metavar="PATTERN", help="Only runs whose name matches, such as 'gpu-*'.")
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def runs(folder: Path, sort: str, reverse: bool, states: Sequence[str], name: str | None, as_json: bool) -> None:
    """List the run directories in FOLDER (default: runs): state, stage, loss, score, speed and cost.

    States: complete, running, stopped, stale (made from other settings than those there now), failed (checks), damaged.

    \b
    gemsmith runs
    gemsmith runs runs --state stopped --state failed
    gemsmith runs runs --sort loss --name 'rank-*' --json
    """
    listed = lazy_import("report.runs")
    found = listed.find_runs(folder, states=states, name=name, sort=sort, reverse=reverse)
    if as_json:
        print_json(json.dumps([each.as_json() for each in found], indent=1))
    else:
        listed.print_runs(found, folder)


def _compare(sources: Sequence[Path], form: str | None, options: dict[str, Any]) -> None:
    """Of runs, or with --paper of the paper and of any runs compared with it: on stdout, or a page, whose place is."""
    folders = [_fetched(source, None)[0] for source in sources]
    sides = lazy_import("analysis.summary").read_sides(
        folders, trained_on=options["trained_on"], served_on=options["served_on"]
    )
    comparison = lazy_import("analysis.compare")
    how = {"varying": options["varying"], "hours": options["hours"] or comparison.HOURS}
    redrawn = None
    if options["paper"]:
        published = lazy_import("analysis.published")
        redrawn = published.reanalyze(published.read_published(), sides, **how)
    found = redrawn.comparison if redrawn else comparison.compare_sides(sides, **how)
    tables = lazy_import("report.tables")
    if form == "html":
        page = lazy_import("report.comparison_page").render_comparison(found, redrawn)
        lazy_import("system.files").write_text(options["html"], page)
        echo(str(options["html"]))
    elif form == "md":
        echo(tables.markdown_of(found, redrawn), nl=False)
    elif form == "csv":
        echo(tables.csv_of(found), nl=False)
    elif form == "json":
        print_json(redrawn or found)
    else:
        tables.print_comparison(found, redrawn)


def bucket_url(source: Path) -> str | None:
    """The address that a source is, whose two slashes a Path has made one; None for a file or folder.

    >>> bucket_url(Path("gs://b/run")), bucket_url(Path("runs/my"))
    ('gs://b/run', None)
    """
    scheme, _, rest = str(source).partition(":/")
    return f"{scheme}://{'/' if scheme == 'file' else ''}{rest}" if scheme in ("gs", "file") and rest else None


def _fetched(source: Path, run_path: Path | None) -> tuple[Path, Path | None]:
    """The run directory of a bucket's address, its records fetched; else both as they are."""
    url = bucket_url(source)
    if url is None:
        return source, run_path
    folder = run_path or Path("runs") / source.name
    with lazy_import("system.locks").locked(folder):
        lazy_import("launch.sync").fetch_records(url, folder)
    return folder, None


@cli.command(short_help="Put weights on the hub or into Vertex AI.")
@click.argument("source", type=FOLDER)
@option("--to", required=True, metavar="hub:OWNER/NAME|vertex:PROJECT/REGION", help="A repository is made if need be.")
@option("--weights", type=_WEIGHTS, default="adapter", show_default=True, help="What is uploaded.")
@option("--private", is_flag=True, help="Make a repository that only you see.")
@option("--license", metavar="NAME", help="Of the weights, as the hub names licenses, such as apache-2.0.")
@option("--bucket", metavar="gs://…", help="For vertex: merged/ is copied there, to BUCKET/NAME/merged.")
@option("--machine", metavar="NAME", help="For vertex: of the catalog, with the GPUs that vLLM is told to use.")
@set_option
@option("--print", "print_only", is_flag=True, help="Print the card, or what Vertex AI gets, and upload nothing.")
@skip_verify_option
@conflicts("print_only", "private", "skip_verify_check")
@conflicts("machine", "private", "weights")
@requires("machine", "bucket", "overrides")
def push(
    source: Path, to: str, print_only: bool, machine: str | None, bucket: str | None, overrides: Any, **options: Any
) -> None:
    """Upload a run's adapter or merged weights, with a model card made from its records.

    SOURCE is a run directory; for vertex also gs://…, a launched run. The token is that of huggingface_hub, $HF_TOKEN
    or what hf auth login kept; for vertex gcloud's.

    \b
    gemsmith push runs/my --to hub:me/my-adapter --print
    gemsmith push runs/my --to hub:me/my-model --weights merged --private --license apache-2.0
    gemsmith push gs://runs/my --to vertex:my-project/us-central1 --machine 1xh100 --print
    """
    if (machine is None) is to.startswith("vertex:"):
        raise InputError(f"--to {to}: vertex:PROJECT/REGION and --machine go together; give both, or neither")
    folder = source if machine is None else _fetched(source, None)[0]
    run = lazy_import("runs.run").open_run_readonly(folder, overrides, section="serve")
    module, license_ = lazy_import("report.push" if machine is None else "launch.vertex"), options["license"]
    if machine is not None:
        where = {"machine": machine, "bucket": bucket, "root": bucket_url(source)}
        asked, skip = module.make_registration(run, to, license_=license_, **where), options["skip_verify_check"]
        print_json(asked) if print_only else echo(module.register(run, asked, skip_verify_check=skip))
    elif print_only:
        echo(module.model_card(run, module.repository(to), weights=options["weights"], license=license_), nl=False)
    else:
        click.echo(module.push(run, to, **options))
