import subprocess
from types import SimpleNamespace

import pytest
import yaml

from gemsmith.launch import render
from gemsmith.launch.provider import WithReason
from gemsmith.launch.render import render_commands, render_template, shell_word, yaml_scalar

REQUEST = SimpleNamespace(options=None)


@pytest.fixture
def template(tmp_path, monkeypatch):
    """Writes a text that `render_template` fills in as `mine.yaml` and `mine.sh`."""
    monkeypatch.setattr(render.resources, "files", lambda _package: tmp_path)
    return lambda text: [(tmp_path / f"mine.{kind}.jinja").write_text(text) for kind in ("yaml", "sh")]


@pytest.mark.parametrize("value", ["yes", "43200", "", "a b", 'true "quoted"', "a: b", "# w", "null", "Job", 1, True])
def test_what_is_written_is_read_back_as_it_was(template, value):
    template("# {{ 'a: b' | comment }}\nlist:\n- {{ value }}\nkey: {{ value | because('why: # so') }}\n")
    text = render_template("mine.yaml", REQUEST, value=value)
    assert yaml.safe_load(text) == {"list": [value], "key": value}
    template("printf %s {{ value }}\nprintf %s {{ value | because('why') }}\n")
    done = subprocess.run(
        ["bash", "-c", render_template("mine.sh", REQUEST, value=value)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == 2 * str(value)


def test_the_reason_stands_behind_its_value():
    assert yaml_scalar(WithReason("20", "the least")) == '"20"  # the least'
    assert shell_word(WithReason("a b", "as asked")) == "'a b'  # as asked"


def test_a_script_quotes_its_arguments_and_stops_at_a_failure():
    text = render_commands([("Two\nlines.", ("echo", "a b; rm -rf $HOME"))])
    assert "# Two\n# lines.\necho 'a b; rm -rf $HOME'\n" in text and "set -euo pipefail" in text


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\x85", "\u2028", "\u2029"])
def test_no_reason_or_comment_ends_its_line(template, end, tmp_path):
    said = f"a table{end}touch hacked{end}hacked: yes"
    values = {"cpu": WithReason("20", said), "word": f"a{end}b", "said": said}
    template("# {{ said | comment }}\ncpu: {{ cpu }}\nword: {{ word }}\n")
    assert yaml.safe_load(render_template("mine.yaml", REQUEST, **values)) == {
        "cpu": "20",
        "word": f"a{end}b",
    }
    template("# {{ said | comment }}\nCPU={{ cpu }}\nWORD={{ word }}\n")
    scripts = [
        render_commands([(said, ("true",))], heading=[said]),
        render_template("mine.sh", REQUEST, **values),
    ]
    for script in scripts:
        (tmp_path / "submit.sh").write_text(script, newline="")
        subprocess.run(["bash", str(tmp_path / "submit.sh")], check=True)
    assert not (tmp_path / "hacked").exists()
