import io

import pytest

from gemsmith.errors import MachineError
from gemsmith.launch.provider import PreflightCheck
from gemsmith.launch.submit import run_preflight
from gemsmith.system.console import open_console

CHECKS = [
    PreflightCheck(name="gcloud is here", command=("gcloud", "version"), remedy="install it"),
    PreflightCheck(name="logged in", command=("gcloud", "auth", "list"), remedy="gcloud auth login"),
    PreflightCheck(
        name="bucket",
        command=("gcloud", "buckets"),
        remedy="make it",
        complaint=lambda output: None if output == "here" else f"it is {output}",
    ),
    PreflightCheck(name="quota", command=("gcloud", "quotas"), remedy="ask for it", needed=False),
]


def preflight():
    text = io.StringIO()
    try:
        run_preflight(CHECKS, open_console(file=text, width=200))
    finally:
        preflight.lines = text.getvalue().splitlines()


def test_every_check_is_a_line_with_its_remedy_where_it_fails(fake_tools):
    fake_tools(("buckets", 0, "elsewhere"), ("quotas", 1, "denied"))
    with pytest.raises(MachineError, match=r"^preflight: 1 of 4 checks failed \(bucket\); nothing was created"):
        preflight()
    assert preflight.lines == [
        "ok    gcloud is here",
        "ok    logged in",
        "fails bucket: it is elsewhere; make it",
        "note  quota: denied; ask for it",
    ]


def test_what_is_not_needed_does_not_stop_the_launch(fake_tools):
    fake_tools(("buckets", 0, "here"), ("quotas", 1, "denied"))
    preflight()


def test_without_a_login_nothing_else_is_asked(fake_tools):
    calls = fake_tools(("auth list", 1, "expired"))
    with pytest.raises(MachineError, match="logged in"):
        preflight()
    assert len(calls()) == 2
