"""One recipe over values of its keys."""

import csv
import io
from pathlib import Path

import pytest

from gemsmith.errors import InputError, RecipeError
from gemsmith.plan.stage import plan_only, read_axis, sweep
from gemsmith.report.plan_page import sweep_charts, write_sweep
from gemsmith.report.tables import sweep_csv, sweep_table
from gemsmith.runs.resolve import resolve_file
from gemsmith.system.format import price, span

PAPER = Path(__file__).parents[2] / "recipes" / "verilog_31b.yaml"


def test_each_choice_is_planned_as_it_would_be_alone():
    axes = [read_axis("model=all"), read_axis("data.max_length=4096..65536")]
    assert [len(values) for _, values in axes] == [5, 5]
    found = list(sweep(PAPER, axes, machine="v5p-8"))
    assert len(found) == 25
    (one,) = [each for each in found if each.values == ("gemma4-12b", "8192")]
    overrides = ["model=gemma4-12b", "checkpoint=google/gemma-4-12B-it", "data.max_length=8192"]
    alone = plan_only(resolve_file(PAPER, overrides)[0], "v5p-8")
    assert one.machine == alone.machines[0]
    low_s, high_s = one.machine.step_s
    assert one.tokens_per_s == (8 * 8192 / high_s, 8 * 8192 / low_s)
    assert one.usd_per_million == pytest.approx([16.80 / 3600 * 1e6 / rate for rate in reversed(one.tokens_per_s)])
    largest = found[-1]
    assert largest.values == ("gemma4-31b", "65536") and not largest.machine.fits and largest.usd_per_million is None


def test_a_tiny_model_has_no_checkpoint_on_the_hub():
    tiny = PAPER.with_name("demo.yaml")
    (found,) = sweep(tiny, [("model", ["tiny-31b"])], machine="cpu")
    assert found.machine.fits


def test_the_table_has_words_and_the_csv_numbers():
    keys, found = ["data.max_length"], list(sweep(PAPER, [("data.max_length", ["4096", "65536"])], machine="v5p-8"))
    table = sweep_table(keys, found)
    assert [row[:3] for row in table.rows] == [("4096", "v5p-8", "yes"), ("65536", "v5p-8", "no")]
    assert table.rows[0][-1].startswith("$") and table.rows[1][-1] == "–"
    first, second = csv.DictReader(io.StringIO(sweep_csv(keys, found)))
    assert float(first["usd_per_million_low"]) < float(first["usd_per_million_high"]) and second["fits"] == "false"
    assert float(first["step_s_low"]) == pytest.approx(found[0].machine.step_s[0], rel=1e-4)


def test_a_chart_for_each_machine_has_a_line_for_each_model_where_it_fits(tmp_path):
    keys, axes = ["data.max_length", "model"], [["4096", "65536"], ["gemma4-e2b", "gemma4-31b"]]
    found = list(sweep(PAPER, list(zip(keys, axes, strict=True)), machine="v5p-8,2xh100"))
    charts = sweep_charts(keys, found)
    assert [chart.title for chart in charts] == ["v5p-8", "2xh100"]
    assert [line for *_, line in charts[0].legend] == ["gemma4-e2b", "gemma4-31b"]
    first, *_, cost = (each for each in found if each.machine.name == "v5p-8" and each.usd_per_million)
    words = f"{first.values[1]}, 4096: {span(*map(price, first.usd_per_million))}"
    assert words in charts[0].alt and words in charts[0].points
    assert "gemma4-e2b, 65536" in charts[0].alt and "gemma4-31b, 65536" not in charts[0].alt, "it does not fit"
    write_sweep(keys, found, tmp_path / "sweep.html", name="mine")
    page = (tmp_path / "sweep.html").read_text()
    assert page.count("<figure") == 2 and page.count("<tr>") == 1 + len(found)
    assert f">{span(*map(price, cost.usd_per_million))}<" in page
    with pytest.raises(InputError, match=r"^--html .*gone/sweep.html: cannot be written"):
        write_sweep(keys, found, tmp_path / "mine" / "gone" / "sweep.html", name="mine")


def test_machines_share_a_chart_where_one_key_is_swept():
    (chart,) = sweep_charts(["lora.rank"], list(sweep(PAPER, [("lora.rank", ["8", "64"])], machine="v5p-8,v6e-8")))
    assert [line for *_, line in chart.legend] == ["v5p-8", "v6e-8"]


@pytest.mark.parametrize(
    "text", ["data.max_length", "data.max_length=", "=1", "data.max_length=8..4", "lora.targets=all..3", "a=0..8"]
)
def test_what_is_no_list_of_values_is_one_line(text):
    with pytest.raises(InputError, match=r"^--sweep .*: must be KEY=A,B"):
        read_axis(text)


def test_too_many_and_unknown_values_are_refused():
    with pytest.raises(InputError, match="at most 200"):
        list(sweep(PAPER, [("lora.rank", list(map(str, range(1, 202))))]))
    with pytest.raises(RecipeError, match="model"):
        list(sweep(PAPER, [("model", ["gemma4-99b"])]))


def test_the_table_has_a_line_for_each_plan_whatever_the_terminals_width(gemsmith, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    axes = "model=gemma4-e2b,gemma4-31b,data.max_length=4096..16384"
    code, out, _ = gemsmith("plan", PAPER, "--machine", "v5p-8", "--sweep", axes)
    found = [line.split()[:3] for line in out.splitlines() if line.startswith(" gemma4")]
    lengths = ("4096", "8192", "16384")
    assert code == 0
    assert "$0.856–1.66 " in out  # whole
    assert found == [[model, length, "v5p-8"] for model in ("gemma4-e2b", "gemma4-31b") for length in lengths]
