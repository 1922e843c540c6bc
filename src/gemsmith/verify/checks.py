"""Whether merged/ has what training gained: its loss beside that of what was trained, on the same rows.

Bytes and logits prove that merged/ is the weights it was made from, plus the adapter. These need not be the weights
that were trained on.

What lies beside the weights of a merged folder: tokenizer, chat template, processor, configs, byte for byte.
"""

import filecmp

from gemsmith.checkpoints import Checkpoint
from gemsmith.export.merge import files_to_write
from gemsmith.runs.records import Check, Losses

# Shares of what training gained. To lose more than the first is told, than the second by export.merge_into a failure.
_TOLD, _ALLOWED = 0.1, 0.5
# A difference below this is noise of float32 and rounding, however little was gained.
_SMALLEST_DIFFERENCE = 0.01
_REMEDY = "set export.merge_into to trained, and export again"


def check_losses(losses: Losses, *, dtype: str, original: bool) -> tuple[Check, tuple[str, ...]]:
    """The check, and the notice where much of the gain is lost.

    `dtype`: train.dtype; `original`: whether merged/ was made from other weights than these.
    """
    lost = _lost(losses) if losses.exported - losses.trained > _SMALLEST_DIFFERENCE else 0.0
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


def _lost(losses: Losses) -> float:
    """The share of what training gained that merged/ has not; 0 where it gained nothing."""
    gain = losses.base - losses.trained
    return (losses.exported - losses.trained) / gain if gain > 0 else 0.0


def compare_beside(base: Checkpoint, merged: Checkpoint) -> list[str]:
    """Files that are missing, too many, or not the base's, by name; tensors are compared elsewhere."""
    shards = {place.file.name for checkpoint in (base, merged) for place in checkpoint.places.values()}
    expected = {file.name: file for file in files_to_write(base)}
    there = {str(path.relative_to(merged.folder)) for path in merged.folder.rglob("*") if not path.is_dir()}
    problems = [f"{name} is missing" for name in sorted(expected.keys() - there - shards)]
    problems += [f"{name} is not in the base" for name in sorted(there - expected.keys() - shards)]
    return problems + [
        f"{name} is not the base's"
        for name in sorted((expected.keys() & there) - shards)
        if not filecmp.cmp(expected[name], merged.folder / name, shallow=False)
    ]
