import yaml

from gemsmith.launch.commented import render_script, render_yaml
from gemsmith.launch.target import Chosen

NESTED = {
    "kind": "Job",
    "yes": "yes",
    "number": "43200",
    "empty": {},
    "none": [],
    "list": [1, "a b", {"name": "x", "deep": [{"k": Chosen("v: # w", "why")}, "z"]}],
    "annotations": {"a.b/c-d": 'true "quoted"'},
}


def plain(value):
    if isinstance(value, Chosen):
        return value.value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def test_what_is_rendered_is_read_back_as_it_was():
    assert yaml.safe_load(render_yaml(NESTED, heading=["a: b"])) == plain(NESTED)


def test_the_reason_stands_behind_its_value():
    assert render_yaml({"cpu": Chosen("20", "the least")}) == 'cpu: "20"  # the least\n'


def test_a_script_quotes_its_arguments_and_stops_at_a_failure():
    text = render_script([("Two\nlines.", ("echo", "a b; rm -rf $HOME"))])
    assert "# Two\n# lines.\necho 'a b; rm -rf $HOME'\n" in text and "set -euo pipefail" in text
