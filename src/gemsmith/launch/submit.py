"""A launch from its request on: files rendered once, printed, and run as they are; then followed, stopped and removed.

External commands are run by `ask` and `show` alone.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from gemsmith.errors import EngineError, InputError, MachineError, last_line
from gemsmith.launch.commands import leftover_resources, preflight, resources
from gemsmith.launch.provider import (
    LAUNCHES,
    Command,
    LaunchRecord,
    LaunchRequest,
    PreflightCheck,
    Target,
    read_launch,
    write_launch,
)
from gemsmith.launch.shards import PACKED
from gemsmith.launch.upload import cost_lines, upload_lines
from gemsmith.runs.run import start_clock
from gemsmith.system.files import sha256_file, write_text
from gemsmith.system.process import kill_tree
from gemsmith.system.version import __version__

PATIENCE_S = 120  # for a command that only asks
_FIRST = 2  # checks without which nothing else can be asked: gcloud and a login


def ask(command: Command) -> subprocess.CompletedProcess[str]:
    """What a command printed, of stderr the last line; a program that does not exist, or does not answer, says so."""
    if shutil.which(command[0]) is None:
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]} is not on PATH")
    try:
        done = _run(command, PATIENCE_S, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer within {PATIENCE_S} s")
    done.stderr = last_line(done.stderr) if done.stderr else ""
    return done


def show(command: Command, *, needs: Sequence[str] = ()) -> None:
    """Runs a command whose output is the user's to read; it finds this Gemsmith, also where that is not on PATH.

    Raises MachineError where it, or a program that it needs, is missing, EngineError where it fails.
    """
    for program in (command[0], *needs):
        if shutil.which(program) is None:
            raise MachineError(f"{program}: is not on PATH; install it and run the same command again")
    ours = {"PATH": f"{os.environ.get('PATH', '')}{os.pathsep}{Path(sys.executable).parent}"}
    if code := _run(command, env=os.environ | ours).returncode:
        more = " …" if len(command) > 4 else ""
        raise EngineError(f"{' '.join(command[:4])}{more} ended with {code}; its own lines are above")


def _run(command: Command, timeout_s: float | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """As subprocess.run, which ends a shell alone where it is stopped: not gcloud in it, which would go on creating."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            kill_tree(process.pid)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run_preflight(checks: Sequence[PreflightCheck], console: Console) -> None:
    """Prints a line for each check, with its remedy where it fails. Raises MachineError once all have been asked."""
    failed = []
    for number, check in enumerate(checks):
        answer = ask(check.command)
        if answer.returncode:
            complaint: str | None = answer.stderr or f"{check.command[0]} ended with {answer.returncode}"
        else:
            complaint = check.complaint(answer.stdout)
        if complaint is None:
            console.print(Text.assemble(("ok    ", "green"), check.name))
            continue
        mark = ("fails ", "red") if check.needed else ("note  ", "yellow")
        console.print(Text.assemble(mark, f"{check.name}: {complaint}; {check.remedy}"))
        if check.needed:
            failed.append(check.name)
            if number < _FIRST:
                break
    if failed:
        what = f"{len(failed)} of {len(checks)} checks failed ({failed[0]}{', …' if len(failed) > 1 else ''})"
        raise MachineError(
            f"preflight: {what}; nothing was created; do what the lines above say and run the same command again"
        )


def print_files(request: LaunchRequest, target: Target, folder: Path) -> list[Path]:
    """Writes the rendered files into a folder, which must not hold others; returns them in order."""
    files = target.render(request)
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
    request: LaunchRequest, target: Target, provider: str, *, max_usd: float | None, assume_yes: bool, console: Console
) -> LaunchRecord:
    """Renders into launches/NAME, asks, runs submit.sh there and returns the launch's record.

    Raises InputError for a name that is taken, a bill above `max_usd`, or where nobody can be asked and `assume_yes`
    was not given; MachineError where the preflight fails. Until then nothing is created.
    """
    name, most_usd = request.options.name, request.bill.max_usd
    if (LAUNCHES / name / "launch.json").exists() and (state := read_launch(name).state) != "cleaned":
        remedy = f"run gemsmith launch clean {name}, or choose another name"
        raise InputError(f"--name {name}: a launch of that name is {state}; {remedy}")
    for line in (*cost_lines(request), *upload_lines(request)):
        console.print(line)
    if max_usd is not None and most_usd > max_usd:
        remedy = "lower --timeout-hours or --retries, or raise it"
        raise InputError(f"--max-usd {max_usd:g}: this launch can cost {most_usd:,.2f} USD; {remedy}")
    run_preflight(preflight(request, provider, target.values(request)), console)
    paths = print_files(request, target, LAUNCHES / name)
    console.print(f"submits {paths[0].parent}/submit.sh, as it is there")
    _confirm(f"Spend up to {most_usd:,.2f} USD?", assume_yes=assume_yes, to="submit")
    record = LaunchRecord.model_validate(
        dict(request.options)
        | {
            "state": "submitting",
            "target": provider,
            "root": request.root,
            "usd_per_hour": request.bill.usd_per_hour,
            "max_usd": round(most_usd, 2),
            "started": start_clock().started,
            "gemsmith": __version__,
            "files": {path.name: sha256_file(path) for path in paths},
        }
    )
    write_launch(record)
    try:
        show(("bash", str(paths[0].parent / "submit.sh")), needs=("gcloud",))
    except BaseException:
        # Some of it may be there: the record stays, so that clean finds it.
        write_launch(record.model_copy(update={"state": "failed"}))
        console.print(Text(f"what was created before that is removed by: gemsmith launch clean {name}", "red"))
        raise
    record = record.model_copy(update={"state": "submitted"})
    write_launch(record)
    console.print(f"submitted; next: gemsmith launch status {name}, logs, fetch, stop, clean")
    return record


def _confirm(question: str, *, assume_yes: bool, to: str) -> None:
    if assume_yes:
        return
    if not sys.stdin.isatty():
        raise InputError(f"--yes: is missing, and there is no terminal to ask at; give it to {to}")
    import click

    if not click.confirm(question, err=True):
        raise InputError(f"the answer was no, so nothing was done; answer yes to {to}")


def stop(record: LaunchRecord, *, assume_yes: bool, console: Console) -> None:
    """Ends all that costs money; what is in the bucket stays, so that the run can resume."""
    _remove(record, "running", assume_yes=assume_yes, console=console, nothing="nothing of it runs")


def clean(record: LaunchRecord, *, assume_yes: bool, console: Console) -> None:
    """Removes all that the launch created, and says what outlives it. Raises EngineError where something stays."""
    _remove(record, "created", assume_yes=assume_yes, console=console, nothing="nothing of it is there")
    if left := [name for _, name, _ in _found(record, "created")]:
        raise EngineError(f"{record.name}: still there: {', '.join(left)}; it may be on its way out, run clean again")
    write_launch(record.model_copy(update={"state": "cleaned"}))
    for line in leftover_resources(record):
        console.print(line)


def _found(record: LaunchRecord, verb: str) -> Iterator[tuple[str, str, Command]]:
    """Each thing that is there: its kind, its name, and the command that removes it."""
    for resource in resources(record, verb):
        answer = ask(resource.list)
        if answer.returncode:
            what = f"cannot be listed ({answer.stderr}); so it is not known what is left"
            raise EngineError(f"{resource.kind}: {what}; run again: {' '.join(resource.list)}")
        for name in answer.stdout.split():
            yield resource.kind, name, tuple(part.replace("{}", name) for part in resource.remove)


def _remove(record: LaunchRecord, verb: str, *, assume_yes: bool, console: Console, nothing: str) -> None:
    found = list(_found(record, verb))
    if not found:
        console.print(f"{record.name}: {nothing}")
        return
    for kind, name, _ in found:
        console.print(f"{kind} {name}")
    _confirm("Remove all of these?", assume_yes=assume_yes, to="remove what is listed")
    failures = []
    for kind, name, command in found:
        answer = ask(command)
        console.print(f"{kind} {name}: {answer.stderr if answer.returncode else 'removed'}")
        failures += [name] if answer.returncode else []
    if failures:
        raise EngineError(f"{', '.join(failures)}: not removed, for the reason above; run the same command again")
