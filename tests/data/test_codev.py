"""CodeV-R1's rows, clean and not, and what is written of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from gemsmith.data.dataset import read_dataset
from gemsmith.data.prepare.codev import make_row, prepare_codev, prepare_verilog_eval
from gemsmith.errors import DataError
from gemsmith.tasks.messages import text_of

CODE = "module a(output y);\n  assign y = 1;\nendmodule"
FENCED = f"```verilog\n{CODE}\n```"
SPEC = (
    "I would like you to implement a module named TopModule with the following interface. It counts the rising edges "
    "of clk in a four bit register q and starts again after nine."
)
REFERENCE = (
    "module RefModule (input clk, output reg [3:0] q);\n"
    "  always @(posedge clk) q <= q == 9 ? 0 : q + 1; // nine\nendmodule\n"
)


def row(response: Any, prompt: Any = "Give 1.") -> dict[str, Any]:
    return {"system": "Think first.", "prompt": prompt, "response": response}


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., Path]:
    def write(*rows: dict[str, Any]) -> Path:
        file = tmp_path / "codev_r1_sft.jsonl"
        file.write_text("".join(json.dumps(each) + "\n" for each in rows))
        return file

    return write


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    folder = tmp_path / "dataset_spec-to-rtl"
    folder.mkdir()
    for end, text in (("prompt.txt", f"\n{SPEC}\n"), ("ref.sv", REFERENCE), ("test.sv", "module tb; endmodule")):
        (folder / f"Prob001_count_{end}").write_text(text)
    return folder


def written(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    "response",
    [
        f"<think>\nmodule b; endmodule? ```verilog\nmodule c;endmodule\n```\n</think>\n<answer>\n{FENCED}\n</answer>",
        f"I think so.</think>\n{FENCED}",
        f"<think></think><answer>First:\n```\nmodule old; endmodule\n```\nBetter:\n{FENCED}\n",
        f"<answer>\n{CODE}\n</answer>",
        f"Here: {CODE} That is it.",
        f"{FENCED}\nTry it:\n```bash\niverilog a.v\n```",
    ],
)
def test_reasoning_is_stripped_and_the_last_block_with_a_module_kept(response: str) -> None:
    assert make_row(row(response)) == {"prompt": "Give 1.", "response": CODE}


@pytest.mark.parametrize(
    ("made_of", "reason"),
    [
        (row(FENCED, prompt=" "), "no prompt"),
        (row(FENCED, prompt=[{"role": "user", "content": "Give 1."}]), "no prompt"),
        (row(None), "no response"),
        (row("<think>So, module"), "unfinished reasoning"),
        (row("<think>a</think><answer>I cannot.</answer>"), "no Verilog"),
        (row("<think>a</think>```verilog\nmodule a(output y);\nassign"), "no whole module"),
        (row(f"{FENCED}\ud800"), "not Unicode text"),
    ],
)
def test_a_row_without_what_to_train_on_is_dropped_with_its_reason(made_of: dict[str, Any], reason: str) -> None:
    assert make_row(made_of) == reason


def test_what_was_dropped_is_counted_and_the_rest_can_be_trained_on(
    source: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "rows.jsonl"
    record = prepare_codev(source(row(FENCED), row("no"), row("no"), row(FENCED), row(FENCED)), out, rows=4)
    assert (record.rows_read, record.rows_written, record.dropped) == (4, 2, {"no Verilog": 2})
    assert (record.ignored_columns, record.contaminated) == ({"system": 4}, None)
    assert [text_of(each.messages[-1]) for each in read_dataset(str(out)).documents] == [CODE, CODE]


def test_parquet_gives_the_same_rows(source: Callable[..., Path], tmp_path: Path) -> None:
    rows = [row(FENCED), row(None), row("no")]
    file, out, other = tmp_path / "rows.parquet", tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    one, two = prepare_codev(file, out), prepare_codev(source(*rows), other)
    assert out.read_bytes() == other.read_bytes()
    assert one.dropped == two.dropped == {"no Verilog": 1, "no response": 1}


def test_rows_shared_with_the_benchmark_are_reported_and_dropped_where_asked(
    source: Callable[..., Path], problems: Path, tmp_path: Path
) -> None:
    copied = REFERENCE.replace("RefModule", "counter")
    file = source(row(FENCED), row(FENCED, prompt=f"Please: {SPEC}"), row(copied), row(copied, prompt=SPEC))
    record = prepare_codev(file, tmp_path / "all.jsonl", verilog_eval=problems)
    assert (record.rows_written, record.contaminated, record.problems) == (4, 3, 1)
    assert record.contaminated_by == {"near specification": 1, "same module": 2, "same specification": 1}
    assert [(each.row, each.kind, each.exact) for each in record.shared] == [
        ("codev_r1_sft.jsonl line 2", "specification", False),
        ("codev_r1_sft.jsonl line 3", "module", True),
        ("codev_r1_sft.jsonl line 4", "specification", True),
        ("codev_r1_sft.jsonl line 4", "module", True),
    ]
    record = prepare_codev(file, tmp_path / "clean.jsonl", verilog_eval=problems, drop_contaminated=True)
    assert (record.rows_written, record.dropped) == (1, {"shared with verilog-eval": 3})


def test_the_benchmarks_problems_become_held_out_rows(problems: Path, tmp_path: Path) -> None:
    record = prepare_verilog_eval(problems, tmp_path / "rows.jsonl")
    assert record.rows_written == 1
    [made] = written(tmp_path / "rows.jsonl")
    assert made == {"prompt": SPEC, "response": REFERENCE.replace("RefModule", "TopModule").strip()}


def test_rows_of_another_file_are_refused_by_name_and_nothing_is_written(
    source: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "rows.jsonl"
    out.write_text("before\n")
    file = source(row(FENCED), {"prompt": [], "reward_model": {}})
    with pytest.raises(
        DataError, match=r"^codev_r1_sft\.jsonl line 2: has prompt, reward_model; .* codev_r1_sft\.jsonl"
    ):
        prepare_codev(file, out)
    with pytest.raises(DataError, match=r"none of its 1 rows can be kept \(1 no Verilog\)"):
        prepare_codev(source(row("no")), out)
    with pytest.raises(DataError, match=r"^--out .*: is what the rows are read from; name another file"):
        prepare_codev(file, file)
    with pytest.raises(DataError, match=r"nowhere\.jsonl: does not exist; give codev_r1_sft\.jsonl"):
        prepare_codev(tmp_path / "nowhere.jsonl", out)
    assert out.read_text() == "before\n" and not list(tmp_path.glob(".*"))


def test_the_folder_is_made_and_one_in_a_bucket_is_told_how_the_data_set_gets_there(
    source: Callable[..., Path], tmp_path: Path
) -> None:
    rows, out = source(row(FENCED)), tmp_path / "new" / "codev.jsonl"
    assert prepare_codev(rows, out).rows_written == 1 and len(written(out)) == 1
    with pytest.raises(DataError, match=r"^--out gs://b/rows/x\.jsonl: must be a file here.*_TO=gs://b/rows$"):
        prepare_codev(rows, Path("gs://b/rows/x.jsonl"))


def test_so_is_that_of_the_benchmarks_problems(problems: Path, tmp_path: Path) -> None:
    assert prepare_verilog_eval(problems, tmp_path / "new" / "out.jsonl").rows_written == 1
