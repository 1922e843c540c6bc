import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gemsmith.launch.commands import leftover_resources, preflight, resources
from gemsmith.launch.providers import tpu_vm
from gemsmith.launch.upload import LOCKS, WHEEL


def script(request):
    return tpu_vm.render(request)["submit.sh"]


def test_the_queued_resource_has_the_api_s_names_and_the_label(launched):
    text = script(launched("tpu-vm"))
    assert "--accelerator-type v5p-8 --runtime-version v2-alpha-tpuv5 --labels gemsmith-run=big" in text
    assert "--spot" not in text
    assert "--spot" in script(launched("tpu-vm", spot=True))


def test_slices_are_named_by_cores_or_chips(launched):
    assert tpu_vm.accelerator_type(launched("tpu-vm", machine="v6e-8", zone="us-central1-b").machine) == "v6e-8"
    assert tpu_vm.accelerator_type(launched("tpu-vm", machine="v5p-8").machine) == "v5p-8"


def test_clean_removes_the_queued_resource_with_its_node(launch_record):
    record = launch_record.model_copy(update={"target": "tpu-vm", "zone": "us-east5-a"})
    queued, node = resources(record, "created")
    assert "--force" in queued.remove and "--filter=labels.gemsmith-run=big" in node.list


TOOL = """#!{python} -IS
import json, os, signal, sys, time
from pathlib import Path
command = [Path(sys.argv[0]).name, *sys.argv[1:]]
told = json.loads(os.environ["TOLD"])
with open(told["log"], "a") as log:
    log.write(json.dumps(command) + "\\n")
if command[0] == "curl":
    print(told["worker"], end="")
if command[0] == "systemctl":
    print(told["system"])
if command[0] == "docker" and command[1] == "run" and told["shutdown"]:
    os.kill(int(os.environ["SCRIPT"]), signal.SIGTERM)
    os.kill(os.getppid(), signal.SIGTERM)  # timeout, which sends it on
if command[:2] == ["docker", "run"] or command[0] == "gemsmith":
    time.sleep(told["runs_s"])
    sys.exit(told["code"])
if command[0] == "sleep" and command[1] == "60":
    time.sleep(60)
if command[0] == "python3":
    program = Path(command[command.index("--target") + 1], "bin", "uv")
if command[:2] == ["uv", "venv"]:
    program = Path(command[-1], "bin", "gemsmith")
if command[0] == "python3" or command[:2] == ["uv", "venv"]:
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_bytes(Path(sys.argv[0]).read_bytes())
    program.chmod(0o755)
if command[:3] == ["uv", "pip", "install"]:
    sys.exit(told["installs"])
if command[0] == "docker" and command[1] == "rm":
    sys.exit(1)
"""


@pytest.fixture
def boot(launched, tmp_path):
    """Runs the startup script on a stand-in for a TPU VM: `calls, code = boot(worker="0", code=3)`."""
    folder, log = tmp_path / "bin", tmp_path / "log.jsonl"
    folder.mkdir()
    for name in ("gcloud", "docker", "curl", "systemd-run", "systemctl", "python3", "sleep"):
        (folder / name).write_text(TOOL.format(python=sys.executable))
        (folder / name).chmod(0o755)

    def run(
        *,
        worker="0",
        code=0,
        runs_s=0,
        installs=0,
        system="running",
        shutdown=False,
        timeout_hours=1.0,
        overrides=(),
        **options,
    ):
        log.unlink(missing_ok=True)
        request = launched("tpu-vm", timeout_hours=timeout_hours, overrides=overrides, **options)
        (tmp_path / "startup.sh").write_text(tpu_vm.render(request)["startup.sh"])
        told = {"log": str(log), "worker": worker, "code": code, "runs_s": runs_s, "installs": installs}
        told |= {"system": system, "shutdown": shutdown}
        environment = {"PATH": f"{folder}:/usr/bin:/bin", "TOLD": json.dumps(told), "STATE": str(tmp_path / "state")}
        environment["HUGE_PAGES"] = str(tmp_path / "huge_pages")
        done = subprocess.run(
            ["bash", "-c", "SCRIPT=$$ exec bash startup.sh"],
            cwd=tmp_path,
            env=environment,
            check=False,
            timeout=300,
            capture_output=True,
        )
        return [json.loads(line) for line in log.read_text().splitlines()], done.returncode

    return run


def deletions(calls):
    return [call for call in calls if call[0] == "gcloud" and "delete" in call]


@pytest.mark.parametrize("code", [0, 2])
def test_the_node_is_deleted_however_the_stages_end(boot, code):
    calls, ended = boot(code=code)
    assert ended == code
    (run,) = [call for call in calls if call[:2] == ["docker", "run"]]
    assert run[-6:] == ["worker", "gs://runs/team/big", *run[-4:]] and run[-1] == "plan,data,train,export,verify"
    assert deletions(calls)[-1][5] == "big" and "--force" in deletions(calls)[-1]
    assert any(call[:2] == ["gcloud", "storage"] and call[-2].endswith("worker-0.txt") for call in calls)


def test_memory_is_given_in_huge_pages_before_the_stages_begin(boot, tmp_path):
    assert (
        "/sys/kernel/mm/transparent_hugepage/enabled" in (Path(tpu_vm.__file__).parent / "startup.sh.jinja").read_text()
    )
    boot(worker="1")
    assert (tmp_path / "huge_pages").read_text() == "always\n"


def test_another_deletion_is_set_for_when_the_script_is_killed(boot):
    calls, _ = boot()
    (watchdog,) = [call for call in calls if call[0] == "systemd-run"]
    assert watchdog[1].startswith("--on-active=3") and "queued-resources" in watchdog


def test_the_node_stays_where_the_machine_goes_down_and_boots_again(boot):
    calls, ended = boot(shutdown=True, runs_s=30)
    assert ended == 143 and not deletions(calls), "TERM to the script, as of a maintenance event"
    calls, ended = boot(system="stopping", code=143)
    assert ended == 143 and not deletions(calls), "the program was ended first, and the script not yet"
    assert any(call[:2] == ["gcloud", "storage"] for call in calls)
    calls, _ = boot(code=143)
    assert deletions(calls)


def test_a_public_image_of_another_registry_needs_no_login(boot):
    assert not [call for call in boot(image="ghcr.io/me/gemsmith:1")[0] if "configure-docker" in call]
    assert [call for call in boot()[0] if "configure-docker" in call]


def test_only_the_first_host_deletes(boot):
    calls, _ = boot(worker="1")
    assert not deletions(calls) and not [call for call in calls if call[0] == "systemd-run"]
    assert any(call[:2] == ["docker", "run"] for call in calls)


def test_a_program_that_takes_too_long_is_ended_and_the_node_deleted(boot):
    calls, ended = boot(runs_s=30, timeout_hours=1 / 3600)
    assert ended == 124 and deletions(calls)


def test_a_later_boot_does_not_prolong_the_time(boot, tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "deadline").write_text("1000")
    calls, ended = boot()
    assert ended == 124 and deletions(calls)
    assert not [call for call in calls if call[0] == "docker"]


def test_the_token_comes_from_secret_manager_and_is_not_on_a_command_line(boot):
    calls, _ = boot(overrides=("checkpoint=google/gemma-4-31B-it",), secret="hf-token")
    assert any(call[:3] == ["gcloud", "secrets", "versions"] for call in calls)
    (run,) = [call for call in calls if call[:2] == ["docker", "run"]]
    assert run[run.index("HF_TOKEN") - 1] == "--env"


def test_the_script_is_shipped_with_the_package():
    text = (Path(tpu_vm.__file__).parent / "startup.sh.jinja").read_text()
    assert "trap finish EXIT" in text and os.linesep == "\n"


class TestWithoutAContainer:
    def test_uv_installs_what_the_locks_name_and_the_stages_run_there(self, boot, wheel, tmp_path):
        calls, ended = boot(wheel=wheel, code=3)
        assert ended == 3 and deletions(calls) and not [call for call in calls if call[0] == "docker"]
        installed = [call for call in calls if call[:3] == ["uv", "pip", "install"]]
        given = [[Path(word).name for word in call if word.endswith(("lock", "whl"))] for call in installed]
        assert given == [[*LOCKS[:-1]], ["torch.lock", "*.whl"]] and all("--no-deps" in call for call in installed)
        assert ["--require-hashes" in call for call in installed] == [True, False]
        (run,) = [call for call in calls if call[0] == "gemsmith"]
        assert run[1:4] == ["launch", "worker", "gs://runs/team/big"]
        again, _ = boot(wheel=wheel)
        assert [call[0] for call in again if call[0] in ("uv", "python3", "gemsmith")] == ["gemsmith"]

    def test_an_install_that_fails_is_tried_four_times_and_ends_the_node(self, boot, wheel):
        calls, ended = boot(wheel=wheel, installs=1)
        assert ended == 1 and deletions(calls) and not [call for call in calls if call[0] == "gemsmith"]
        assert len([call for call in calls if call[:3] == ["uv", "pip", "install"]]) == 4

    def test_the_wheel_is_uploaded_and_no_image_is_asked_for(self, launched, wheel, launch_record):
        request = launched("tpu-vm", wheel=wheel)
        text = script(request)
        assert f"{wheel}/{WHEEL} {wheel}/train.lock" in text and "gs://runs/team/big/wheel/" in text
        assert not [
            check
            for check in preflight(request, "tpu-vm", tpu_vm.values(request))
            if "image" in check.name or "artifact" in check.name
        ]
        assert not [
            line for line in leftover_resources(launch_record.model_copy(update={"image": None})) if "image" in line
        ]
