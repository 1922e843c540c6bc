"""What a chart hands to the page: the points, placed where they are drawn."""

import json
import math

from gemsmith.report.charts import make_chart, spans_decades


def test_points_lie_where_they_are_drawn_and_those_that_are_not_finite_nowhere():
    def draw(axes):
        axes.set(xlim=(0, 10), ylim=(1, 100), yscale="log")

    points = [(0, 1, "low"), (5, 10, "middle"), (10, 100, "high"), (3, math.nan, "nowhere"), (math.inf, 2, "nowhere")]
    chart = make_chart("name", draw, title="Title", unit="unit", alt="alt", points=points)
    (left, bottom, _), (x, y, words), (right, top, _) = json.loads(chart.points)
    assert left < right <= 440 and 0 <= top < bottom <= 236
    assert words == "middle" and abs(x - (left + right) / 2) <= 1 and abs(y - (top + bottom) / 2) <= 1


def test_a_log_axis_needs_values_above_zero_that_spread():
    assert spans_decades([1, 1000]) and not spans_decades([1, 20]) and not spans_decades([0, 1000])
    assert spans_decades([1, math.nan, 1000]) and not spans_decades([math.nan])
