"""Checks that need no model: what lies beside the weights, what rounding took, and what training's gain is worth.

Bytes and logits prove that merged/ is its base plus the adapter, which may be trained on other weights: hence losses.
"""

import filecmp
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from gemsmith.checkpoints.folder import Checkpoint
from gemsmith.checkpoints.safetensors import numpy_dtype
from gemsmith.errors import VerifyError
from gemsmith.export.merge import files_to_write
from gemsmith.runs.records import Check, Losses
from gemsmith.system.console import open_console

# Shares of what training gained. To lose more than the first is told, than the second by export.merge_into a failure.
_TOLD, _ALLOWED = 0.1, 0.5
# A difference below this is noise of float32 and rounding, however little was gained.
_SMALLEST_DIFFERENCE = 0.01
_REMEDY = "set export.merge_into to trained, and export again"
# Rounding that moves logits by more than this share of what the adapter does to them has made another model.
_LARGE_SHARE = 0.5
_NAMED = 5


def make_check(name: str, problems: Sequence[str], passed: str) -> Check:
    """Passed where there are no problems; `passed` is what is said then."""
    more = f" and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
    return Check(name=name, passed=not problems, detail="; ".join(problems[:_NAMED]) + more if problems else passed)


def report_checks(checks: Sequence[Check], place: Path) -> None:
    """Prints the checks of a run or a folder. Raises VerifyError naming those that failed."""
    console = open_console()
    words = {True: ("ok  ", "green"), False: ("fail", "red"), None: ("not done", "yellow")}
    for check in checks:
        console.print(Text.assemble(words[check.passed], f" {check.name}: {check.detail}"))
    if failed := [check for check in checks if check.passed is False]:
        raise VerifyError(f"{place}: " + "; ".join(f"{check.name}: {check.detail}" for check in failed))


def compare_other_files(base: Checkpoint, merged: Checkpoint) -> list[str]:
    """Files that are missing, too many, or not the base's, by name; tensors are compared elsewhere."""
    shards = {place.file.name for checkpoint in (base, merged) for place in checkpoint.places.values()}
    expected = {file.name: file for file in files_to_write(base) if file.name not in shards}
    files = {str(path.relative_to(merged.folder)) for path in merged.folder.rglob("*") if not path.is_dir()} - shards
    problems = [f"{name} is missing" for name in sorted(expected.keys() - files)]
    problems += [f"{name} is not in the base" for name in sorted(files - expected.keys())]
    return problems + [
        f"{name} is not the base's"
        for name in sorted(expected.keys() & files)
        if not filecmp.cmp(expected[name], merged.folder / name, shallow=False)
    ]


def rounding_notices(
    dtypes: Sequence[str], *, lost: float | None = None, effect: float | None = None, moved: float | None = None
) -> tuple[str, ...]:
    """What a reader must know where rounding to the base's dtypes took much of the adapter.

    `lost`: the share of its changes of weights, by norm; `effect`: the most that base + adapter differs from the base
    in logits; `moved`: the most that merged differs from base + adapter. None: not computed. Logits decide, weights
    only without them: a rounding can turn a token to another expert, which moves a few logits far.
    """
    share = "" if lost is None else f"{100 * lost:.0f} % of its changes of weights, by norm, are rounded away"
    if effect is not None and moved is not None:
        if moved <= _LARGE_SHARE * effect:
            return ()
        found = f"the adapter moves logits by {effect:.2g}, the rounding by {moved:.2g}{share and f'; {share}'}"
    elif lost is not None and lost > _LARGE_SHARE:
        found = f"{share}; logits were not compared"
    else:
        return ()
    kinds = " and ".join(sorted(numpy_dtype(dtype).name for dtype in dtypes))
    return (
        f"Rounding to {kinds} took much of the adapter out of the merged weights: {found}. Serve the base with "
        "adapter/ instead (vLLM: --enable-lora), or train a stronger adapter: more steps, a higher "
        "optimizer.learning_rate or lora.alpha.",
    )


def check_losses(losses: Losses, *, dtype: str, original: bool) -> tuple[Check, tuple[str, ...]]:
    """The check, and the notice where much is lost; `original`: merged/ is of other weights than those of `dtype`."""
    gain, loss = losses.base - losses.trained, losses.exported - losses.trained
    lost = loss / gain if gain > 0 and loss > _SMALLEST_DIFFERENCE else 0.0
    detail = (
        f"base {losses.base:.3f} as it was trained on ({dtype}), trained {losses.trained:.3f}, exported "
        f"{losses.exported:.3f}, over {losses.targets} targets that were trained on"
    )
    share = f"{100 * min(lost, 1):.0f} % of what training gained is lost in merged/"
    failed = original and lost > _ALLOWED
    check = Check(name="loss", passed=not failed, detail=f"{detail}; {share}: {_REMEDY}" if failed else detail)
    if lost <= _TOLD:
        return check, ()
    why = f"it was trained on {dtype} and merged into the original weights; {_REMEDY}" if original else "by rounding"
    return check, (f"{share} ({detail}): {why}.",)
