import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemsmith.errors import RunError
from gemsmith.runs.records import Check, ExportRecord, ServeRecord, VerifyRecord
from gemsmith.runs.run import Run, make_provenance, open_source, read_record, start_clock, write_record
from gemsmith.runs.stages import STAGES
from gemsmith.serve import stage as verified
from gemsmith.serve.stage import Servers, find_verification_issue, serve

GOLDEN = Path(__file__).parents[1] / "bench" / "golden" / "vllm_bench_serve_0.32.json"
WEIGHTS = "model-00001-of-00002.safetensors"
SECTIONS = {
    "data": {"max_length": 64},
    "bench": {"input_tokens": [16], "output_tokens": 16, "request_rates": [2], "prompts": 12},
    "eval": {"scorer": "verilog-exact", "max_tokens": 64},
}


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def flip_weights(run: Run) -> None:
    flip(run.merged / WEIGHTS)


def change_verify(run: Run, **fields: Any) -> None:
    record: VerifyRecord = read_record(run, VerifyRecord)
    write_record(run, record.model_copy(update=fields))


def fail(run: Run) -> None:
    checks = (
        Check(name="logits", passed=None, detail="not done"),
        Check(name="files", passed=False, detail="merged/[x] was changed since"),
    )
    change_verify(run, passed=False, checks=checks)


def make_folder(run: Run) -> None:
    run.record_file("verify").unlink()
    run.record_file("verify").mkdir()


def export_again(run: Run) -> None:
    write_record(
        run,
        read_record(run, ExportRecord).model_copy(
            update={"provenance": make_provenance(run, "export", start_clock()), "step": 2}
        ),
    )


DAMAGES: dict[str, tuple[Callable[[Run], object], str, str]] = {
    "no record": (lambda run: run.record_file("verify").unlink(), "they were never verified", "gemsmith verify {run}"),
    "half a record": (
        lambda run: run.record_file("verify").write_text('{"pas'),
        "verify.json is unreadable",
        "gemsmith verify {run}",
    ),
    "a folder as record": (make_folder, "verify.json is unreadable", "gemsmith verify {run}"),
    "exported since": (export_again, "they were exported again after they were verified", "gemsmith verify {run}"),
    "failed": (
        fail,
        "verify failed: files: merged/[x] was changed since",
        "gemsmith export {run} --force && gemsmith verify {run}",
    ),
    "a byte flipped": (
        flip_weights,
        f"they are not what was verified: merged/{WEIGHTS} was changed since",
        "gemsmith export {run} --force && gemsmith verify {run}",
    ),
    "a config changed": (
        lambda run: (run.merged / "config.json").write_text("{}"),
        "they are not what was verified: merged/config.json was changed since",
        "gemsmith export {run} --force && gemsmith verify {run}",
    ),
    "a file added": (
        lambda run: (run.merged / "more.safetensors").touch(),
        "they are not what was verified: merged/more.safetensors was not exported",
        "gemsmith export {run} --force && gemsmith verify {run}",
    ),
}


@pytest.mark.parametrize(("damage", "reason", "remedy"), DAMAGES.values(), ids=DAMAGES.keys())
def test_weights_that_are_not_verified_are_refused_before_vllm_starts(
    damage: Callable[[Run], object],
    reason: str,
    remedy: str,
    fake_vllm: Callable[..., Path],
    exported_run: Callable[..., Run],
) -> None:
    fake_vllm()
    run = exported_run()
    damage(run)
    with Servers(run) as servers, pytest.raises(RunError) as caught:
        servers.tuned()
    command = remedy.format(run=run.path)
    assert (
        f"{run.merged}: weights not served: {reason}; run: {command}; to serve them anyway, add "
        "--skip-verify-check" in str(caught.value)
    )
    assert len(str(caught.value).splitlines()) == 1 and not list(run.logs.iterdir())


@pytest.mark.parametrize(("damage", "reason", "remedy"), DAMAGES.values(), ids=DAMAGES.keys())
def test_insisting_serves_them_and_is_recorded(
    damage: Callable[[Run], object],
    reason: str,
    remedy: str,
    fake_vllm: Callable[..., Path],
    exported_run: Callable[..., Run],
) -> None:
    fake_vllm()
    run = exported_run()
    damage(run)
    if reason.endswith("config.json was changed since"):
        (run.merged / "config.json").write_text(json.dumps({"architectures": ["Gemma4ForCausalLM"]}))
    with Servers(run, skip_verify_check=True) as servers:
        serve(run, servers)
    assert read_record(run, ServeRecord).warnings == (f"Served unverified weights: {reason}.",)


def change_base(run: Run) -> None:
    record = read_record(run, ExportRecord).model_copy(update={"base_sha256": "0" * 64})
    write_record(run, record)
    change_verify(run, provenance=make_provenance(run, "verify", start_clock()))


ADAPTER_DAMAGES: dict[str, tuple[Callable[[Run], object], str]] = {
    "no record": (lambda run: run.record_file("verify").unlink(), "they were never verified"),
    "a byte flipped": (
        lambda run: flip(run.adapter / "adapter_model.safetensors"),
        "they are not what was verified: adapter/adapter_model.safetensors was changed since",
    ),
    "another base": (change_base, "they are not what was verified: "),
}


@pytest.mark.parametrize(("damage", "reason"), ADAPTER_DAMAGES.values(), ids=ADAPTER_DAMAGES.keys())
def test_an_adapter_that_is_not_verified_is_refused_too(
    damage: Callable[[Run], object],
    reason: str,
    fake_vllm: Callable[..., Path],
    adapted_run: Callable[..., Run],
) -> None:
    fake_vllm(effect=1)
    run = adapted_run()
    assert find_verification_issue(run, adapter=True) is None
    damage(run)
    with Servers(run) as servers, pytest.raises(RunError) as caught:
        servers.tuned()
    assert f"{run.adapter}: weights not served: {reason}" in str(caught.value)
    assert not (run.logs / "vllm.log").exists()


def test_merged_weights_that_changed_do_not_stop_an_adapter(
    fake_vllm: Callable[..., Path], adapted_run: Callable[..., Run]
) -> None:
    fake_vllm(effect=1)
    run = adapted_run()
    flip_weights(run)
    with Servers(run) as servers:
        assert serve(run, servers).warnings == ()


def test_verified_weights_are_served_without_a_word_also_when_insisted(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]
) -> None:
    fake_vllm()
    run = exported_run()
    assert find_verification_issue(run) is None, "a check that could not be done is no failure"
    with Servers(run, skip_verify_check=True) as servers:
        assert serve(run, servers).warnings == ()


def test_files_are_read_once_a_start(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm()
    read: list[Path] = []
    compare = verified.changed_files
    monkeypatch.setattr(verified, "changed_files", lambda folder, files: read.append(folder) or compare(folder, files))
    run = exported_run()
    with Servers(run) as servers:
        servers.tuned()
        servers.tuned()
        servers.base()
        servers.tuned()
    assert read == [run.merged] * 2


def test_reading_much_is_announced(
    exported_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = exported_run()
    assert find_verification_issue(run) is None and capsys.readouterr().err == ""
    monkeypatch.setattr(verified, "_SAID_FROM_BYTES", 1)
    assert find_verification_issue(run) is None
    assert f"files of {run.merged} with export.json" in capsys.readouterr().err


@pytest.fixture
def flipped_run(exported_run: Callable[..., Run], fake_vllm: Callable[..., Path]) -> Run:
    """A run that the command line takes for complete up to verify, with a byte of its weights flipped since."""
    fake_vllm(results=[json.loads(GOLDEN.read_text())])
    run = open_source(exported_run(SECTIONS).path, lock=lambda folder: None)
    for stage in ("export", "verify"):
        write_record(
            run,
            read_record(run, STAGES[stage].record).model_copy(
                update={"provenance": make_provenance(run, stage, start_clock())}
            ),
        )
    flip_weights(run)
    return run


@pytest.mark.parametrize("verb", [["serve"], ["serve", "--json"], ["bench"], ["eval"]], ids=" ".join)
def test_every_command_that_serves_refuses_in_one_line(
    verb: list[str], gemsmith: Callable[..., tuple[int, str, str]], flipped_run: Run
) -> None:
    code, out, err = gemsmith(verb[0], flipped_run.path, *verb[1:])
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    assert err.startswith(
        f"error: {flipped_run.merged}: weights not served: they are not what was verified: merged/{WEIGHTS} was "
        "changed since"
    )
    assert not flipped_run.record_file(verb[0]).exists()


@pytest.mark.parametrize("verb", [["serve", "--json"], ["bench", "--json"], ["eval", "--json"]], ids=" ".join)
def test_every_command_that_serves_can_be_made_to_and_says_so(
    verb: list[str], gemsmith: Callable[..., tuple[int, str, str]], flipped_run: Run
) -> None:
    code, out, err = gemsmith(verb[0], flipped_run.path, "--skip-verify-check", *verb[1:])
    notice = f"Served unverified weights: they are not what was verified: merged/{WEIGHTS} was changed since."
    assert code == 0 and f"{verb[0]}: warning: {notice}" in err
    assert json.loads(out)["warnings"] == list(read_record(flipped_run, STAGES[verb[0]].record).warnings)
    assert notice == json.loads(out)["warnings"][0]
