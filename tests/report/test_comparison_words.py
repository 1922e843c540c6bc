from gemsmith.analysis.compare import ConditionDifference, compare_sides
from gemsmith.analysis.summary import read_sides
from gemsmith.report import comparison_page as words


def compared(make_run, **how):
    return compare_sides(read_sides([make_run("a").path, make_run("b", **how).path]))


def test_values_are_short_and_say_when_they_are_not_there():
    assert words.condition_value(None) == "not recorded" and words.condition_value("null") == "none"
    assert words.condition_value("ab" * 32) == "ab" * 6 and words.condition_value("a machine") == "a machine"


def test_an_effect_says_which_ratios_and_why():
    how = {"condition": "seed", "values": ("0", "1"), "confounds": ("quality",), "why": "chance"}
    assert words.effect(ConditionDifference(**how)) == "quality: chance"
    assert words.effect(ConditionDifference(**how | {"varying": "seed"})) == "what is compared"
    assert words.effect(ConditionDifference(**how | {"varying": "data.train"})) == "follows from data.train"
    assert words.effect(ConditionDifference(**how | {"confounds": ()})) == "bears on nothing: chance"


def test_the_lede_counts_what_bears_on_a_ratio(make_run):
    comparison = compared(make_run, steps=311)
    bearing = sum(1 for each in comparison.differences if each.confounds)
    assert bearing and words.summary_line(comparison).startswith(
        f"{bearing} conditions differ or cannot be said to be alike"
    )


def test_ratios_are_grouped_by_what_confounds_them(make_run):
    comparison = compared(make_run)
    groups = words.groups(comparison.pairs[0])
    assert [group.kind for group in groups] == ["training speed", "serving speed", "quality"]
    serving = groups[1]
    assert serving.units == ("output tokens/s", "ms TTFT", "ms TPOT")
    assert all(len(ratios) == 3 and None not in ratios for _, ratios in serving.loads)
    assert sum(len(ratios) for _, ratios in serving.loads) == len(serving.ratios)


def test_numbers_are_written_as_the_records_have_them(make_run):
    comparison = compared(make_run)
    (speed,) = [ratio for ratio in comparison.pairs[0].ratios if ratio.kind == "training speed"]
    assert words.ratio_words(speed) == "1.00\u00a0×" and words.interval_words(speed).endswith(
        ", steps resampled, one run each"
    )
    score = next(ratio for ratio in comparison.pairs[0].ratios if ratio.main and ratio.is_difference)
    assert words.ratio_words(score) == "+0.0\u00a0points" and "points" in words.interval_words(score)
    assert words.column(score) == "difference" and words.column(speed) == "ratio"
    nothing = speed.model_copy(update={"value": None, "interval": None})
    assert words.ratio_words(nothing) == "–" and words.interval_words(nothing) == "steps resampled, one run each"


def test_why_there_is_no_headline_names_the_first_few(make_run):
    (speed,) = [ratio for ratio in compared(make_run).pairs[0].ratios if ratio.kind == "training speed"]
    many = speed.model_copy(update={"confounded_by": tuple("abcde")})
    assert words.why_no_headline(many) == "no headline: confounded by a, b, c and 2 more"
    assert words.why_no_headline(speed.model_copy(update={"confounded_by": (), "notes": ("lost",)})) == "lost"
