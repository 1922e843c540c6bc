import pytest

from gemsmith.errors import DataError
from gemsmith.tasks.verilog.simulate import problems_sha256, read_problems


def test_problems_are_read_by_name_from_the_folder_or_the_one_around_it(dataset):
    problems = read_problems(dataset)
    assert [problem.name for problem in problems] == ["Prob001_and", "Prob002_and"]
    assert problems[0].reference == (dataset / "Prob001_and_ref.sv").read_text()
    assert read_problems(dataset.parent) == problems


def test_the_digest_changes_with_any_name_or_file(dataset):
    before = problems_sha256(read_problems(dataset))
    assert problems_sha256(read_problems(dataset)) == before
    for end in ("_prompt.txt", "_ref.sv", "_test.sv"):
        file = dataset / f"Prob002_and{end}"
        text = file.read_text()
        file.write_text(text + " ")
        assert problems_sha256(read_problems(dataset)) != before, end
        file.write_text(text)
    for file in dataset.glob("Prob002*"):
        file.rename(file.with_name(file.name.replace("002", "003")))
    assert problems_sha256(read_problems(dataset)) != before


@pytest.mark.parametrize("end", ["_prompt.txt", "_ref.sv", "_test.sv"])
def test_a_problem_that_lacks_a_file_is_refused_by_the_files_name(dataset, end):
    (dataset / f"Prob002_and{end}").unlink()
    with pytest.raises(DataError, match=rf"lacks Prob002_and{end}; copy the dataset again"):
        read_problems(dataset)


def test_a_folder_that_is_none_or_holds_none_or_no_text_is_refused(dataset, tmp_path):
    with pytest.raises(DataError, match=r"dataset .*nothing: is not a folder"):
        read_problems(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no problem; each is three files"):
        read_problems(tmp_path / "empty")
    (dataset / "Prob001_and_ref.sv").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"Prob001_and_ref\.sv: is not UTF-8 text"):
        read_problems(dataset)
