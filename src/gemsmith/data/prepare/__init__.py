"""Public data sets, made into rows that a recipe reads."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gemsmith.runs.records import PreparedRecord
from gemsmith.system.files import atomic_write, sha256_file


def write_prepared(rows: Sequence[Mapping[str, Any]], out: Path, *, source: str, source_sha256: str) -> PreparedRecord:
    """Writes all rows that were read of the source as JSONL, whole or not at all."""
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
