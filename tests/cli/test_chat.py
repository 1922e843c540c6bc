"""What the verb `chat` refuses before anything is started."""

import pytest
from click.testing import CliRunner

from gemsmith.cli import cli
from gemsmith.errors import InputError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "SOURCE is missing; give a run directory, or --url"),
        (["runs/x", "--url", "http://a", "--model", "b"], "SOURCE: does not go with --url"),
        (["--url", "a:1", "--model", "b"], "--url a:1: must be http"),
        (["--url", "http://a", "--model", "b", "--skip-verify-check"], "--skip-verify-check: does not go with --url"),
        (["runs/x", "--model", "best"], "allowed for a run: base, tuned"),
    ],
)
def test_what_goes_not_together_is_one_line(arguments, message):
    done = CliRunner().invoke(cli, ["chat", *arguments])
    assert isinstance(done.exception, InputError)
    assert message in str(done.exception)
