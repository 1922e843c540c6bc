"""The page of a plan: self-contained, from the record alone, the same bytes each time."""

import json
import re
from html import unescape

import pytest

from gemsmith.errors import InputError
from gemsmith.plan.stage import plan_only
from gemsmith.recipe.load import build_recipe
from gemsmith.report.plan_page import LEGEND, bar_of, render_plan, write_plan

from .conftest import unlabeled_cells


@pytest.fixture(scope="module")
def record():
    values = {"checkpoint": "x/y", "model": "gemma4-31b", "data": {"train": "x"}, "train": {"max_steps": 100}}
    return plan_only(build_recipe(values), "v5p-8,v6e-8,1xh100,1xh200,cpu", "usd")


def test_every_machine_is_there_in_the_records_order_with_its_numbers(record):
    html = render_plan(record, name="my <plan>")
    places = [html.index(f'<th scope="row">{machine.name}<small>') for machine in record.machines]
    assert places == sorted(places) and len(places) == 5
    assert "my &lt;plan&gt;" in html and "my <plan>" not in html
    assert "fits with train." in html and "{&#39;" not in html
    assert "fits with" in html and "gemma4-31b" in html
    loads = {row.input_tokens for row in record.serving}
    assert html.count(">output tokens/s</th>") == len(loads)
    assert unlabeled_cells(html) == (1 + len(loads), [])  # on a phone


def test_the_page_needs_nothing_else_and_has_the_same_bytes_twice(record):
    html = render_plan(record, name="plan")
    assert html == render_plan(record, name="plan") and len(html) < 200_000
    assert html.count("<script>") == 1 and "script-src 'sha256-" in html
    assert not re.search(r"<script [^>]*|https?://(?!www\.w3\.org)|<link[^>]+stylesheet|@import|url\((?!#)", html)
    assert "prefers-color-scheme: dark" in html and 'content="width=device-width' in html


def test_the_values_under_the_pointer_are_the_plans(record):
    html = render_plan(record, name="plan")
    found = [json.loads(unescape(points)) for points in re.findall(r'data-points="([^"]*)"', html)]
    said = [words for points in found for *_, words in points]
    dollars = [machine for machine in record.machines if machine.usd and machine.usd[0] > 0]
    assert said[: len(dollars)] == [f"{each.name} {each.usd[0]:.3g} to {each.usd[1]:.3g}" for each in dollars]
    hours = [machine for machine in record.machines if machine.hours]
    assert said[len(dollars) :] == [f"{each.name} {each.hours[0]:.3g} to {each.hours[1]:.3g}" for each in hours]


def test_bars_add_up_to_what_is_held_and_show_where_the_chip_ends(record):
    machines = {machine.name: machine for machine in record.machines}
    fits, small = bar_of(machines["v5p-8"]), bar_of(machines["1xh100"])
    (parts, limit), (more, end) = fits, small
    assert limit == 1 and sum(share for *_, share in parts) < 1
    assert sum(share for *_, share in more) == pytest.approx(1) and end < 1
    assert {(words, color) for words, color, _ in parts} <= set(LEGEND)
    machine = machines["v5p-8"]
    assert parts[0][2] == pytest.approx(machine.parts["frozen weights"] / machine.hbm_limit_bytes_per_chip)


def test_a_plan_in_which_nothing_fits_or_has_a_price_has_a_page_too(record):
    none = record.model_copy(update={"machines": record.machines[-1:], "serving": ()})
    assert not none.machines[0].fits and "no machine fits" in render_plan(none, name="plan")
    assert "<svg" not in render_plan(none, name="plan")


def test_a_page_that_cannot_be_written_is_one_line(record, tmp_path):
    with pytest.raises(InputError, match=r"--html .*: cannot be written"):
        write_plan(record, tmp_path / "none" / "plan.html", name="plan")
