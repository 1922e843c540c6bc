"""Where a record comes from: when it began, on which machine, with which versions."""

import os
import platform
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gemsmith.runs.records import Computer

# Linux's list of cores, and enough of it for the first one.
_CPUINFO, _FIRST_CORE_BYTES = Path("/proc/cpuinfo"), 2**14


@dataclass(frozen=True, kw_only=True)
class Clock:
    """When a stage began, for its record."""

    started: str
    _begin_s: float

    def elapsed_s(self) -> float:
        return time.monotonic() - self._begin_s


def start_clock() -> Clock:
    return Clock(started=datetime.now(UTC).isoformat(timespec="seconds"), _begin_s=time.monotonic())


def host_info() -> Computer:
    try:
        with _CPUINFO.open(encoding="utf-8", errors="replace") as file:
            cpuinfo = file.read(_FIRST_CORE_BYTES)
    except OSError:
        cpuinfo = ""
    # Name and widest vectors of the first core that Linux lists: two machines of one cloud may differ in both.
    lines = (line.partition(":") for line in cpuinfo.split("\n\n", maxsplit=1)[0].splitlines())
    core = {key.strip(): value.strip() for key, _, value in lines}
    flags = core.get("flags", "").split()
    widest = next((name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), None)
    kind = ", ".join(filter(None, (platform.machine(), widest)))
    return Computer(
        system=f"{platform.system()} {platform.release()}",
        processor=f"{core['model name']} ({kind})" if "model name" in core else platform.machine(),
        cores=os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )
