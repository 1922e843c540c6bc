"""What benchmarks share: whether they are short, where records go, and how much memory a process held.

$GEMSMITH_BENCH_SHORT is a folder for records of short ones.
"""

import os
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "scripts"))  # which has tiny_checkpoints

SHORT = bool(os.environ.get("GEMSMITH_BENCH_SHORT"))
RECORDS = Path(os.environ.get("GEMSMITH_BENCH_SHORT") or Path(__file__).parent / "records")


def peak_memory_bytes() -> int:
    """Of this process alone: what getrusage says begins with what the process that started it held."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found
    return int(found[1]) * 1024
