import re
from html.parser import HTMLParser

import numpy as np
import pytest

from gemsmith.analysis.compare import compare_sides
from gemsmith.analysis.published import read_published, reanalyze
from gemsmith.analysis.summary import read_sides
from gemsmith.report.comparison_page import extent, render_comparison
from gemsmith.runs.bench_records import Requests
from gemsmith.runs.run import read_record, write_record
from gemsmith.runs.stages import STAGES
from gemsmith.system import format as numbers


class Outline(HTMLParser):
    """Tags that are open or closed wrongly, ids, links and what could take the focus."""

    VOID = {"meta", "link", "path", "use", "rect", "line", "br"}  # noqa: RUF012

    def __init__(self, page):
        super().__init__()
        self.open, self.wrong, self.ids, self.links, self.regions = [], [], [], [], 0
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag not in self.VOID:
            self.open.append(tag)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values["href"]] if tag == "a" else []
        self.regions += values.get("role") == "region" and values.get("tabindex") == "0"

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        if tag in self.VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


@pytest.fixture
def runs(make_run):
    return [make_run("a"), make_run("b", steps=40)]


def page_of(runs):
    return render_comparison(compare_sides(read_sides([run.path for run in runs])))


def text_of(page):
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def with_requests(run, slower, *, prompts="ab"):
    """The run's load test with its requests one by one, so that their medians are those of the cells."""
    bench = read_record(run, STAGES["bench"].record)
    spread = np.exp(np.random.default_rng(0).normal(0, 0.2, 41))

    def requests(cell):
        ttft_ms = slower * cell.ttft_ms.p50 * spread / np.median(spread)
        latency_ms = ttft_ms + slower * cell.tpot_ms.p50 * (cell.output_tokens - 1)
        start_ms = 100.0 * np.arange(len(spread))
        columns = {"start_ms": start_ms, "ttft_ms": ttft_ms, "latency_ms": latency_ms, "input_tokens": [16] * 41}
        return Requests(prompts_sha256=prompts, **{name: tuple(column) for name, column in columns.items()})

    cells = tuple(cell.model_copy(update={"requests": requests(cell)}) for cell in bench.cells)
    write_record(run, bench.model_copy(update={"cells": cells}))
    return run


def test_serving_ratios_stand_with_their_intervals(runs, undrawn):
    text = text_of(page_of([with_requests(run, 1.0) for run in runs]))
    assert "No 95&nbsp;% interval" not in text
    assert "ms TTFT: paired over 41 prompts, one run each" in text
    assert "output tokens/s: 50 parts of the time resampled, one run each" in text


def test_every_ratio_has_a_bar_with_its_interval_on_one_scale(runs, undrawn):
    comparison = compare_sides(read_sides([with_requests(run, 1.0).path for run in runs]))
    ratios = [each for each in comparison.pairs[0].ratios if each.value and not each.is_difference]
    assert render_comparison(comparison).count('class="placed"') == len(ratios) > 3
    assert any(each.interval for each in ratios)
    for ratio in ratios:
        length, begin = extent(ratio)
        low, high = ratio.interval or (ratio.value, ratio.value)
        assert 16 ** (2 * begin - 1) == pytest.approx(low) and 16 ** (2 * (begin + length) - 1) == pytest.approx(high)
    assert extent(ratios[0].model_copy(update={"interval": (0.001, 100.0)})) == (1, 0)
    assert extent(ratios[0].model_copy(update={"is_difference": True})) is None


def test_records_of_percentiles_alone_say_that_they_have_no_intervals(runs, undrawn):
    with_requests(runs[0], 1.0)
    assert "No 95&nbsp;% interval: no single requests recorded" in text_of(page_of(runs))


def test_numbers_on_the_page_are_those_of_the_records(runs, undrawn):
    text = text_of(page_of(runs))
    for run in runs:
        train, bench, scores = (read_record(run, STAGES[stage].record) for stage in ("train", "bench", "eval"))
        assert numbers.decimal(train.real_tokens_per_s) in text
        assert numbers.fraction(scores.tuned.score) in text
        for cell in bench.cells:
            for value in (cell.output_tokens_per_s, cell.ttft_ms.p50, cell.tpot_ms.p50):
                assert numbers.decimal(value) in text


def test_what_differs_comes_before_any_ratio(runs, undrawn):
    page = page_of(runs)
    assert page.index('id="fairness"') < page.index('id="pair-1"')
    assert "data:loss_mask_sha256" in page and "no headline: confounded by" in page


def test_the_page_is_whole_small_and_fetches_nothing(runs):
    page = page_of(runs)
    outline = Outline(page)
    assert outline.wrong == [] and outline.open == []
    assert len(outline.ids) == len(set(outline.ids))
    assert {link[1:] for link in outline.links if link.startswith("#")} <= set(outline.ids)
    assert outline.regions >= 4  # every wide table is reached and scrolled by the keyboard
    assert not re.search(r'(?:src|href)="(?:https?:)?//|url\(\s*["\']?http', page)
    assert page.count("<script") == 1 and "script-src 'sha256-" in page
    assert "default-src 'none'" in page and len(page.encode()) < 500_000
    assert page == page_of(runs)


def test_a_hostile_run_is_shown_as_text(make_run, undrawn):
    page = page_of([make_run("a", hostile=True), make_run("<script>alert(1)&")])
    assert page.count("<script") == 1 and "&lt;script&gt;" in page and "\u202e" not in page


def test_runs_without_a_stage_in_common_say_so(make_run, undrawn):
    page = page_of([make_run("a", without=("train", "bench")), make_run("b", without=("eval",))])
    assert "The two have no number in common." in page
    assert "b: no record of eval; gemsmith run" in page and "a: no record of train, bench; " in page


def test_several_runs_are_each_compared_with_the_first(make_run, undrawn):
    page = page_of([make_run(name) for name in "abc"])
    assert "<h2>b against a</h2>" in page and "<h2>c against a</h2>" in page
    assert {"pair-1", "pair-2"} <= set(Outline(page).ids)


def test_the_papers_page_has_its_claims_and_no_headline(undrawn):
    redrawn = reanalyze(read_published())
    page = render_comparison(redrawn.comparison, redrawn)
    assert page.count("✕ not so") == 4 and page.count("✓ holds") == 17
    assert "1.82 × is that of 1.0 h" in page and 'class="big"' not in page
    assert Outline(page).wrong == []


def test_runs_beside_the_paper_are_held_against_both_of_its_sides(make_run, undrawn):
    (side,) = read_sides([make_run("mine").path])
    redrawn = reanalyze(read_published(), [side])
    page = render_comparison(redrawn.comparison, redrawn)
    for first in ("paper&#39;s TPU", "paper&#39;s GPU"):
        assert f"<h2>mine against {first}</h2>" in page
    assert "drawn again, compared with mine" in page and Outline(page).wrong == []
