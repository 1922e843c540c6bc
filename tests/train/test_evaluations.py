"""The loss on held-out rows while a run trains: what it is, in both backends, and that the steps do not see it."""

import shutil

import peft
import pytest
import torch
import transformers

from gemsmith.checkpoints.peft import WEIGHTS
from gemsmith.data.batches import EVAL_ROWS, open_rows
from gemsmith.errors import DataError, RecipeError, RunError, Terminated
from gemsmith.export.stage import export
from gemsmith.runs.records import DataRecord
from gemsmith.runs.run import Run, is_up_to_date, read_record, stage_keys
from gemsmith.train.loop import TrainSession
from gemsmith.train.stage import train
from support.images import image_bytes

pytestmark = pytest.mark.filterwarnings("ignore")  # upstream's, at import

EVAL = {"eval": {"task": "verilog", "rows": 5, "split": "held-out"}}
BACKENDS = ("tunix", "trl")


def numbers(record):
    """All that is said of evaluations but their seconds."""
    return [evaluation.model_dump(exclude={"s"}) for evaluation in record.evaluations]


@pytest.fixture(scope="module", params=BACKENDS)
def evaluated(request, trained_once):
    """A run of six steps with dropout that was evaluated after the fourth and the last, and its record."""
    keys = {"backend": request.param, "eval_steps": 4}
    return trained_once(f"{request.param}-evaluated", data=EVAL, train=keys)


def test_the_steps_are_those_of_a_run_without_evaluations(evaluated, trained_once, same_numbers, tmp_path):
    backend = evaluated[0].recipe.train.backend
    other = trained_once(backend, train={"backend": backend})
    (run, record), (other, without) = (
        copied(*each, tmp_path / name) for each, name in ((evaluated, "run"), (other, "other"))
    )
    assert [evaluation.step for evaluation in record.evaluations] == [4, 6] and without.evaluations == ()
    assert same_numbers(record, without)
    export(run), export(other)
    assert (run.adapter / WEIGHTS).read_bytes() == (other.adapter / WEIGHTS).read_bytes()


def copied(run, record, folder):
    return Run(path=shutil.copytree(run.path, folder), recipe=run.recipe), record


def test_a_loss_is_the_mean_over_documents_one_by_one_in_transformers(evaluated, tmp_path):
    """Without dropout, and with the adapters as the step left them."""
    run, record = copied(*evaluated, tmp_path / "run")
    export(run)
    base = transformers.AutoModelForCausalLM.from_pretrained(run.recipe.checkpoint, dtype=torch.float32)
    model, rows = peft.PeftModel.from_pretrained(base, run.adapter).eval(), open_rows(run, EVAL_ROWS)
    nll, correct, count, documents = 0.0, 0, 0, 0
    for row in range(len(rows)):
        for place in rows.documents(row):
            tokens, mask = torch.tensor(rows.tokens[row][place]), torch.tensor(rows.loss_mask[row][place]).bool()[1:]
            with torch.no_grad():
                logits = model(input_ids=tokens[None].long()).logits[0, :-1][mask]
            targets = tokens[1:][mask].long()
            nll += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
            correct += int((logits.argmax(-1) == targets).sum())
            count, documents = count + len(targets), documents + 1
    last = record.evaluations[-1]
    assert documents == 5 and last.loss_tokens == count == read_record(run, DataRecord).eval_rows.supervised_tokens
    assert last.loss == pytest.approx(nll / count, rel=1e-5)
    assert last.token_accuracy == pytest.approx(correct / count, abs=1e-6)


def test_evaluations_are_told_and_drawn(evaluated, read_events):
    run, record = evaluated
    events = read_events(run)
    for name in ("loss", "token_accuracy"):
        expected = {one.step: pytest.approx(getattr(one, name)) for one in record.evaluations}
        assert events[f"eval/{name}"] == expected


def stops_before(step):
    """A TrainSession.plan that interrupts as by Ctrl-C before a step."""
    plan = TrainSession.plan

    def stopping(self, number):
        if number == step:
            raise KeyboardInterrupt
        return plan(self, number)

    return stopping


@pytest.mark.parametrize("found", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["saved", "not yet made"])
def test_a_run_that_was_killed_has_the_same_evaluations(
    evaluated, prepared_run, read_events, monkeypatch, capsys, same_numbers, found
):
    """Also where step 4 was saved without its own, as where SIGTERM comes then."""
    whole, record = evaluated
    run = prepared_run(data=EVAL, train={"backend": whole.recipe.train.backend, "eval_steps": 4})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TrainSession, "plan", stops_before(6))
        if not found:
            patch.setattr(TrainSession, "due", lambda *_: False)
        train(run)
    again = train(run)
    assert numbers(again) == numbers(record) and same_numbers(again, record)
    assert set(read_events(run)["eval/loss"]) == {4, 6}
    assert capsys.readouterr().err.count("eval at step 4 of 6: loss ") == 1


@pytest.mark.slow
def test_a_signal_ends_an_evaluation_which_is_made_once_the_run_goes_on(evaluated, prepared_run, monkeypatch):
    whole, record = evaluated
    run = prepared_run(data=EVAL, train={"backend": whole.recipe.train.backend, "eval_steps": 4, "save_steps": 5})
    due = TrainSession.due

    def told(self, step):
        if found := due(self, step):
            self.stopping.set()
        return found

    with monkeypatch.context() as patch, pytest.raises(Terminated, match="step 4 is saved"):
        patch.setattr(TrainSession, "due", told)
        train(run)
    again = train(run)
    assert numbers(again) == numbers(record) and again.resumed_at == (4,)


@pytest.mark.parametrize("packing", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["packed", "not packed"])
def test_both_backends_have_the_same_curve(prepare, tmp_path, packing):
    keys = {"eval_steps": 1, "max_steps": 2}
    curves = [
        train(
            prepare(
                tmp_path / backend,
                data=EVAL | {"packing": packing},
                lora={"dropout": 0.0},
                train={"backend": backend, **keys},
            )
        ).evaluations
        for backend in BACKENDS
    ]
    assert_alike(*curves)
    assert [one.step for one in curves[0]] == [1, 2]


def assert_alike(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert (one.step, one.loss_tokens) == (other.step, other.loss_tokens)
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.token_accuracy == pytest.approx(other.token_accuracy, abs=1e-6)


@pytest.mark.slow
def test_both_backends_have_the_same_loss_on_rows_with_images(prepare, seeing_checkpoint, tmp_path):
    """Several sizes of images, held out of a folder; the last batch is filled up with padding.

    One has the adapters that the other ended with: AdamW's first update takes gradients of rounding's size for full.
    """
    for number in range(16):
        file = tmp_path / "images" / ("red" if number % 2 else "blue") / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(image_bytes(12 + 12 * (number % 3), 12, seed=number))
    folder = str(tmp_path / "images")
    data = {"train": folder, "eval": folder, "held_out": 0.4, "format": "image-folder", "prompt": "Which colour?"}
    keys = {
        "checkpoint": str(seeing_checkpoint),
        "data": data | {"image_tokens": 70, "max_length": 96, "packing": False},
        "lora": {"dropout": 0.0},
    }
    often = {"eval_steps": 1, "max_steps": 1, "global_batch_size": 4}
    quick, still = ({"warmup_steps": 0, "learning_rate": rate} for rate in (1e-2, 1e-9))
    run = prepare(tmp_path / "trl", **keys, optimizer=quick, train=often | {"backend": "trl"})
    theirs = train(run).evaluations
    record = read_record(run, DataRecord).eval_rows
    assert record.packed_rows % 4 and "images.jsonl" in record.files
    start = {"init_adapter": str(run.checkpoints / "1")}
    ours = train(prepare(tmp_path / "tunix", **keys, optimizer=still, train=often | start)).evaluations
    assert_alike(ours, theirs)


def test_evaluations_need_held_out_rows(small_recipe):
    with pytest.raises(RecipeError, match=r"^train\.eval_steps: 10 was given, and data\.eval names no held-out rows"):
        small_recipe(train={"eval_steps": 10})


def test_held_out_rows_that_do_not_fit_are_counted_and_none_at_all_is_an_error(prepared_run, tmp_path):
    rows = tmp_path / "eval.jsonl"
    rows.write_text('{"prompt": "a", "response": "b"}\n{"prompt": "a", "response": "%s"}\n' % ("b " * 600))
    run = prepared_run(data={"eval": str(rows)}, train={"eval_steps": 2})
    record = read_record(run, DataRecord)
    assert record.eval_rows.rows == 1 and record.eval_rows.dropped == {"too_long": 1}
    assert any("leave out: 1 of 2" in warning for warning in record.warnings)
    rows.write_text('{"prompt": "a", "response": "%s"}\n' % ("b " * 600))
    with pytest.raises(DataError, match=r"^data\.eval: each of its 1 rows has more than data\.max_length = 256"):
        prepared_run(data={"eval": str(rows)}, train={"eval_steps": 2})


def test_other_held_out_rows_are_not_gone_on_with(prepared_run, tmp_path, monkeypatch):
    rows = tmp_path / "eval.jsonl"
    rows.write_text('{"prompt": "a", "response": "b"}\n')
    keys = {"data": {"eval": str(rows)}, "train": {"eval_steps": 2, "backend": "trl"}}
    run = prepared_run(**keys)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TrainSession, "plan", stops_before(4))
        train(run)
    rows.write_text('{"prompt": "a", "response": "c"}\n')
    with pytest.raises(RunError, match=r"was evaluated on other rows of data\.eval"):
        train(prepared_run(**keys))


def test_the_data_stage_reads_data_eval_where_it_is_packed(small_recipe, tmp_path, prepared_run):
    plain, evaluates = small_recipe(data=EVAL), small_recipe(data=EVAL, train={"eval_steps": 2})
    assert "data.eval.rows" not in stage_keys(plain, "data") and "data.eval.rows" in stage_keys(evaluates, "data")
    run = prepared_run(data=EVAL, train={"eval_steps": 2})
    assert is_up_to_date(run, "data")
    other = {"eval": EVAL["eval"] | {"rows": 6}}
    assert not is_up_to_date(Run(path=run.path, recipe=small_recipe(data=other, train={"eval_steps": 2})), "data")
