"""The page: self-contained, deterministic, small, honest about what is missing, whatever the records hold."""

import base64
import hashlib
import importlib.util
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gemsmith.analysis.summary import find_notices, read_findings
from gemsmith.errors import MachineError
from gemsmith.recipe.load import build_recipe
from gemsmith.report.page import render_page, report
from gemsmith.runs.bench_records import BenchRecord
from gemsmith.runs.eval_records import EvalRecord
from gemsmith.runs.records import Check, TrainRecord
from gemsmith.runs.run import Run, open_run, read_record, write_record
from gemsmith.runs.stages import STAGES

from .conftest import unlabeled_cells

MakeRun = Callable[..., Run]
VOID = {"meta", "link", "br", "img", "input", "hr"}
HOSTILE_MARKUP = '<script>alert("x")</script>'


class Outline(HTMLParser):
    """Collects what the tests ask about, and fails on tags that are not closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture
def page(make_run: MakeRun, undrawn: None) -> Callable[..., Outline]:
    """Returns a function that makes a run and outlines its page, where what the charts look like is of no interest."""
    return lambda **how: Outline(render_page(make_run(**how)))


def rewrite(run: Run, stage: str, **fields: Any) -> None:
    values = json.loads(run.record_file(stage).read_text())
    write_record(run, STAGES[stage].record.model_validate(values | fields))


def test_the_page_needs_nothing_from_outside(make_run):
    html = render_page(make_run(steps=40))
    outline = Outline(html)
    ids = [attributes["id"] for _, attributes in outline.tags if attributes.get("id")]
    links = [attributes[name] for _, attributes in outline.tags for name in ("href", "src") if name in attributes]
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    assert [attributes for tag, attributes in outline.tags if tag == "script"] == [{}]
    (policy,) = [attributes["content"] for _, attributes in outline.tags if "http-equiv" in attributes]
    assert policy.startswith("default-src 'none';")
    # A browser takes this script and no other, and it has nowhere to send anything.
    assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy
    assert re.findall(r"fetch|XMLHttp|import|https?:|innerHTML|eval", script) == []
    assert len(links) > 20
    for link in links:
        assert (link.startswith("#") and link[1:] in ids) or link == "data:,", link
    assert "@import" not in html
    assert {found for found in re.findall(r"url\(([^)]*)\)", html) if found.strip("'\"#") not in ids} == set()
    assert [name for name, times in Counter(ids).items() if times > 1] == []


def test_every_image_and_table_can_be_read_without_seeing_it(page):
    outline = page(steps=40)
    images = [attributes for _, attributes in outline.tags if attributes.get("role") == "img"]
    assert len(images) == 10
    assert all(len(attributes["aria-label"] or "") > 40 for attributes in images)
    assert all(attributes.get("aria-hidden") for tag, attributes in outline.tags if tag == "svg")
    assert all(attributes.get("scope") for tag, attributes in outline.tags if tag == "th")
    tables = sum(tag == "table" for tag, _ in outline.tags)
    assert tables == sum(
        "wide" in (attributes.get("class") or "").split() and bool(attributes.get("aria-label"))
        for _, attributes in outline.tags
    )


def test_on_a_phone_each_cell_of_the_plan_the_loads_and_the_scores_has_its_name(make_run, undrawn):
    html = render_page(make_run(steps=40))
    tables, unlabeled = unlabeled_cells(html)
    assert tables >= 5 and unlabeled == []
    for label in (
        'role="region" aria-label="Machines"',
        'aria-label="Load test, each cell"',
        "Server metrics, each cell",
    ):
        assert "stacked" in html[html.index(label) :].partition("<tbody>")[0], label


def test_other_records_give_another_page(make_run, undrawn):
    run = make_run(steps=40)
    before = render_page(run)
    rewrite(run, "train", real_tokens_per_s=123.4)
    after = render_page(run)
    assert "123" in Outline(after).text
    assert before != after


def test_the_headline_is_what_the_records_say(page):
    text = page().text
    for words in (
        "Did it work? ✓ yes 8 of 8 stages have a record exported weights: 4 passed",
        "How good? 0.030 → 0.940 right",
        "0.014–0.064 and 0.898–0.965",
        "200 held-out rows",
        "52.2 ms",
        "512 in, 4 requests/s",
        "What did it cost? estimated $4.50–7.20 planned: 311 steps on v5p-8, the cheapest that fits",
    ):
        assert words in text, words
    assert re.search(r"loss 1\.66 → 0\.\d+ in 311 steps", text)


@pytest.mark.parametrize("stage", list(STAGES))
def test_a_missing_record_is_said_to_be_missing(page, stage):
    text = page(steps=3, without=(stage,)).text
    assert f"No {stage}.json in this run: gemsmith {stage} makes it." in text
    assert f"No record of: {stage}." in text


def test_a_run_without_any_record_still_renders(page):
    text = page(without=tuple(STAGES)).text
    assert "No stage has left a record." in text
    assert text.count("makes it.") == len(STAGES)


def test_an_unreadable_record_is_named_and_the_rest_is_shown(make_run, undrawn):
    run = make_run(steps=40)
    run.record_file("eval").write_text('{"scorer": 3}')
    text = Outline(render_page(run)).text
    assert "is not a record of this version" in text
    assert "Throughput" in text


def numbers_replaced(value: Any, number: float) -> Any:
    """A record's JSON with every fraction in it replaced."""
    if isinstance(value, dict):
        return {name: numbers_replaced(each, number) for name, each in value.items()}
    if isinstance(value, list):
        return [numbers_replaced(each, number) for each in value]
    return number if isinstance(value, float) else value


@pytest.mark.parametrize("number", [math.nan, 0.0])
def test_whatever_the_numbers_are_there_is_a_page(make_run, number):
    run = make_run(steps=4, lengths=(512,), rates=(1.0, 4.0))
    for stage in STAGES:
        values = json.loads(run.record_file(stage).read_text())
        run.record_file(stage).write_text(json.dumps(numbers_replaced(values, number)))
    text = Outline(render_page(run)).text
    assert ("not finite" in text) == (number != 0)
    assert "nan" not in text.lower().split()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"schema_version": 1, "status": "comp', "is not a record of this version"),
        (b"", "is not a record of this version"),
        (b"\xff\xfe\x00", "is not a record of this version"),
        (b"[" * 100_000, "is not a record of this version"),
        (b'{"schema_version": 7, "provenance": {"gemsmith": "9.1"}}', "has schema_version 7, this Gemsmith"),
        (None, "train.json: cannot be read (Is a directory); remove it, then run: gemsmith train"),
    ],
    ids=["truncated", "empty", "bytes", "deep", "later", "folder"],
)
def test_a_record_that_cannot_be_used_is_named_with_what_to_do(make_run, undrawn, content, said):
    run = make_run(steps=3, without=("train",))
    file = run.record_file("train")
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    text = Outline(render_page(run)).text
    assert said in text and "No record of: train." in text
    assert "Throughput" in text and "Did it work? ! in part" in text


def test_an_evaluation_that_the_recipe_leaves_out_is_no_missing_record(tmp_path):
    run = open_run(tmp_path / "run", build_recipe({"checkpoint": "base", "data": {"train": "rows.jsonl"}}))
    text = Outline(render_page(run)).text
    assert "Left out: data.eval names no held-out rows." in text
    assert "No record of: plan, data, train, export, verify, serve, bench." in text


def test_a_failed_verification_stands_at_the_top(page):
    outline = page(steps=40, verified=False)
    failed = outline.text.index("Verification failed: logits. Do not use these weights.")
    assert failed < outline.text.index("Did it work? ✕ no")
    assert "✕ fail" in outline.text and "3 passed, 1 failed" in outline.text


def test_a_check_that_was_not_done_is_no_pass(make_run, undrawn):
    run = make_run(steps=40)
    checks = (
        Check(name="logits", passed=None, detail="the model does not fit into memory"),
        Check(name="tensors", passed=True, detail="x"),
    )
    rewrite(run, "verify", checks=checks, logits_max_abs_difference=None)
    text = Outline(render_page(run)).text
    assert "Verification is partial, not done here: logits." in text
    assert "– not done logits" in text and "1 passed, 1 not done" in text


def test_failed_requests_and_cells_without_an_answer_are_told(page):
    assert "128 of 768 requests of the load test failed" in page(steps=3, failed_requests=128).text
    text = page(steps=3, failed_requests=128, lengths=(512,), rates=(4.0,)).text
    assert "No request completed, so there is nothing to draw." in text
    assert "no request completed" in text


def test_requests_that_ended_early_are_in_the_table_and_among_those_asked(make_run, undrawn):
    run = make_run(steps=3, failed_requests=28, lengths=(512,), rates=(4.0,))
    (cell,) = read_record(run, BenchRecord).cells
    rewrite(run, "bench", cells=(cell.model_copy(update={"completed": 90, "cut": 10}).model_dump(),))
    text = Outline(render_page(run)).text
    assert "28 of 128 requests of the load test failed" in text
    assert re.search(r"done failed ended early.* 90 28 10 ", text)


def test_rows_without_an_answer_are_told_beside_the_scores(make_run, undrawn):
    run = make_run(steps=3)
    assert "not answered" not in Outline(render_page(run)).text
    tuned = read_record(run, EvalRecord).tuned.model_copy(update={"failed": {"http 500": 2, "<b>not JSON": 1}})
    rewrite(run, "eval", tuned=tuned.model_dump())
    text = Outline(render_page(run)).text
    assert (
        "Of the tuned model’s rows these were not answered and count as not right: 2 http 500, 1 <b>not JSON." in text
    )
    assert "Of the base model’s rows" not in text


def test_a_task_with_its_own_problems_has_them_side_by_side(make_run, undrawn):
    run = make_run(steps=3)
    problems = [{"name": f"Prob{n}_<b>", "samples": 5, "passed": n, "reasons": {"timeout": 5 - n}} for n in (0, 1, 2)]
    score = read_record(run, EvalRecord).tuned.model_dump()
    model = {
        "score": score,
        "problems": problems,
        "answers": 15,
        "pass_at": [{"k": 1, "score": 0.2, "low": 0, "high": 1}],
    }
    difference = {"mean": 0, "low": 0, "high": 0, "p_value": 1, "significant": False, "questions": 3, "better": 0}
    difference |= {"worse": 0, "sample_size_for_2pp": None, "summary": "Neither is better."}
    task = {"task": "verilog", "samples": 5, "temperature": 0.8, "top_p": 0.95, "seed": 0, "max_tokens": 9}
    task |= {"prompt": "official", "questions_sha256": "0", "left_out": {"Prob9": "why"}, "judged_by": "Icarus 11"}
    rewrite(run, "eval", scorer="verilog", tasks=[task | {"base": model, "tuned": model, "difference": difference}])
    text = Outline(render_page(run)).text
    assert "5 samples at temperature 0.8, top-p 0.95, prompt official" in text and "3 problems" in text
    assert "Neither is better. Left out, since Icarus 11 cannot judge any answer to them: Prob9." in text
    assert "Prob2_<b>" in text and "2 of 5" in text and "3 timeout" in text


def test_a_record_made_from_an_older_one_is_called_stale(make_run, undrawn):
    run = make_run(steps=40)
    rewrite(run, "train", backend="trl")
    assert read_findings(run).stale == ("export",)
    assert "an earlier record than those now in the run directory: export." in Outline(render_page(run)).text


def test_a_failed_verification_of_the_weights_that_are_there_is_not_stale(make_run):
    assert read_findings(make_run(steps=3, verified=False)).stale == ()


def test_answers_that_were_cut_are_told(make_run, undrawn):
    run = make_run(steps=3)
    tuned = read_record(run, EvalRecord).tuned.model_copy(update={"cut": 7})
    rewrite(run, "eval", tuned=tuned.model_dump())
    assert (
        "7 answers reached eval.max_tokens before they had ended (7 of the tuned model)."
        in Outline(render_page(run)).text
    )


def test_hostile_texts_stay_texts(make_run, undrawn):
    run = make_run("<b>run", steps=40, hostile=True)
    html = report(run).read_text(encoding="utf-8")
    outline = Outline(html)
    assert HOSTILE_MARKUP not in html
    assert HOSTILE_MARKUP in outline.text and "{{ 7*7 }}" in outline.text and "漢字 العربية 🦊" in outline.text
    assert re.findall(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", html) == []
    assert "[U+202E]" in outline.text and "\u2400" in outline.text
    assert html.count("<script>") == 1 and "onerror" not in html
    assert "<b>run" not in html
    assert re.search(r"98,\d{3} more characters", outline.text)
    assert len(html.encode()) < 1_000_000


def test_wrong_answers_are_marked_where_they_differ(make_run, undrawn):
    html = render_page(make_run(steps=3))
    assert "assign y = a <mark>-</mark> b;" in html
    assert "<mark>The answer is 7.</mark>" in html
    outline = Outline(html)
    assert outline.text.count("✕ wrong") == 4 and outline.text.count("✓ right") == 2


def test_a_single_step_is_told_and_not_drawn(page):
    outline = page(steps=1)
    assert re.search(r"1 step in [\d.]+ s: the loss was", outline.text)
    assert len([1 for _, attributes in outline.tags if attributes.get("role") == "img"]) == 6
    assert "The steps as a table" in outline.text


def test_a_long_run_and_a_wide_sweep_stay_small(make_run):
    html = render_page(
        make_run(steps=30_000, lengths=(128, 512, 1024, 4096, 8192, 16384, 32768), rates=(1, 2, 4, 8, 16, 32, 64))
    )
    assert len(html.encode()) < 1_000_000
    assert "24 of the 30,000 steps" in html


def test_a_missing_library_is_one_sentence_that_names_the_command(make_run, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest)
    )
    with pytest.raises(MachineError, match=r"matplotlib is not installed; run: pip install 'gemsmith\[report\]'"):
        render_page(make_run(without=tuple(STAGES)))


def luminance(color: str) -> float:
    if len(color) == 4:
        color = "#" + "".join(2 * digit for digit in color[1:])
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """WCAG 2.2's ratio."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colors_stand_out_in_light_and_dark():
    css = (Path(str(importlib.util.find_spec("gemsmith.report").origin)).parent / "templates" / "page.css").read_text()
    themes = [
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6})\b", block))
        for block in re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    ]
    light, dark = themes[0], themes[0] | themes[1]
    for theme in (light, dark, themes[0] | themes[2]):
        for text in ("ink", "muted", "good", "bad", "mild", *(f"s{index}" for index in range(1, 7))):
            assert contrast(theme[text], theme["paper"]) >= 4.5, text
        for text, ground in (
            ("ink", "raised"),
            ("muted", "raised"),
            ("ink", "mark"),
            ("bad", "bad-soft"),
            ("mild", "mild-soft"),
            ("ink", "bad-soft"),
        ):
            assert contrast(theme[text], theme[ground]) >= 4.5, (text, ground)


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ({"skipped": (7,), "spikes": ()}, ["The updates of step 7 were left out"]),
        (
            {"skipped": (7,), "spikes": (7, 9)},
            ["The updates of step 7 were left out", "The loss had a spike at step 9."],
        ),
        ({"skipped": (), "spikes": (3, 4, 9)}, ["The loss had a spike at steps 3, 4, 9."]),
        ({"skipped": (), "spikes": tuple(range(1, 9))}, ["The loss had a spike at steps 1, 2, 3, 4, 5 and 3 more."]),
    ],
)
def test_spikes_and_skipped_steps_are_told_before_the_numbers(make_run, marks, expected):
    run = make_run(steps=12)
    write_record(run, read_record(run, TrainRecord).model_copy(update=marks))
    warnings = [
        notice.text
        for notice in find_notices(read_findings(run))
        if "step" in notice.text and "settings" not in notice.text
    ]
    assert [text.startswith(start) for text, start in zip(warnings, expected, strict=True)] == [True] * len(expected), (
        warnings
    )
