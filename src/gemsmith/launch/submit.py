"""A launch from its request on: files rendered once, printed, and run as they are."""

import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gemsmith.errors import GemsmithError, InputError
from gemsmith.files import sha256_file, write_text
from gemsmith.launch.pictures import PACKED
from gemsmith.launch.preflight import run_preflight
from gemsmith.launch.record import LaunchRecord, launch_folder, read_launch, write_launch
from gemsmith.launch.runner import run_script
from gemsmith.launch.steps import cost_lines, rendered_lists, upload_lines
from gemsmith.launch.target import Request, Target
from gemsmith.provenance import start_clock
from gemsmith.version import __version__


def print_files(request: Request, target: Target, folder: Path) -> list[Path]:
    """Writes the rendered files into a folder, which must not hold others; returns them in order."""
    files = {**target.render(request), **rendered_lists(request)}
    known = {*files, "launch.json", PACKED}
    if folder.exists() and (others := sorted({path.name for path in folder.iterdir()} - known)):
        raise InputError(f"{folder}: holds {others[0]}, which this launch does not render; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_text(folder / name, text)
        if name.endswith(".sh"):
            (folder / name).chmod(0o755)
    return [folder / name for name in files]


def submit(
    request: Request, target: Target, on: str, *, max_usd: float | None, agreed: bool, console: Console
) -> LaunchRecord:
    """Renders into launches/NAME, asks, runs submit.sh there and returns the launch's record.

    Raises InputError for a name that is taken, a bill above `max_usd`, or where nobody can be asked and `agreed` was
    not given; MachineError where the preflight fails. Until then nothing is created.
    """
    _refuse_taken(request.name)
    for line in (*cost_lines(request), *upload_lines(request)):
        console.print(line)
    _refuse_bill(request, max_usd)
    run_preflight(target.preflight(request), console)
    paths = print_files(request, target, launch_folder(request.name))
    console.print(f"submits {paths[0].parent}/submit.sh, as it is there")
    _ask(request, agreed=agreed)
    record = _record(request, on, {path.name: sha256_file(path) for path in paths})
    write_launch(record)
    try:
        run_script(paths[0].parent / "submit.sh", needs=("gcloud",))
    except BaseException:
        # Some of it may be there: the record stays, so that clean finds it.
        write_launch(record.model_copy(update={"state": "failed"}))
        console.print(Text(f"what was created before that is removed by: gemsmith launch clean {request.name}", "red"))
        raise
    record = record.model_copy(update={"state": "submitted"})
    write_launch(record)
    console.print(f"submitted; next: gemsmith launch status {request.name}, logs, fetch, stop, clean")
    return record


def _refuse_taken(name: str) -> None:
    try:
        state = read_launch(name).state
    except GemsmithError:
        if (launch_folder(name) / "launch.json").exists():
            raise
        return
    if state != "cleaned":
        raise InputError(
            f"--name {name}: a launch of that name is {state}; run gemsmith launch clean {name}, or choose another name"
        )


def _refuse_bill(request: Request, max_usd: float | None) -> None:
    if max_usd is not None and request.bill.greatest_usd > max_usd:
        raise InputError(
            f"--max-usd {max_usd:g}: this launch can cost {request.bill.greatest_usd:,.2f} USD; lower --timeout-hours "
            "or --retries, or raise it"
        )


def _ask(request: Request, *, agreed: bool) -> None:
    if agreed:
        return
    if not sys.stdin.isatty():
        raise InputError("--yes: is missing, and there is no terminal to ask at; give it to submit")
    import click

    click.confirm(f"Spend up to {request.bill.greatest_usd:,.2f} USD?", abort=True, err=True)


def _record(request: Request, on: str, files: dict[str, str]) -> LaunchRecord:
    return LaunchRecord(
        name=request.name,
        state="submitting",
        target=on,
        machine=request.machine.name,
        project=request.project,
        region=request.region,
        zone=request.zone,
        root=request.root,
        stages=request.stages,
        image=None if request.python else str(request.image.value),
        secret=request.secret,
        service_account=request.service_account,
        spot=request.spot,
        cluster=request.cluster,
        usd_per_hour=request.bill.usd_per_hour,
        greatest_usd=round(request.bill.greatest_usd, 2),
        started=start_clock().started,
        gemsmith=__version__,
        files=files,
    )
