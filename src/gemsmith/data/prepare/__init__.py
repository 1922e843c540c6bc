"""Public data sets, made into rows that a recipe reads, and the record of them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from gemsmith.errors import DataError
from gemsmith.runs.records import SCHEMA_VERSION, Part
from gemsmith.system.files import atomic_write, sha256_file


class SharedRow(Part):
    """A row that shares a specification or a module with a benchmark's problem."""

    row: str
    problem: str
    kind: str  # specification or module
    exact: bool  # the same normalized tokens
    share: float  # of the problem's n-grams that the row has; 1 where it is exact


class PreparedRecord(Part):
    """Rows made of a public dataset; no stage of a run."""

    schema_version: int = SCHEMA_VERSION
    source: str
    source_sha256: str
    out: str
    out_sha256: str
    rows_read: int
    rows_written: int
    dropped: dict[str, int] = Field(default_factory=dict)
    ignored_columns: dict[str, int] = Field(default_factory=dict)
    problems: int = 0  # of the benchmark that the rows were compared with; 0: with none
    problems_sha256: str | None = None
    ngram_tokens: int | None = None
    near: dict[str, float] = Field(default_factory=dict)
    """specification or module -> the share of a problem's n-grams from which on a row is near."""
    contaminated: int | None = None  # rows that share with a problem; None where they were compared with none
    contaminated_by: dict[str, int] = Field(default_factory=dict)
    """`same specification`, `near module` and so on -> rows."""
    shared: tuple[SharedRow, ...] = ()  # the first thousand; all are counted


def make_folder(out: Path, hub_id: str | None = None) -> None:
    """Makes the folder of the file. Raises DataError for one in a bucket, with what brings the hub's data set there."""
    if out.parts[:1] == ("gs:",):
        asked = "gcloud builds submit --no-source --config docker/hub_to_bucket.yaml --region REGION --project PROJECT"
        folder = f"gs://{'/'.join(out.parts[1:-1])}"
        bring = f"{asked} --substitutions _TYPE=dataset,_FROM={hub_id},_TO={folder}"
        remedy = f"; past this disk, the data set as it is goes into the bucket with: {bring}" if hub_id else ""
        raise DataError(f"--out {folder}/{out.name}: must be a file here{remedy}")
    out.parent.mkdir(parents=True, exist_ok=True)


def write_prepared(rows: Sequence[Mapping[str, Any]], out: Path, *, source: str, source_sha256: str) -> PreparedRecord:
    """Writes all rows that were read of the source as JSONL, whole or not at all."""
    make_folder(out)
    with atomic_write(out) as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return PreparedRecord(
        source=source,
        source_sha256=source_sha256,
        out=str(out),
        out_sha256=sha256_file(out),
        rows_read=len(rows),
        rows_written=len(rows),
    )
