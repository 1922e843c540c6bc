import json
import shutil
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import yaml
from huggingface_hub.errors import LocalEntryNotFoundError

from gemsmith.arch import find_variant
from gemsmith.importers import draft
from gemsmith.recipe.load import load_recipe
from gemsmith.runs.resolve import resolve_file
from gemsmith.runs.run import open_source
from gemsmith.system.locks import locked
from support.images import image_bytes


@pytest.fixture(autouse=True)
def rendered_here(monkeypatch, tmp_path):
    """A process for it takes a second to start."""
    from gemsmith.data.tokenize import open_renderer, render_documents

    def render(folder, template, documents, _processes, *, on_bad):
        return render_documents(open_renderer(folder, template), [*documents], on_bad=on_bad)

    monkeypatch.setattr(draft, "render_in_processes", render)
    monkeypatch.chdir(tmp_path)


def write_rows(rows, name="rows.jsonl"):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def pairs(count, answer="answer {}"):
    return [{"question": f"What is {n}?", "answer": answer.format(n), "id": n} for n in range(count)]


def drafted(gemsmith, checkpoint, *more, data="rows.jsonl"):
    code, _, err = gemsmith("init", "--checkpoint", checkpoint, "--data", data, *more)
    assert code == 0, err
    assert Path("my.yaml").exists() and "my.yaml written; next: gemsmith plan my.yaml" in err
    return load_recipe("my.yaml"), Path("my.yaml").read_text(), err


def test_every_value_has_its_reason_and_only_chosen_keys_are_written(gemsmith, small_checkpoint):
    write_rows(pairs(120))
    recipe, text, err = drafted(gemsmith, small_checkpoint)
    values = [line for line in text.splitlines() if not line.startswith("#") and not line.endswith(":")]
    assert len(values) > 12 and all("  # " in line for line in values)
    assert (recipe.data.format, recipe.data.eval, recipe.data.max_length) == ("question-answer", "10%", 512)
    assert 'train: "rows.jsonl"  # 120 rows; tokens (by the checkpoint\'s tokenizer): p50' in text
    assert recipe.eval.scorer == "exact" and "the columns id (120 rows) are ignored" in err
    assert "optimizations" not in text and "port" not in text


def test_a_recipe_that_trains_all_weights_has_their_rate_and_no_key_of_adapters(gemsmith, small_checkpoint):
    write_rows(pairs(120))
    recipe, text, _ = drafted(gemsmith, small_checkpoint, "--set", "train.method=full")
    assert recipe.train.method == "full" and recipe.optimizer.learning_rate == 1e-5
    assert "lora" not in recipe.model_fields_set, text


def test_the_file_is_planned_and_read_by_the_data_stage_unedited(gemsmith, small_checkpoint, monkeypatch):
    from gemsmith.data import stage

    write_rows(pairs(120))
    drafted(gemsmith, small_checkpoint)
    code, out, _ = gemsmith("plan", "my.yaml")
    assert code == 0 and "v5p-8" in out
    monkeypatch.setattr(stage, "render_in_processes", draft.render_in_processes)
    run = open_source(Path("my.yaml"), None, (), force=(), lock=lambda folder: locked(folder).__enter__())
    record = stage.prepare_data(run)
    assert record.dropped == {"held_out": 120 - record.rows} and record.rows < 120
    assert record.packed_rows >= run.recipe.train.global_batch_size and record.steps >= 1


def test_columns_of_other_names_are_written_with_a_word_to_look(gemsmith, small_checkpoint):
    write_rows([{"instruction": f"What is {n}?", "context": "", "response": f"it is {n}"} for n in range(120)])
    recipe, _, err = drafted(gemsmith, small_checkpoint)
    assert (recipe.data.format, recipe.data.columns) == ("alpaca", {"input": "context", "output": "response"})
    assert "data.columns: reads 'context' as input, 'response' as output, by their names alone" in err


def test_rows_of_a_classifier_and_of_json_are_scored_as_such(gemsmith, small_checkpoint):
    for answer, scorer in (("yes", "labels"), ('{{"n": {}}}', "json-fields"), ("it is {}", "exact")):
        write_rows(pairs(100, answer))
        Path("my.yaml").unlink(missing_ok=True)
        assert drafted(gemsmith, small_checkpoint)[0].eval.scorer == scorer


def test_few_rows_make_small_steps_and_none_is_held_out(gemsmith, small_checkpoint):
    write_rows(pairs(4))
    recipe, text, err = drafted(gemsmith, small_checkpoint)
    assert recipe.data.eval is None and "name others with --eval" in err
    assert (recipe.train.global_batch_size, recipe.train.epochs) == (1, 3)
    assert "less than the default" in text


def test_a_long_row_among_many_does_not_set_the_length_and_is_said(gemsmith, small_checkpoint, monkeypatch):
    monkeypatch.setattr(draft, "_LONG", 512)
    write_rows([*pairs(199), {"question": "Long?", "answer": "ab " * 900}])
    recipe, text, _ = drafted(gemsmith, small_checkpoint)
    assert recipe.data.max_length == 512
    assert "0.5% of the rows, up to " in text


def test_rows_over_half_a_block_get_a_length_that_packs_them_well():
    rows = draft.Measured([], np.full(60, 294), longest=294, answer=9, image_tokens=280)
    variant = find_variant("gemma4-e2b")
    chosen = draft._choose_length(variant, rows, packing=True)
    assert chosen.value == 1024 and "512 would be 57% full, this is 86%" in chosen.reason
    assert draft._choose_length(variant, rows, packing=False).value == 512


def test_values_that_are_set_stay_and_given_rows_are_counted(gemsmith, small_checkpoint):
    write_rows(pairs(120))
    write_rows(pairs(7), "held.jsonl")
    given = ("--eval", "held.jsonl", "--set", "data.max_length=256", "--set", "train.epochs=7")
    recipe, text, _ = drafted(gemsmith, small_checkpoint, *given)
    assert (recipe.data.eval, recipe.data.max_length, recipe.train.epochs) == (
        str(Path("held.jsonl").absolute()),
        256,
        7,
    )
    assert 'eval: "held.jsonl"  # 7 rows' in text
    assert yaml.safe_load(text)["data"]["max_length"] == 256


def test_rows_that_call_tools_are_scored_by_their_calls(gemsmith, small_checkpoint):
    template = Path(pytest.importorskip("trl").__file__).parent / "chat_templates" / "gemma4_v5.jinja"
    call = {"type": "function", "function": {"name": "add", "arguments": {"to": 1}}}
    tools = [{"name": "add", "parameters": {"type": "object", "properties": {}}}]
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    asked = ({"role": "user", "content": f"add {number}"} for number in range(120))
    write_rows([{"messages": [turn, called], "tools": tools} for turn in asked])
    _, text, _ = drafted(gemsmith, small_checkpoint, "--set", f"data.template={template}")
    assert yaml.safe_load(text)["eval"]["scorer"] == "exact" and "a call as the model writes it" in text


def test_a_folder_of_images_gets_the_least_budget_that_shrinks_none(gemsmith, seeing_checkpoint):
    for number, name in enumerate(("cat", "dog")):
        for image in range(3):
            file = Path("pets", name, f"{image}.png")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(image_bytes(96, 96, seed=10 * number + image))
    recipe, text, _ = drafted(
        gemsmith, seeing_checkpoint, "--set", "data.prompt=Which breed is it? {labels}", data="pets"
    )
    assert recipe.data.prompt == "Which breed is it? {labels}"
    assert (recipe.data.format, recipe.data.image_tokens) == ("image-folder", 70)
    assert recipe.eval.scorer == "labels" and recipe.bench.images
    assert "6 rows with 6 images" in text
    assert resolve_file(Path("my.yaml"))[0].data.held_out == 0.1


def test_an_image_for_a_checkpoint_of_text_is_an_error(gemsmith, small_checkpoint):
    Path("a.png").write_bytes(image_bytes(96, 96))
    write_rows([{"image": "a.png", "prompt": "What?", "response": "a"}])
    code, _, err = gemsmith("init", "--checkpoint", small_checkpoint, "--data", "rows.jsonl")
    assert code == 2 and "rows.jsonl line 1: has an image, and checkpoint" in err
    assert not Path("my.yaml").exists()


@pytest.fixture
def hub(monkeypatch):
    """Stands in for the hub: gives a folder, or is not reached; returns the patterns that were asked for."""
    asked = []

    def serve(folder):
        def download(_hub_id, *, allow_patterns):
            asked.extend(allow_patterns)
            if folder is None:
                raise LocalEntryNotFoundError("no network")
            return str(folder)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        return asked

    return serve


def test_a_hub_id_that_is_not_reached_is_told_by_its_name_and_lengths_are_estimated(gemsmith, hub):
    hub(None)
    write_rows(pairs(120))
    recipe, text, err = drafted(gemsmith, "google/gemma-4-E2B-it")
    assert recipe.model is None and "gemma4-e2b, told by its hub id" in text
    assert "estimated at 3.5 bytes each" in text and "lengths are estimated, since no tokenizer is here" in err
    assert resolve_file(Path("my.yaml"))[0].model == "gemma4-e2b"
    code, _, err = gemsmith("init", "--checkpoint", "me/unknown", "--data", "rows.jsonl", "--out", "other.yaml")
    assert code == 2 and "me/unknown: is no folder here and could not be downloaded" in err


def test_of_a_checkpoint_on_the_hub_no_weights_are_fetched(gemsmith, hub, tmp_path, tiny_checkpoint):
    ignore = shutil.ignore_patterns("*.safetensors", "*.index.json")
    asked = hub(shutil.copytree(tiny_checkpoint("tiny-e2b"), tmp_path / "fetched", ignore=ignore))
    write_rows(pairs(120))
    recipe, text, _ = drafted(gemsmith, "me/tuned")
    assert recipe.model == "tiny-e2b" and "by the checkpoint's tokenizer" in text
    assert "tokenizer.json" in asked or "*.json" in asked
    assert not [pattern for pattern in asked if "safetensors" in pattern]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--checkpoint", "nowhere"), "checkpoint 'nowhere': is not a folder, a Hugging Face hub id"),
        (("--checkpoint", "."), "has no config.json"),
        (("--data", "none.jsonl"), "none.jsonl: does not exist"),
        (("--data", "bad.jsonl"), "bad.jsonl line 1, column 2: is not JSON"),
        (("--eval", "none.jsonl"), "none.jsonl: does not exist"),
        (("--eval", "rows.jsonl"), "--eval rows.jsonl: is --data itself, on which a score says nothing"),
        (("--set", "lora.rnak=3"), "did you mean rank"),
        (("--set", "data.max_length=4"), "each row has more tokens than data.max_length, 4; raise it"),
        (("--out", "rows.jsonl"), "--out rows.jsonl: already exists; name another file, or delete it"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_nothing_is_written(gemsmith, small_checkpoint, arguments, said):
    write_rows(pairs(3))
    Path("bad.jsonl").write_text("{\n")
    before = sorted(Path().iterdir())
    given = {"--checkpoint": str(small_checkpoint), "--data": "rows.jsonl"}
    given |= dict([arguments])
    code, _, err = gemsmith("init", *(word for pair in given.items() for word in pair))
    assert code == 2 and said in err and err.count("\n") == 1
    assert sorted(Path().iterdir()) == before
