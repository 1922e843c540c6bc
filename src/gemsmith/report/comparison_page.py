"""The HTML of a comparison: one page that needs nothing else."""

from typing import Any

from gemsmith.analysis.compare import Comparison, Pair
from gemsmith.analysis.published import Reanalysis
from gemsmith.report import comparison_words as words
from gemsmith.report.charts import Chart
from gemsmith.report.page import open_environment


def render_comparison(comparison: Comparison, redrawn: Reanalysis | None = None) -> str:
    """The page; of a published comparison with what it says of itself. Raises MachineError as the report's page."""
    environment = open_environment()
    from gemsmith.report import bench_charts as charts

    names = [side.name for side in comparison.sides]
    beside = f", beside {', '.join(names[2:])}" if names[2:] else ""
    at_catalog = [
        charts.cost_chart(curve, (names[0], names[1]), "at the catalog’s prices")
        for curve in (redrawn.at_catalog if redrawn else ())
    ]
    template = environment.get_template("comparison.html")
    html = template.render(
        comparison=comparison,
        names=names,
        title=words.title(comparison) if redrawn is None else f"{redrawn.title}, drawn again{beside}",
        summary_line=words.summary_line(comparison),
        redrawn=redrawn,
        bearing=[each for each in comparison.differences if each.confounds or each.about],
        others=[each for each in comparison.differences if not each.confounds and not each.about],
        pairs=[_pair(comparison, pair) for pair in comparison.pairs],
        loss=charts.loss_chart(comparison),
        at_catalog=at_catalog,
        words=words,
    )
    return str(html).encode("utf-8", "replace").decode()


def _pair(comparison: Comparison, pair: Pair) -> dict[str, Any]:
    from gemsmith.report import bench_charts as charts

    names = [side.name for side in comparison.sides]
    places = names.index(pair.first), names.index(pair.other)
    drawn: list[Chart | None] = [charts.speed_chart(comparison, pair), charts.latency_chart(comparison, pair)]
    return {
        "pair": pair,
        "tiles": [ratio for ratio in pair.ratios if ratio.main],
        "groups": words.groups(pair),
        "serving": [chart for chart in drawn if chart is not None],
        "cost": [charts.cost_chart(curve, (pair.first, pair.other), places=places) for curve in pair.curves],
    }
