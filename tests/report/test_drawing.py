"""Charts as SVG: well-formed, in the page's colors, the same bytes whatever the user has set."""

import re
from xml.etree import ElementTree

from gemsmith.report.page import render_page


def test_charts_are_well_formed_and_take_their_colors_from_the_page(make_run):
    html = render_page(make_run(steps=40))
    drawn = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(drawn) == 10
    for chart in drawn:
        ElementTree.fromstring(chart)  # our own
        assert "var(--" in chart and "<text" in chart
        assert re.findall(r"#[0-9a-f]{6}\b", chart) == []
        assert "DejaVu" not in chart


def test_the_same_records_give_the_same_bytes_whatever_matplotlib_is_set_to(make_run, monkeypatch):
    import matplotlib

    first = render_page(make_run("one/run", steps=60, resumed_at=(20,)))
    with matplotlib.rc_context({"font.size": 30, "axes.labelsize": 30, "xtick.major.size": 20, "svg.fonttype": "path"}):
        second = render_page(make_run("two/run", steps=60, resumed_at=(20,)))
    assert first == second
