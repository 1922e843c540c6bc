"""What every target's script does: uploads before it creates anything, and the command that the machine runs."""

from gemsmith.launch.target import Command, Request


def upload_steps(request: Request) -> list[tuple[str, Command]]:
    """Reason and command of each copy to the bucket; the recipe last, since the machine begins with it."""
    launched = f"{request.root}/launched"
    copies = [
        (f"What the recipe reads of this machine: {local}", _copy(local, remote))
        for local, remote in request.inputs.items()
    ]
    return [*copies, ("The recipe, as the machine reads it.", _copy("recipe.yaml", f"{launched}/recipe.yaml"))]


def _copy(local: str, remote: str) -> Command:
    # Of a folder cp makes a folder in what is there, so the parent is named; of a file it takes the name.
    return ("gcloud", "storage", "cp", "--recursive", local, remote.rpartition("/")[0] + "/")


def here_command(request: Request, *, folder: str) -> Command:
    """What the machine runs: the stages, with the run directory kept in the bucket."""
    return (
        *("gemsmith", "launch", "here", request.root, "--folder", f"{folder}/{request.name}"),
        *("--stages", ",".join(request.stages)),
    )


def cost_lines(request: Request) -> list[str]:
    """What the launch is, and what it can cost, for the head of a file."""
    bill, machine = request.bill, request.machine
    hours = float(bill.timeout_s.value) / 3600
    planned = (
        f"Modelled: {bill.hours[0]:.3g} to {bill.hours[1]:.3g} h of training, "
        f"{bill.usd[0]:,.2f} to {bill.usd[1]:,.2f} USD."
        if bill.hours and bill.usd
        else "How long training takes is not known before the rows are read."
    )
    kind = " spot" if request.spot else ""
    return [
        f"{request.name}: {', '.join(request.stages)} of {request.recipe.model} on {machine.name} in "
        f"{request.zone or request.region}; {bill.usd_per_hour:.2f} USD/h{kind} ({bill.price}).",
        planned,
        f"At most {bill.greatest_usd:,.2f} USD for the machine: {hours:.3g} h x {bill.attempts} "
        f"attempt{'s' * (bill.attempts > 1)}; {bill.uncounted}bucket, image and network come on top.",
    ]
