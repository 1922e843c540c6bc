"""Whether a benchmark is to be short, and where its record goes: $GEMSMITH_BENCH_SHORT is a folder for short ones."""

import os
from pathlib import Path

SHORT = bool(os.environ.get("GEMSMITH_BENCH_SHORT"))
RECORDS = Path(os.environ.get("GEMSMITH_BENCH_SHORT") or Path(__file__).parent / "records")
