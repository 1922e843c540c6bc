"""CodeV-R1's rows as prompts and modules to train on, and verilog-eval's problems in the same form.

CodeV-R1 (arXiv 2505.24183) answers with `<think>…</think><answer>…</answer>`, a fenced block of Verilog in the answer.
Kept is the code of the last block that has a module. Rows are read, changed and written one at a time.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from gemsmith.data.dataset import source_sha256
from gemsmith.data.dedup import NEAR, Index, N, build_index, find_match
from gemsmith.data.hub import PREFIX, name_split
from gemsmith.data.prepare import PreparedRecord, SharedRow, make_folder, write_prepared
from gemsmith.data.reader import stored_rows
from gemsmith.errors import DataError
from gemsmith.system.console import open_console
from gemsmith.system.files import atomic_write, sha256_file
from gemsmith.tasks.messages import fenced_blocks
from gemsmith.tasks.verilog.simulate import problems_sha256, read_problems

HUB_ID = "zhuyaoyu/CodeV-R1-dataset"
FILE = "codev_r1_sft.jsonl"
LISTED = 1000
"""How many shared rows a record lists; all are counted."""
_READ = ("prompt", "response")
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
_MODULE = re.compile(r"\bmodule\b.*\bendmodule\b", re.DOTALL)
_REFERENCE, _TOP = re.compile(r"\bRefModule\b"), "TopModule"


@dataclass(kw_only=True)
class _Tally:
    """What has become of the rows so far."""

    indices: tuple[Index, ...]
    drop_contaminated: bool
    contaminated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    shared: list[SharedRow] = field(default_factory=list)

    def take(self, origin: str, row: Mapping[str, Any]) -> dict[str, str] | None:
        """The row that is made of it; None where it is dropped."""
        self.ignored.update(name for name, value in row.items() if name not in _READ and value is not None)
        made = make_row(row)
        if isinstance(made, str):
            self.dropped[made] += 1
            return None
        texts = {"specification": made["prompt"], "module": made["response"]}
        matches = (find_match(index, origin, texts[index.kind]) for index in self.indices)
        found = [match for match in matches if match]
        self.contaminated += bool(found)
        self.kinds.update(f"{'same' if each.exact else 'near'} {each.kind}" for each in found)
        self.shared += found[: LISTED - len(self.shared)]
        if found and self.drop_contaminated:
            self.dropped["shared with verilog-eval"] += 1
            return None
        return made


def prepare_codev(
    source: Path | None,
    out: Path,
    *,
    revision: str | None = None,
    rows: int | None = None,
    verilog_eval: Path | None = None,
    drop_contaminated: bool = False,
) -> PreparedRecord:
    """Writes the first `rows` rows of CodeV-R1 as {"prompt", "response"}, and returns what was dropped and shared.

    Without a source they are the hub's. Raises DataError for what cannot be read; `out` is written whole or not at all.
    """
    address = str(source or name_split(HUB_ID, FILE, revision))
    if not address.startswith(PREFIX) and not Path(address).exists():
        raise DataError(f"{source}: does not exist; give {FILE} of the Hugging Face dataset {HUB_ID}, or no file")
    if out.exists() and out.resolve() == Path(address).resolve():
        raise DataError(f"--out {out}: is what the rows are read from; name another file")
    make_folder(out, HUB_ID)
    problems = read_problems(verilog_eval) if verilog_eval is not None else ()
    indices = (
        build_index("specification", {problem.name: problem.prompt for problem in problems}),
        build_index("module", {problem.name: problem.reference for problem in problems}),
    )
    tally, written = _Tally(indices=indices if problems else (), drop_contaminated=drop_contaminated), 0
    with atomic_write(out) as file:
        for origin, row in islice(_stored(address), rows):
            if made := tally.take(origin, row):
                written += 1
                file.write(json.dumps(made, ensure_ascii=False) + "\n")
        if not written:
            why = _counted(tally.dropped) or "it has none"
            raise DataError(f"{address}: none of its {tally.dropped.total()} rows can be kept ({why})")
    return PreparedRecord(
        source=address,
        source_sha256=source_sha256(address),
        out=str(out),
        out_sha256=sha256_file(out),
        rows_read=written + tally.dropped.total(),
        rows_written=written,
        dropped=dict(sorted(tally.dropped.items())),
        ignored_columns=dict(sorted(tally.ignored.items())),
        problems=len(problems),
        problems_sha256=problems_sha256(problems) if problems else None,
        ngram_tokens=N,
        near=dict(NEAR),
        contaminated=tally.contaminated if problems else None,
        contaminated_by=dict(sorted(tally.kinds.items())),
        shared=tuple(tally.shared),
    )


def prepare_verilog_eval(folder: Path, out: Path) -> PreparedRecord:
    """Writes verilog-eval's specifications with their reference modules, as TopModule, in the same form."""
    problems = read_problems(folder)
    rows = [{"prompt": one.prompt.strip(), "response": _REFERENCE.sub(_TOP, one.reference).strip()} for one in problems]
    return write_prepared(rows, out, source=str(folder), source_sha256=problems_sha256(problems))


def make_row(row: Mapping[str, Any]) -> dict[str, str] | str:
    r"""The row to train on, or in a few words why there is none.

    >>> make_row({"prompt": "An AND.", "response": "<think>…</think><answer>\n```verilog\nmodule a; endmodule\n```\n"})
    {'prompt': 'An AND.', 'response': 'module a; endmodule'}
    """
    prompt, response = row.get("prompt"), row.get("response")
    if not isinstance(prompt, str) or not prompt.strip():
        return "no prompt"
    if not isinstance(response, str) or not response.strip():
        return "no response"
    try:
        (prompt + response).encode()
    except UnicodeEncodeError:
        return "not Unicode text"
    # Some begin inside the thought, whose opening tag was part of what they were asked with.
    text = _THOUGHT.sub("", response).rpartition("</think>")[2]
    if "<think>" in text:
        return "unfinished reasoning"
    text = answers[-1] if (answers := _ANSWER.findall(text)) else text
    blocks = fenced_blocks(text)
    if not blocks and (bare := _MODULE.search(text)):
        blocks = [bare[0]]
    whole = [block for block in blocks if _MODULE.search(block)]
    if not whole:
        return "no whole module" if "module" in text else "no Verilog"
    return {"prompt": prompt.strip(), "response": whole[-1].strip()}


def print_prepared(record: PreparedRecord) -> None:
    """Prints what was written, dropped and shared."""
    console = open_console()
    dropped = f"; dropped {sum(record.dropped.values()):,} ({_counted(record.dropped)})" if record.dropped else ""
    of = f" of {record.source}" if record.source.startswith(PREFIX) else ""
    console.print(f"{record.rows_written:,} of {record.rows_read:,} rows{of} written to {record.out}{dropped}")
    if record.ignored_columns:
        console.print(f"left out the columns {', '.join(record.ignored_columns)}")
    if record.contaminated is None:
        return
    if not record.contaminated:
        console.print(f"no row shares a specification or a module with the {record.problems} problems")
        return
    by = _counted(record.contaminated_by)
    console.print(
        f"{record.contaminated:,} rows share a specification or a module with the {record.problems} problems ({by}):",
        style="yellow",
    )
    for each in record.shared[:10]:
        how = "same" if each.exact else f"{each.share:.0%} of the n-grams of the"
        console.print(f"  {each.row}: {how} {each.kind} as {each.problem}")
    if "shared with verilog-eval" not in record.dropped:
        console.print("they were written all the same; --drop-contaminated leaves them out")


def _stored(source: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for origin, row in stored_rows(source, lambda name: name in _READ):
        if not isinstance(row, Mapping) or not row.keys() >= set(_READ):
            columns = ", ".join(map(str, row)) if isinstance(row, Mapping) else "no columns"
            remedy = f"CodeV-R1's rows have prompt and response: give {FILE} of {HUB_ID}"
            raise DataError(f"{origin}: has {columns}; {remedy}")
        yield origin, row


def _counted(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items()))
