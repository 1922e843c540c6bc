"""What becomes of a launch: its status and logs, its end, and what is left of it afterwards."""

import sys
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console

from gemsmith.errors import EngineError, InputError
from gemsmith.launch.checks import in_artifact_registry
from gemsmith.launch.record import LaunchRecord, write_launch
from gemsmith.launch.runner import ask, show
from gemsmith.launch.target import Command, Resource, Target


def show_status(record: LaunchRecord, target: Target) -> None:
    show(target.status(record))


def show_logs(record: LaunchRecord, target: Target) -> None:
    show(target.logs(record))


def stop(record: LaunchRecord, target: Target, *, agreed: bool, console: Console) -> None:
    """Ends all that costs money; what is in the bucket stays, so that the run can go on."""
    found = list(_found(target.running(record)))
    _remove(found, agreed=agreed, console=console, nothing=f"{record.name}: nothing of it runs")


def clean(record: LaunchRecord, target: Target, *, agreed: bool, console: Console) -> None:
    """Removes all that the launch created, and says what outlives it. Raises EngineError where something stays."""
    found = list(_found(target.created(record)))
    _remove(found, agreed=agreed, console=console, nothing=f"{record.name}: nothing of it is there")
    if left := [name for _, name, _ in _found(target.created(record))]:
        raise EngineError(f"{record.name}: still there: {', '.join(left)}; it may be on its way out, run clean again")
    write_launch(record.model_copy(update={"state": "cleaned"}))
    for line in what_outlives(record):
        console.print(line)


def what_outlives(record: LaunchRecord) -> tuple[str, ...]:
    """What clean leaves, with the command that removes it."""
    account, project = record.service_account, record.project
    secret, image = record.secret, record.image
    remove = f"; gcloud artifacts docker images delete {image}" if image and in_artifact_registry(image) else ""
    return (
        f"kept: {record.root}, the run; gcloud storage rm --recursive {record.root}",
        *((f"kept: image {image}{remove}",) if image else ()),
        *((f"kept: secret {secret}; gcloud secrets delete {secret} --project {project}",) if secret else ()),
        f"kept: service account {account}; gcloud iam service-accounts delete {account} --project {project}",
    )


def _found(resources: Iterable[Resource]) -> Iterator[tuple[Resource, str, Command]]:
    """Each thing that is there: its kind, its name, and the command that removes it."""
    for resource in resources:
        answer = ask(resource.list)
        if answer.code:
            raise EngineError(
                f"{resource.kind}: cannot be listed ({answer.complaint}); so it is not known what is left; run again: "
                f"{' '.join(resource.list)}"
            )
        for name in answer.output.split():
            yield resource, name, tuple(part.replace("{}", name) for part in resource.remove)


def _remove(found: Sequence[tuple[Resource, str, Command]], *, agreed: bool, console: Console, nothing: str) -> None:
    if not found:
        console.print(nothing)
        return
    for resource, name, _ in found:
        console.print(f"{resource.kind} {name}")
    if not agreed:
        if not sys.stdin.isatty():
            raise InputError("--yes: is missing, and there is no terminal to ask at; give it to remove what is listed")
        import click

        click.confirm("Remove all of these?", abort=True, err=True)
    failures = []
    for resource, name, command in found:
        answer = ask(command)
        console.print(f"{resource.kind} {name}: {'removed' if not answer.code else answer.complaint}")
        failures += [name] if answer.code else []
    if failures:
        raise EngineError(f"{', '.join(failures)}: not removed, for the reason above; run the same command again")
