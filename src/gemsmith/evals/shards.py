"""The answers of `gemsmith predict --shard`, a part of the rows each, put together in the rows' order."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from gemsmith.errors import InputError, some
from gemsmith.evals.generate import describe_counts
from gemsmith.runs.eval_records import PredictRecord, Shard
from gemsmith.runs.provenance import host_info
from gemsmith.runs.records import read_record_file
from gemsmith.system.console import open_console, print_warnings
from gemsmith.system.files import atomic_write, write_text
from gemsmith.system.version import __version__

_ALIKE = ("rows_sha256", "weights_sha256", "sampling")


def record_file(out: Path) -> Path:
    """Where the record of a file of answers is."""
    return out.with_name(f"{out.name}.record.json")


def check_out(out: Path, inputs: Sequence[Path]) -> None:
    """Raises InputError where no file can be written there, or it is one of the inputs."""
    if out.is_dir() or not out.parent.is_dir() or out.resolve() in {file.resolve() for file in inputs}:
        raise InputError(f"--out {out}: must be a file of its own in a folder that is there")


def read_shard(text: str) -> Shard:
    """The shard that I/N names. Raises InputError."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise InputError(f"--shard {text}: must be I/N, with I from 1 to N, such as 1/4")
    return Shard(number=int(number), of=int(of))


def join_shards(files: Sequence[Path], out: Path, *, force: bool = False) -> PredictRecord:
    """Writes the answers of all shards to `out`, in whatever order the files are given, and returns what they are.

    Raises InputError where one is missing, there twice or not whole, or is of other rows, another model or sampling,
    RunError where one has no record beside it.
    """
    check_out(out, files)
    if out.exists() and not force:
        raise InputError(f"--out {out}: is there already; --force replaces it")
    found = sorted(map(_read, files), key=lambda each: each[1].number)
    _check(found)
    records = [record for record, _, _ in found]
    failed = sum((Counter(record.failed) for record in records), Counter[str]())
    tokens = [record.asked_tokens for record in records]
    joined = records[0].model_copy(
        update={
            "started": min(record.started for record in records),
            "gemsmith": __version__,
            "machine": host_info(),
            "shard": None,
            "rows": sum(record.rows for record in records),
            "failed": dict(failed),
            "cut": sum(record.cut for record in records),
            "asked": sum(record.asked for record in records),
            "asked_s": round(sum(record.asked_s for record in records), 3),
            "asked_tokens": None if None in tokens else sum(count or 0 for count in tokens),
            "retries": dict(sum((Counter(record.retries) for record in records), Counter[str]())),
            "warnings": tuple(
                f"shard {shard.number}/{shard.of}: {warning}"
                for record, shard, _ in found
                for warning in record.warnings
            ),
        }
    )
    with atomic_write(out) as stream:
        for record, _, file in found:
            stream.writelines(_lines(file, record.rows))
    write_text(record_file(out), joined.model_dump_json(indent=1) + "\n")
    print_warnings("predict", joined.warnings)
    reasons = f" ({describe_counts(failed)})" if failed else ""
    open_console().print(f"predict: {joined.rows - failed.total():,} of {joined.rows:,} rows answered{reasons}: {out}")
    return joined


def _read(file: Path) -> tuple[PredictRecord, Shard, Path]:
    again = "run gemsmith predict for that shard"
    record = read_record_file(record_file(file), PredictRecord, missing=again, damaged=again)
    if record.shard is None:
        raise InputError(f"--join {file}: is no shard: predict wrote it without --shard; leave it out")
    return record, record.shard, file


def _check(found: Sequence[tuple[PredictRecord, Shard, Path]]) -> None:
    """Raises InputError unless these, in the order of their numbers, are all shards of the same rows, once each."""
    first, shard, first_file = found[0]
    for record, other, file in found:
        if odd := [key for key in _ALIKE if getattr(record, key) != getattr(first, key)]:
            raise InputError(f"--join {file}: its {odd[0]} is not that of {first_file}; join shards of one command")
        if other.of != shard.of:
            raise InputError(f"--join {file}: is one of {other.of} shards, {first_file} one of {shard.of}")
    numbers = Counter(other.number for _, other, _ in found)
    if missing := [str(number) for number in range(1, shard.of + 1) if number not in numbers]:
        raise InputError(f"--join: of {shard.of} shards there is no {some(missing, 3)}; give the file of each")
    if twice := next((number for number, count in numbers.items() if count > 1), None):
        raise InputError(f"--join: shard {twice}/{shard.of} was given twice; leave one out")


def _lines(file: Path, rows: int) -> Iterator[str]:
    """The file's lines. Raises InputError, at their end, where there are not as many as its record says."""
    count = 0
    with file.open(encoding="utf-8") as stream:
        for line in stream:
            count += 1
            yield line
    if count != rows:
        raise InputError(f"--join {file}: has {count} lines, its record says {rows}; run predict for that shard")
