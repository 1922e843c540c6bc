"""The verb `prepare`, as it is typed."""

import json


def test_codev_prints_what_it_did_and_as_json_its_record(gemsmith, tmp_path):
    source, out = tmp_path / "codev_r1_sft.jsonl", tmp_path / "rows.jsonl"
    rows = [{"prompt": "Give 1.", "response": f"<think>a</think>{code}"} for code in ("module a; endmodule", "none")]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = gemsmith("prepare", "codev", source, "--out", out)
    assert code == 0 and "1 of 2 rows written" in err and "dropped 1 (1 no Verilog)" in " ".join(err.split())
    code, printed, _ = gemsmith("prepare", "codev", source, "--out", out, "--json")
    assert code == 0 and json.loads(printed)["dropped"] == {"no Verilog": 1}


def test_contaminated_rows_cannot_be_dropped_without_what_to_compare_with(gemsmith, tmp_path):
    code, _, err = gemsmith("prepare", "codev", tmp_path / "a.jsonl", "--out", tmp_path / "b", "--drop-contaminated")
    assert code == 2 and "--drop-contaminated: goes with --verilog-eval" in err


def test_a_folder_without_problems_is_one_line(gemsmith, tmp_path):
    code, _, err = gemsmith("prepare", "verilog-eval", tmp_path, "--out", tmp_path / "b.jsonl")
    assert code == 2 and "holds no problem" in err and not (tmp_path / "b.jsonl").exists()


def test_data_sets_of_images_that_are_not_there_are_one_line(gemsmith, tmp_path):
    code, _, err = gemsmith("prepare", "oxford-pets", tmp_path, "--split", "test", "--out", tmp_path / "rows.jsonl")
    assert code == 2 and "trainval.txt: does not exist" in err and err.count("\n") == 1
    code, _, err = gemsmith("prepare", "fashion-mnist", tmp_path, "--out", tmp_path / "new")
    assert code == 2 and "idx3-ubyte.gz: does not exist" in err and not (tmp_path / "new").exists()
