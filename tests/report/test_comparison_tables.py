import csv
import io

import pytest

from gemsmith.analysis.compare import compare_sides
from gemsmith.analysis.published import read_published, reanalyze
from gemsmith.analysis.summary import read_sides
from gemsmith.report.comparison_page import groups
from gemsmith.report.tables import csv_of, markdown_of, print_comparison


@pytest.fixture
def comparison(make_run):
    return compare_sides(read_sides([make_run("a").path, make_run("b|x", steps=40).path]))


def test_csv_has_each_difference_and_each_ratio_as_recorded(comparison):
    rows = list(csv.DictReader(io.StringIO(csv_of(comparison))))
    pair = comparison.pairs[0]
    assert [row["row"] for row in rows].count("difference") == len(comparison.differences)
    ratios = [row for row in rows if row["row"] != "difference"]
    assert len(ratios) == len(pair.ratios)
    for row, ratio in zip(ratios, pair.ratios, strict=True):
        assert (float(row["first_value"]), float(row["other_value"])) == (ratio.first, ratio.other)
        assert row["confounded_by"].split() == list(ratio.confounded_by)
        assert row["headline"] == str(ratio.is_headline)
        if ratio.interval:
            assert (float(row["low"]), float(row["high"])) == ratio.interval


def test_markdown_is_whole_tables_with_confounds_beside_each_ratio(comparison):
    text = markdown_of(comparison)
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert "b\\|x" in text and "| b|x |" not in text
    cells = {line.replace("\\|", "").count("|") for line in tables}
    assert cells == {len(comparison.sides) + 3, 6}
    assert text.count("Confounded by `") == sum(bool(group.confounded_by) for group in groups(comparison.pairs[0]))
    assert text.index("| condition |") < text.index("## b") and "data:rows_sha256" not in text.split("## b")[0]
    assert all(line in text for line in comparison.warnings)


def test_the_terminal_shows_what_differs_before_any_ratio(comparison, capsys):
    print_comparison(comparison)
    out = capsys.readouterr().out
    assert out.index("What differs") < out.index("training speed: b|x against a")
    assert "confounded by" in out


def test_the_paper_goes_to_terminal_and_markdown(capsys):
    redrawn = reanalyze(read_published())
    print_comparison(redrawn.comparison, redrawn)
    out = " ".join(capsys.readouterr().out.split())
    assert "does not hold" in out and "GPU from then on" in out
    text = markdown_of(redrawn.comparison, redrawn)
    assert text.count("| does not hold |") == 4 and text.count("| holds |") == 17
    assert (
        "| v3 | 4,096 in, 512 out, 4 requests/s, ms TTFT: 23.6 × |" in text
        and "| final training loss | 0.072 | 2.258 |" in text
    )
