"""What `gemsmith port` refuses: one line, exit code 2, and no recipe."""

import json
import subprocess
import sys
from pathlib import Path

import yaml

from gemsmith.recipe.load import load_recipe
from support.cases import each

FOLDER = Path(__file__).parent / "settings"
SETTINGS = yaml.safe_load((FOLDER / "small_axolotl.yaml").read_text())

ADAPTER = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 8,
    "target_modules": ["q_proj"],
    "base_model_name_or_path": "google/gemma-4-31B-it",
}


@each(
    ("name", "content", "words"),
    [
        ("a.yaml", "", "is empty"),
        ("a.json", "  \n", "is empty"),
        ("a.yaml", "lora_r: [1, 2", "line 1: is not YAML"),
        ("a.yaml", "a: 1\n\tb: 2", "line 2: is not YAML"),
        ("a.json", '{"r": 8,}', "line 1, column "),  # 9, since Python 3.13 8
        ("a.yaml", "- 1\n- 2", "holds no mapping"),
        ("a.yaml", "just words", "holds no mapping"),
        ("a.yaml", "? [a, b]\n: 1", "line 1: is not YAML (a key must be a word)"),
        ("a.yaml", "a: &x {b: *x}", "line 1: is not YAML"),
        ("a.yaml", "a: !!python/object/apply:os.system [ls]", "line 1: is not YAML"),
        ("a.yaml", "learning_rate: 1e-4\nlearning_rate: 2e-4", "learning_rate is given twice"),
        ("a.json", '{"r": 8, "r": 16}', "r is given twice"),
        ("a.yaml", "color: blue\nsize: 3", "its keys (color, size) are not of"),
        ("a.json", '{"architectures": ["Gemma4"], "hidden_size": 8}', "a model's config.json"),
        ("a.yaml", "checkpoint: x\ndata: {train: y}", "recipe of Gemsmith's already"),
        ("a.yaml", "distributed_type: FSDP\nnum_processes: 8", "--devices"),
        ("a.yaml", "learning_rate: 1e-4\nmax_length: 512", "names no base model"),
        ("training_args.bin", "PK", "is a pickle, which runs code"),
        ("a.json", json.dumps(ADAPTER | {"peft_type": "IA3"}), "peft_type is 'IA3'"),
        ("a.json", json.dumps(ADAPTER | {"r": "many"}), "r is 'many'; it must be a whole number above 0"),
        ("a.json", json.dumps(ADAPTER | {"r": 0}), "it must be a whole number above 0"),
        ("a.json", json.dumps(ADAPTER | {"lora_dropout": 1.5}), "lora.dropout: 1.5 was given"),
        ("a.json", json.dumps(ADAPTER | {"target_modules": "(q_proj"}), "not a regular expression"),
        ("a.json", json.dumps(ADAPTER | {"base_model_name_or_path": "meta/Llama-3"}), "not known as a Gemma 4"),
        ("a.json", json.dumps(ADAPTER | {"base_model_name_or_path": "a/gemma-4-12b-it-bnb-4bit"}),
         "checkpoint=google/gemma-4-12B-it"),
        ("a.yaml", "base_model: google/gemma-4-31B-it\nlearning_rate: .inf", "learning_rate is inf; it must be a "
                                                                             "finite number"),
        ("a.yaml", "base_model: google/gemma-4-31B-it\nlearning_rate: [1]", "it must be a finite number"),
        ("a.yaml", "base_model: google/gemma-4-31B-it\nsample_packing: maybe", "it must be true or false"),
        ("a.yaml", "stage: dpo\nmodel_name_or_path: google/gemma-4-31B-it", "stage is 'dpo'"),
        ("a.yaml", "base_model: google/gemma-4-31B-it\nrl: grpo", "rl is 'grpo'"),
        ("a.yaml", "output_dir: o\nlearning_rate: 1e-6\nbeta: 0.1", "beta is 0.1"),
        ("a.yaml", "output_dir: o\nlearning_rate: 1e-6\nmax_length: 512\ncenter_rewards_coefficient: null",
         "a reward model's"),
        ("a.yaml", "base_model: [google/gemma-4-31B-it]\nadapter: lora", "base_model is ['google/gemma-4-31B-it']; it "
                                                                         "must be one hub id"),
        ("a.json", '{"r": ' + "1" * 5000 + "}", "is not JSON"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_or_ported_is_one_line(tmp_path, capsys, name, content, words, run, text):
    out = tmp_path / "out.yaml"
    assert run(text(tmp_path / name, content), "--out", out, "--allow-differences") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error and error.count("\n") == 1
    assert not out.exists()


def test_files_of_two_runs_are_refused_naming_both(tmp_path, capsys, run, text, settings):
    other = text(tmp_path / "adapter_config.json", json.dumps(ADAPTER | {"r": 16}))
    assert run(settings(tmp_path), other) == 2
    assert "lora.rank: 8 by settings.yaml: lora_r, 16 by adapter_config.json: r" in capsys.readouterr().err


def test_a_difference_stops_the_recipe_unless_it_is_allowed(tmp_path, capsys, run, settings):
    source, out = settings(tmp_path, train_on_inputs=True, optimizer="lion_8bit"), tmp_path / "out.yaml"
    assert run(source, "--out", out) == 2
    captured = capsys.readouterr()
    assert "differently from its source in optimizer, train_on_inputs;" in captured.err.replace("\n", " ")
    assert "train_on_inputs" in captured.out and not out.exists()
    assert run(source, "--out", out, "--allow-differences") == 0
    assert load_recipe(out).train.global_batch_size == 4


def test_the_recipe_goes_to_stdout_and_the_table_to_stderr(tmp_path, capsys, run, settings):
    assert run(settings(tmp_path)) == 0
    captured = capsys.readouterr()
    (tmp_path / "piped.yaml").write_text(captured.out)
    assert load_recipe(tmp_path / "piped.yaml").optimizer.learning_rate == 1e-4
    assert "micro_batch_size" in captured.err and "12 keys of settings.yaml" in captured.err


def test_a_file_that_is_there_is_not_written_over(tmp_path, capsys, run, settings):
    source = settings(tmp_path)
    assert run(source, "--out", source) == 2
    assert "already exists" in capsys.readouterr().err
    assert yaml.safe_load(source.read_text()) == SETTINGS


def test_porting_loads_no_library_of_machine_learning():
    code = "import sys, gemsmith.importers.convert; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded & {"numpy", "jax", "torch", "transformers", "peft", "trl"}
