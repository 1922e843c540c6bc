"""Every task in the table is what the table says; the recipe takes these names and no others."""

import importlib
import inspect
from pathlib import Path

import pytest

import gemsmith.tasks
from gemsmith.data.dataset import Columns, read_dataset
from gemsmith.errors import RecipeError
from gemsmith.recipe.load import build_recipe
from gemsmith.recipe.schema import GeneratedData
from gemsmith.tasks import GENERATORS, SCORERS, SOURCES, find_generator, find_scorer, find_source
from gemsmith.tasks.base import Benchmark, DataGenerator, Question, Scorer, SupportsValidation, Verdict
from gemsmith.tasks.messages import text_message, text_of

FOLDER = Path(gemsmith.tasks.__file__).parent
NO_TASKS = {"__init__", "base", "custom", "messages", "registry"}


def recipe(**sections):
    return build_recipe({"checkpoint": "x", "data": {"train": "x"}} | sections)


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


MODULES = sorted({task.module for names in (GENERATORS, SCORERS, SOURCES) for task in names.values()})


def test_every_file_of_a_task_is_listed():
    assert [module for module in MODULES if "." not in module] == sorted(
        file.stem for file in FOLDER.glob("*.py") if file.stem not in NO_TASKS
    )
    assert not SCORERS.keys() & SOURCES.keys()


@pytest.mark.parametrize("module_name", MODULES)
def test_a_task_has_what_its_listings_say_and_no_more(module_name):
    module = importlib.import_module(f"gemsmith.tasks.{module_name}")
    made, scored, asked = (
        [name for name, task in names.items() if task.module == module_name and task.does]
        for names in (GENERATORS, SCORERS, SOURCES)
    )
    names = {"generate_rows": made, "score": scored, "COLUMNS": scored}
    names |= dict.fromkeys(("read_questions", "open_judges", "SAMPLING", "PROMPTS"), asked)
    assert {name for name in names if hasattr(module, name)} == {name for name, given in names.items() if given}
    if made:
        assert parameters(module.generate_rows) == parameters(DataGenerator.generate_rows)
    if scored:
        assert parameters(module.score) == parameters(Scorer.score) and isinstance(module.COLUMNS, tuple)


@pytest.mark.parametrize("name", SOURCES)
def test_a_task_with_its_own_questions_says_how_it_asks_and_how_often(name):
    source = find_source(name)
    assert parameters(source.read_questions) == parameters(Benchmark.read_questions)
    assert parameters(source.open_judges) == parameters(Benchmark.open_judges)
    assert source.PROMPTS and source.SAMPLING.samples >= 1


@pytest.mark.parametrize("name", GENERATORS)
def test_made_rows_ask_something_follow_from_the_seed_and_share_nothing_with_the_other_split(name):
    train, held_out = (
        read_dataset(GeneratedData(task=name, rows=60, split=split), seed=seed).documents
        for split, seed in (("train", 0), ("held-out", 1))
    )
    assert len(train) == len(held_out) == 60
    prompts, others = ({text_of(row.messages[0]) for row in rows} for rows in (train, held_out))
    assert len(prompts) == len(others) == 60 and not prompts & others and all(map(str.strip, prompts))
    maker = find_generator(name)
    assert list(maker.generate_rows(60, "train", 0)) == list(maker.generate_rows(60, "train", 0))
    assert list(maker.generate_rows(5, "train", 0)) != list(maker.generate_rows(5, "train", 1))


@pytest.mark.parametrize(("made", "scored"), [("verilog", "verilog-exact")])
def test_the_expected_answer_of_a_made_row_is_right_and_that_of_another_row_is_not(made, scored):
    scorer = find_scorer(scored)
    rows = read_dataset(GeneratedData(task=made, rows=2), columns=Columns(needed=scorer.COLUMNS)).documents
    expected = [text_of(row.messages[-1]) for row in rows]
    question = Question(
        messages=rows[0].messages[:-1], expected=expected[0], origin=rows[0].origin, columns=rows[0].columns
    )
    assert [verdict.right for verdict in scorer.score(question, expected)] == [True, False]


LIKELIER = '[{"choice": "yes", "logprob": -1, "tokens": 1}, {"choice": "no", "logprob": -2, "tokens": 1}]'
LESS_LIKELY = LIKELIER.replace("-2", "-0.5")
# Scorer -> the expected answer, further columns, an answer that is right and one that is not.
ANSWERS = {
    "exact": ("yes", {}, "yes", "no"),
    "verilog-exact": ("yes", {}, "yes", "no"),
    "regex": ("yes", {"pattern": "^yes$"}, "yes", "no"),
    "json-fields": ('{"a": 1}', {}, '{"a": 1.0}', "{}"),
    "labels": ("yes", {"labels": ["yes", "no"]}, "Yes.", "no"),
    "contained-label": ("yes", {"labels": ["yes", "no"]}, "I say yes.", "no"),
    "multiple-choice": ("yes", {"choices": ["yes", "no"]}, LIKELIER, LESS_LIKELY),
}


@pytest.mark.parametrize("name", SCORERS)
def test_a_scorer_gives_a_verdict_for_each_of_no_one_and_many_answers(name):
    expected, columns, right, wrong = ANSWERS[name]
    question = Question(messages=(text_message("user", "a"),), expected=expected, origin="here", columns=columns)
    scorer = find_scorer(name)
    if isinstance(scorer, SupportsValidation):
        scorer.check(question)
    for answers in ([], [right], [right, wrong, right] * 20):
        verdicts = list(scorer.score(question, answers))
        assert all(isinstance(verdict, Verdict) for verdict in verdicts)
        assert [verdict.right for verdict in verdicts] == [answer == right for answer in answers]


def listed(names):
    names = [*names]
    return f"{', '.join(map(repr, names[:-1]))} or {names[-1]!r}"


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"eval": {"scorer": "verilog-exct"}},
            f"eval.scorer: 'verilog-exct' was given, input should be {listed(SCORERS)}, or a Python file such as "
            "./my_task.py (did you mean verilog-exact?)",
        ),
        (
            {"data": {"train": {"task": "verilg", "rows": 3}}},
            "data.train.task: 'verilg' was given, input should be 'verilog', or a Python file such as ./my_task.py "
            "(did you mean verilog?)",
        ),
        (
            {"data": {"train": "x", "eval": {"task": "poems", "rows": 3}}},
            "data.eval.task: 'poems' was given, input should be 'verilog', or a Python file such as ./my_task.py",
        ),
        (
            {"eval": {"tasks": [{"task": "verilgo", "dataset": "d"}]}},
            f"eval.tasks.0.task: 'verilgo' was given, input should be {listed((*SOURCES, *SCORERS))}, or a Python file "
            "such as ./my_task.py (did you mean verilog?)",
        ),
    ],
)
def test_an_unknown_task_or_scorer_is_one_line_with_those_there_are(sections, expected):
    with pytest.raises(RecipeError) as error:
        recipe(**sections)
    assert str(error.value) == f"recipe: {expected}"
