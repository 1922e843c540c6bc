"""What the model answers to held-out prompts while it trains: transformers' greedy answers, and no step sees them."""

import signal
import struct
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import peft
import pytest
import torch
import transformers
from tensorboardX.proto.event_pb2 import Event

from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.checkpoints.peft import WEIGHTS
from gemsmith.data.batches import EVAL_ROWS, open_rows
from gemsmith.data.images import decode_batches
from gemsmith.data.packing import ARRAYS, Rows
from gemsmith.errors import RecipeError, Terminated
from gemsmith.export.stage import export
from gemsmith.images.patches import read_patching
from gemsmith.report.page import report
from gemsmith.runs.run import Run
from gemsmith.system.characters import escape_control_chars, one_line
from gemsmith.train import inputs
from gemsmith.train.inputs import SamplePrompts, load_samples
from gemsmith.train.logging import Display
from gemsmith.train.loop import TrainSession
from gemsmith.train.stage import train
from gemsmith.train.torch.images import pad_images
from support.images import image_bytes

pytestmark = pytest.mark.filterwarnings("ignore")  # upstream's, at import

EVAL = {"eval": {"task": "verilog", "rows": 5, "split": "held-out"}}
BACKENDS = ("tunix", "trl")
STOPS = [1, 50, 106]
"""<eos>, <|tool_response> and <turn|>."""


def numbers(record):
    """All that is said of evaluations but their seconds."""
    return [evaluation.model_dump(exclude={"s"}) for evaluation in record.evaluations]


@pytest.fixture(scope="module", params=BACKENDS)
def sampled(request, prepare, tmp_path_factory):
    """A run of six steps with dropout that answered three prompts after the fourth and the last, and its record."""
    keys = {"backend": request.param, "eval_steps": 4, "sample_answers": 3}
    run = prepare(tmp_path_factory.mktemp("sampled") / "run", data=EVAL, train=keys)
    return run, train(run)


def test_answers_are_the_greedy_ones_of_transformers(sampled):
    run, record = sampled
    export(run)
    base = transformers.AutoModelForCausalLM.from_pretrained(run.recipe.checkpoint, dtype=torch.float32)
    model, rows = peft.PeftModel.from_pretrained(base, run.adapter).eval(), open_rows(run, EVAL_ROWS)
    tokenizer = load_samples(run, open_checkpoint(run.recipe.checkpoint), parts=1, most=9).tokenizer
    documents = [(row, place) for row in range(len(rows)) for place in rows.documents(row)]
    assert len(documents) == 5
    expected = []
    for row, place in (documents[number] for number in (0, 2, 4)):
        tokens, begin = torch.tensor(rows.tokens[row][place]).long(), int(rows.loss_mask[row][place].argmax())
        how = {"do_sample": False, "max_new_tokens": 64, "eos_token_id": STOPS, "pad_token_id": 0}
        found = model.generate(input_ids=tokens[None, :begin], **how)[0, begin:]
        ended, right = found[-1] in STOPS, tokens[begin:-1]  # a line feed ends the row
        text = tokenizer.decode(found.tolist()[: -1 if ended else None], skip_special_tokens=False)
        of_row = tokenizer.decode(right[: -1 if len(right) <= 64 else 64].tolist(), skip_special_tokens=False)
        expected.append(
            {
                "prompt": tokenizer.decode(tokens[:begin].tolist(), skip_special_tokens=False),
                "expected": of_row if len(right) <= 64 else f"{of_row}…",
                "answer": text if ended else f"{text}…",
            }
        )
    assert [answer.model_dump() for answer in record.evaluations[-1].answers] == expected
    assert all(len(evaluation.answers) == 3 for evaluation in record.evaluations)
    assert record.evaluations[0].answers != record.evaluations[1].answers


def test_the_steps_are_those_of_a_run_without_answers(sampled, prepared_run, same_numbers):
    run, record = sampled
    other = prepared_run(data=EVAL, train={"backend": run.recipe.train.backend, "eval_steps": 4})
    without = train(other)
    assert same_numbers(record, without)
    for one, another in zip(numbers(record), numbers(without), strict=True):
        assert one.pop("answers") and another.pop("answers") == () and one == another
    export(run), export(other)
    assert (run.adapter / WEIGHTS).read_bytes() == (other.adapter / WEIGHTS).read_bytes()


def read_events_file(file):
    data, place = file.read_bytes(), 0
    while place < len(data):
        (size,) = struct.unpack_from("<Q", data, place)
        yield Event.FromString(data[place + 12 : place + 12 + size])
        place += 16 + size


def test_answers_are_told_and_shown(sampled, capsys):
    run, record = sampled
    answers = record.evaluations[-1].answers
    Display(steps=6, done=0, compare=lambda _: None).add_evaluation(record.evaluations[-1])
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 + 3 * len(answers) and told[0].startswith("train  eval at step 6 of 6: loss ")
    for number, answer in enumerate(answers):
        asked, answered, expected = told[1 + 3 * number : 4 + 3 * number]
        assert asked.startswith("train    asked     …") and asked[-20:] in answer.prompt and "<turn|>" not in asked
        assert expected == f"train    expected  {one_line(answer.expected)[:100]}"
        assert answered == f"train    answered  {escape_control_chars(one_line(answer.answer)[:100])}"
    texts = {}
    for file in sorted(run.tensorboard.iterdir()):
        for event in read_events_file(file):
            for value in event.summary.value:
                if value.tag.startswith("eval/answer_"):
                    texts[event.step, value.tag] = value.tensor.string_val[0].decode()
    assert texts.keys() == {(step, f"eval/answer_{n}/text_summary") for step in (4, 6) for n in (1, 2, 3)}
    last = texts[6, "eval/answer_2/text_summary"]
    assert all(f"    {line}" in last for line in answers[1].prompt.splitlines())
    page = report(run).read_text()
    assert "What the model answered to 3 held-out prompts while it trained" in page
    assert page.count("<h4>step 4</h4>") == page.count("<h4>step 6</h4>") == 3


def stops_in_the_answers(monkeypatch, *, tells):
    """Lets an attempt be told to stop, or end as by a second Ctrl-C, once the second token is asked for."""
    answer = SamplePrompts.answer

    def stopping(self, number, next_tokens):
        asked = []

        def counted(*given):
            asked.append(given)
            if len(asked) == 2:
                tells()
            return next_tokens(*given)

        return answer(self, number, counted)

    monkeypatch.setattr(SamplePrompts, "answer", stopping)


@pytest.mark.slow
def test_a_run_that_is_stopped_in_an_answer_has_the_same_ones_once_it_goes_on(
    sampled, prepared_run, monkeypatch, read_steps, same_numbers
):
    """By SIGTERM, which leaves off at the next token, and by a second Ctrl-C."""
    whole, record = sampled
    keys = {"backend": whole.recipe.train.backend, "eval_steps": 4, "sample_answers": 3, "save_steps": 3}
    run = prepared_run(data=EVAL, train=keys)
    with monkeypatch.context() as patch, pytest.raises(Terminated, match="step 4 is saved"):
        stops_in_the_answers(patch, tells=lambda: signal.raise_signal(signal.SIGTERM))
        train(run)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stops_in_the_answers(patch, tells=interrupted)
        train(run)
    again = train(run)
    assert numbers(again) == numbers(record) and same_numbers(again, record)
    assert again.resumed_at == (4,) and [step.step for step in read_steps(run)] == [1, 2, 3, 4, 5, 6]
    export(run), export(whole)
    assert (run.adapter / WEIGHTS).read_bytes() == (whole.adapter / WEIGHTS).read_bytes()


def interrupted():
    raise KeyboardInterrupt


@pytest.mark.slow
def test_how_many_answers_may_change_on_the_way(sampled, prepared_run, monkeypatch, same_numbers):
    whole, record = sampled
    keys = {"backend": whole.recipe.train.backend, "eval_steps": 4}
    run = prepared_run(data=EVAL, train=keys)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        plan = TrainSession.plan
        patch.setattr(TrainSession, "plan", lambda self, step: interrupted() if step == 6 else plan(self, step))
        train(run)
    again = train(prepared_run(data=EVAL, train=keys | {"sample_answers": 3}))
    assert [len(evaluation.answers) for evaluation in again.evaluations] == [0, 3]
    assert again.evaluations[-1].answers == record.evaluations[-1].answers and same_numbers(again, record)


def test_answers_need_evaluations(small_recipe):
    with pytest.raises(RecipeError, match=r"^train\.sample_answers: 3 was given, and train\.eval_steps null"):
        small_recipe(data=EVAL, train={"sample_answers": 3})
    with pytest.raises(RecipeError, match=r"train\.sample_answers: 17 was given, .*16"):
        small_recipe(data=EVAL, train={"sample_answers": 17, "eval_steps": 1})


def packed(*rows):
    """Rows of documents, each a prompt and an answer of tokens; 9 is an image's soft token."""
    arrays = {name: np.zeros((len(rows), 16), kind) for name, kind in ARRAYS.items()}
    for row, documents in enumerate(rows):
        begin = 0
        for segment, (prompt, answer) in enumerate(documents, start=1):
            end = begin + len(prompt) + len(answer)
            arrays["tokens"][row, begin:end] = [*prompt, *answer]
            arrays["segments"][row, begin:end] = segment
            arrays["positions"][row, begin:end] = range(end - begin)
            arrays["loss_mask"][row, begin + len(prompt) : end] = 1
            begin = end
    return Rows(**arrays)


@pytest.fixture
def samples_of(small_recipe, small_checkpoint, tmp_path, monkeypatch):
    """Returns the prompts that are taken of rows: `samples_of(packed(…), 3, parts=2, most=1)`."""

    def make(rows, wanted, **how):
        recipe = small_recipe(data=EVAL, train={"eval_steps": 1, "sample_answers": wanted})
        monkeypatch.setattr(inputs, "open_rows", lambda *_: rows)
        checkpoint = SimpleNamespace(folder=small_checkpoint, config={"image_token_id": 9})
        return load_samples(Run(path=tmp_path, recipe=recipe), checkpoint, **how)

    return make


def test_prompts_are_spread_over_documents_and_padded_once(samples_of):
    documents = [([2, 100 + number], [200 + number, 106]) for number in range(7)]
    rows = packed(documents[:3], documents[3:4], documents[4:])
    for wanted, numbers_ in ((1, [3]), (2, [1, 5]), (3, [1, 3, 5]), (9, [*range(7)])):
        samples = samples_of(rows, wanted, parts=2, most=2, multiple=128)
        assert samples.batches.rows.tokens[:, :3].tolist() == [[2, 100 + number, 0] for number in numbers_]
        assert [ids.tolist() for ids in samples.expected] == [[200 + number, 106] for number in numbers_]
        assert samples.batches.rows.tokens.shape[1] == 128 and set(samples.lengths) == {2}
        size, steps = {1: (2, 1), 2: (2, 1), 3: (4, 1), 9: (4, 2)}[wanted]
        assert (samples.batches.global_batch_size, samples.batches.steps) == (size, steps)


def test_a_prompt_ends_before_the_first_answer_and_has_its_own_images_alone(samples_of):
    first, second = ([2, 9, 9, 3], [4, 9, 106]), ([9, 5], [6])
    rows = packed([first, second])
    rows.loss_mask[0, 5] = 0  # what stands between two answers
    names = [SimpleNamespace(soft_tokens=count, name=name) for count, name in ((2, "a"), (1, "b"), (1, "c"))]
    samples = samples_of(replace(rows, images=(tuple(names),)), 2, parts=1, most=1)
    assert [[image.name for image in images] for images in samples.batches.rows.images] == [["a"], ["c"]]
    assert [ids.tolist() for ids in samples.expected] == [[4], [6]]


def test_an_answer_ends_where_the_model_or_its_row_does(samples_of):
    samples = samples_of(packed([([2, 7], [8, 106]), ([2, 7, 7, 7], [8, 106])]), 2, parts=1, most=2)
    samples = replace(samples, batches=replace(samples.batches, rows=inputs.prompt_rows([[2, 7], [2, 7, 7, 7]], 8)))
    seen = []

    def next_tokens(_, tokens, mask):
        seen.append([int(row.argmax()) for row in mask])
        return np.array([106 if len(seen) == 3 else 300, 301])

    one, other = samples.answer([(1,)], next_tokens)
    assert seen == [[1, 3], [2, 4], [3, 5], [4, 6]]  # the first has ended by the fourth
    assert one.answer == samples.tokenizer.decode([300, 300])
    assert other.answer == samples.tokenizer.decode([301] * 4) + "…"
    assert samples.answer([(1,)], lambda *_: None) is None


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_to_images_are_the_greedy_ones_of_transformers(prepare, seeing_checkpoint, tmp_path, backend):
    """Of several sizes; an answer ends where a row of data.max_length does."""
    for number in range(16):
        file = tmp_path / "images" / ("red" if number % 2 else "blue") / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(image_bytes(12 + 12 * (number % 3), 12, seed=number))
    folder = str(tmp_path / "images")
    data = {"train": folder, "eval": folder, "held_out": 0.4, "format": "image-folder", "prompt": "Which colour?"}
    run = prepare(
        tmp_path / backend,
        checkpoint=str(seeing_checkpoint),
        data=data | {"image_tokens": 70, "max_length": 96},
        train={"backend": backend, "eval_steps": 1, "max_steps": 2, "sample_answers": 3},
        optimizer={"warmup_steps": 0},
    )
    answers = train(run).evaluations[-1].answers
    export(run)
    base = transformers.AutoModelForCausalLM.from_pretrained(seeing_checkpoint, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, run.adapter).eval()
    checkpoint = open_checkpoint(str(seeing_checkpoint))
    samples = load_samples(run, checkpoint, parts=1, most=1)
    patching = read_patching(checkpoint.config, 70)
    assert len(answers) == samples.batches.steps == 3
    for answer, (batch, images), length in zip(
        answers, decode_batches(samples.batches, range(1, 4), patching, processes=1), samples.lengths, strict=True
    ):
        tokens = torch.tensor(batch.tokens[:, :length]).long()
        assert (tokens == samples.image_token).sum() == images[0][0].soft_tokens > 1 and len(images[0]) == 1
        room = min(64, run.recipe.data.max_length - length)
        how = {"do_sample": False, "max_new_tokens": room, "eos_token_id": STOPS, "pad_token_id": 0}
        types = (tokens == samples.image_token).long()
        found = model.generate(input_ids=tokens, mm_token_type_ids=types, **pad_images(images), **how)[0, length:]
        ended = found[-1] in STOPS
        text = samples.tokenizer.decode(found.tolist()[: -1 if ended else None], skip_special_tokens=False)
        assert answer.answer == (text if ended else f"{text}…")
        assert answer.prompt.count("<|image|>") == 1 and answer.expected in ("red", "blue")
