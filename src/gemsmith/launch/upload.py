"""What every target's script does: uploads before it creates anything, and the command that the machine runs."""

from pathlib import Path

from gemsmith.launch.provider import Command, Request, upload_wheel
from gemsmith.launch.shards import PACKED, ImageShards


def upload_steps(request: Request) -> list[tuple[str, Command]]:
    """Reason and command of each copy to the bucket; the recipe last, since the machine begins with it."""
    launched = f"{request.root}/launched"
    copies = [
        (f"What the recipe reads of this machine: {local}", _copy(local, remote))
        for local, remote in request.inputs.items()
    ]
    images = [step for each in request.images for step in _image_steps(each, launched)]
    return [
        *copies,
        *images,
        *([upload_wheel(request.python, request.root)] if request.python else []),
        ("The recipe, as the machine reads it.", _copy("recipe.yaml", f"{launched}/recipe.yaml")),
    ]


def _copy(local: str, remote: str) -> Command:
    # Of a folder cp makes a folder in what is there, so the parent is named; of a file it takes the name.
    return ("gcloud", "storage", "cp", "--recursive", local, remote.rpartition("/")[0] + "/")


def _image_steps(images: ImageShards, launched: str) -> list[tuple[str, Command]]:
    packed = f"{PACKED}/{images.place}"
    # Of what an upload that was cut short left there, only the missing files are sent again.
    exactly = ("--recursive", "--checksums-only", "--delete-unmatched-destination-objects")
    return [
        (
            f"{_describe(images)}, as a few files; each must still be what the list says.",
            ("gemsmith", "launch", "pack", list_name(images), str(images.folder), packed),
        ),
        (
            "Sends those that do not exist yet; then they are no longer needed here.",
            ("gcloud", "storage", "rsync", *exactly, packed, f"{launched}/{packed}"),
        ),
        ("", ("rm", "-r", packed)),
    ]


def list_name(images: ImageShards) -> str:
    """The rendered file that lists them."""
    return f"{images.place}.sha256"


def rendered_lists(request: Request) -> dict[str, str]:
    """File name -> text of the lists of images, which every target's files have among them."""
    return {list_name(images): images.list_text for images in request.images}


def upload_lines(request: Request) -> list[str]:
    """What of this machine goes to the bucket, a line each."""
    files = [f"{local} ({say_bytes(_bytes_below(Path(local)))})" for local in request.inputs]
    return [f"uploads {what}" for what in (*files, *map(_describe, request.images))]


def _describe(images: ImageShards) -> str:
    count = len(images.sums)
    return (
        f"{count:,} image{'s' * (count > 1)} ({say_bytes(images.total_bytes)}) that {images.key} names, of "
        f"{images.folder}"
    )


def _bytes_below(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def say_bytes(count: int) -> str:
    """A size for reading.

    >>> say_bytes(999), say_bytes(735_000_000)
    ('999 bytes', '735 MB')
    """
    if count < 1000:
        return f"{count} byte{'s' * (count != 1)}"
    power = min((len(str(count)) - 1) // 3, 4)
    return f"{count / 1000**power:.3g} {('', 'KB', 'MB', 'GB', 'TB')[power]}"


def worker_command(request: Request, *, folder: str) -> Command:
    """What the machine runs: the stages, with the run directory kept in the bucket."""
    return (
        *("gemsmith", "launch", "here", request.root, "--folder", f"{folder}/{request.name}"),
        *("--stages", ",".join(request.stages)),
    )


def timed_command(request: Request, *, folder: str) -> Command:
    """The same with an end: TERM after the bill's time, which the command's start begins, and 2 minutes later KILL."""
    seconds = str(request.bill.timeout_s.value)
    return ("timeout", "--signal=TERM", "--kill-after=120", seconds, *worker_command(request, folder=folder))


def cost_lines(request: Request) -> list[str]:
    """What the launch is, and what it can cost, for the head of a file."""
    bill, machines = request.bill, [each.machine.name for each in (request, *request.others)]
    hours = float(bill.timeout_s.value) / 3600
    planned = (
        f"Estimated: {bill.hours[0]:.3g} to {bill.hours[1]:.3g} h of training, "
        f"{bill.usd[0]:,.2f} to {bill.usd[1]:,.2f} USD."
        if bill.hours and bill.usd
        else "How long training takes is not known before the rows are read."
    )
    kind = " spot" if request.spot else ""
    return [
        f"{request.name}: {', '.join(request.stages)} of {request.recipe.model} on {' or '.join(machines)} in "
        f"{request.zone or request.region}; {'up to ' * (len(machines) > 1)}{bill.usd_per_hour:.2f} USD/h{kind} "
        f"({bill.price}).",
        planned,
        f"At most {bill.max_usd:,.2f} USD for the machine: {hours:.3g} h x {bill.attempts} "
        f"attempt{'s' * (bill.attempts > 1)}; {bill.uncounted}bucket, image and network come on top.",
    ]
