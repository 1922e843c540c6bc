"""Whether this host is the machine that was named."""

from pathlib import Path

import pytest

from gemsmith.errors import MachineError, RecipeError
from gemsmith.hardware import load_catalog
from gemsmith.serve import container as host
from gemsmith.serve.container import docker_answers, machine_named, refuse_other_host

MACHINES = load_catalog().machines
H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(("machine", "gpus", "is_it"), [
    ("2xh100", [H100, H100], True),
    ("1xh100", [H100, H100], True),
    ("g4-standard-48", ["NVIDIA RTX PRO 6000 Blackwell Server Edition"], True),
    ("2xh100", [H100], False),
    ("1xh100", ["NVIDIA H200"], False),
    ("1xh100", [], False),
])  # fmt: skip
def test_a_gpu_host_is_known_by_its_gpus(
    machine: str, gpus: list[str], is_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_output", lambda command: "\n".join(gpus))
    if is_it:
        refuse_other_host(MACHINES[machine])
        return
    with pytest.raises(MachineError, match=rf"^--machine {machine}: this host has \d of its \d h100 .*add --print"):
        refuse_other_host(MACHINES[machine])


@pytest.mark.parametrize(("files", "named", "is_it"), [
    ("vfio/{}", "", True), ("accel{}", "v6e-8", True), ("vfio/{}", "v5p-8", False), ("null{}", "", False),
])  # fmt: skip
def test_a_tpu_host_is_known_by_its_device_files(
    files: str, named: str, is_it: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vfio").mkdir()
    for number in range(8):
        (tmp_path / files.format(number)).touch()
    (tmp_path / "vfio" / "vfio").touch()
    monkeypatch.setattr(host, "_DEV", tmp_path)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", named)
    if is_it:
        refuse_other_host(MACHINES["v6e-8"])
        return
    with pytest.raises(MachineError, match="this host has 0 of its 8 v6e"):
        refuse_other_host(MACHINES["v6e-8"])


def test_every_host_is_a_cpu() -> None:
    refuse_other_host(MACHINES["cpu"])


def test_a_machine_of_several_hosts_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    row = "{chip: v6e, chips: 16, hosts: 2, interconnect_bytes_per_s: 2.0e+11, source: x, date: '2026'}"
    own.write_text(f"machines: {{v6e-16: {row}}}")
    with pytest.raises(RecipeError, match=r"^--machine v6e-16: has 2 hosts"):
        machine_named("v6e-16", str(own))
    assert machine_named("v6e-8", str(own)).chips == 8


def test_docker_that_is_not_there_or_has_no_daemon_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not docker_answers()
    for code, answers in ((1, False), (0, True)):
        (tmp_path / "docker").write_text(f"#!/bin/sh\necho 28.2\nexit {code}\n")
        (tmp_path / "docker").chmod(0o755)
        assert docker_answers() == answers
