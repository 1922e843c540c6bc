import subprocess

import pytest
import yaml

from gemsmith.launch.provider import WithReason
from gemsmith.launch.render import render_script, render_yaml

NESTED = {
    "kind": "Job",
    "yes": "yes",
    "number": "43200",
    "empty": {},
    "none": [],
    "list": [1, "a b", {"name": "x", "deep": [{"k": WithReason("v: # w", "why")}, "z"]}],
    "annotations": {"a.b/c-d": 'true "quoted"'},
}


def plain(value):
    if isinstance(value, WithReason):
        return value.value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def test_what_is_rendered_is_read_back_as_it_was():
    assert yaml.safe_load(render_yaml(NESTED, heading=["a: b"])) == plain(NESTED)


def test_the_reason_stands_behind_its_value():
    assert render_yaml({"cpu": WithReason("20", "the least")}) == 'cpu: "20"  # the least\n'


def test_a_script_quotes_its_arguments_and_stops_at_a_failure():
    text = render_script([("Two\nlines.", ("echo", "a b; rm -rf $HOME"))])
    assert "# Two\n# lines.\necho 'a b; rm -rf $HOME'\n" in text and "set -euo pipefail" in text


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\x85", "\u2028", "\u2029"])
def test_no_reason_or_heading_ends_its_comment(end, tmp_path):
    said = f"a table{end}touch hacked{end}hacked: yes"
    text = render_yaml({"cpu": WithReason("20", said), "word": f"a{end}b"}, heading=[said])
    assert yaml.safe_load(text) == {"cpu": "20", "word": f"a{end}b"}
    (tmp_path / "submit.sh").write_text(render_script([(said, ("true",))], heading=[said]), newline="")
    subprocess.run(["bash", str(tmp_path / "submit.sh")], check=True)
    assert not (tmp_path / "hacked").exists()
