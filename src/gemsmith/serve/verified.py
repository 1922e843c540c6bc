"""Whether a run's weights, merged or base and adapter, are those that verify has passed."""

from dataclasses import dataclass

from gemsmith.checkpoint import open_checkpoint
from gemsmith.checkpoint.sums import changed_files
from gemsmith.errors import RunError
from gemsmith.files import sha256_file
from gemsmith.records import ExportRecord, VerifyRecord
from gemsmith.run import Run, read_record
from gemsmith.terminal import open_console

# Reading less than this takes no time worth a word.
_SAID_FROM_BYTES = 2 * 10**9
_LISTED = 3


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """Why weights do not count as verified, and the command that changes it."""

    reason: str
    remedy: str


def find_doubt(run: Run, *, adapter: bool = False) -> Doubt | None:
    """What speaks against serving the run's merged/, or its base with adapter/; None where nothing does.

    Its verify.json, or files that are no longer those of export.json. A check that could not be done is no failure.
    """
    exported: ExportRecord = read_record(run, ExportRecord)
    verify, export_again = (
        f"gemsmith verify {run.path}",
        f"gemsmith export {run.path} --force && gemsmith verify {run.path}",
    )
    if not run.record_file("verify").exists():
        return Doubt(reason="they were never verified", remedy=verify)
    try:
        record: VerifyRecord = read_record(run, VerifyRecord)
    except (RunError, OSError):
        return Doubt(reason="verify.json is unreadable", remedy=verify)
    if record.origin.made_from.get("export.json") != sha256_file(run.record_file("export")):
        return Doubt(reason="they were exported again after they were verified", remedy=verify)
    if not record.passed:
        failed = "; ".join(f"{check.name}: {check.detail}" for check in record.checks if check.passed is False)
        return Doubt(reason=f"verify failed: {failed or 'see verify.json'}", remedy=export_again)
    if problems := _changed_adapter(run, exported) if adapter else _changed_files(run, exported):
        more = f" and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        return Doubt(
            reason=f"they are not what was verified: {'; '.join(problems[:_LISTED])}{more}", remedy=export_again
        )
    return None


def _changed_adapter(run: Run, exported: ExportRecord) -> list[str]:
    """The adapter's files, and the base by its fingerprint, which is a sample of each tensor."""
    problems = changed_files(run.adapter, exported.adapter)
    base = open_checkpoint(run.recipe.checkpoint)
    if exported.base_sha256 and base.fingerprint() != exported.base_sha256:
        problems.append(f"{base.folder} is not the base that the adapter was exported for")
    return problems


def _changed_files(run: Run, exported: ExportRecord) -> list[str]:
    """Reads all of merged/, which also puts it into the page cache, from which vLLM loads it."""
    total_bytes = sum(file.bytes for file in exported.merged)
    if total_bytes >= _SAID_FROM_BYTES:
        console = open_console()
        console.print(
            f"comparing {len(exported.merged)} files of {run.merged} with export.json, {total_bytes / 1e9:.0f} GB"
        )
    return changed_files(run.merged, exported.merged)
