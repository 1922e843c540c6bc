import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gemsmith.data.chat_template import TemplateFailure, find_template
from gemsmith.errors import CheckpointError, DataError
from gemsmith.recipe.schema import Data
from support.cases import each
from tiny_checkpoints import make_tokenizer

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def load_template(folder, file=None):
    template = find_template(folder, Data(train="-", template=file))
    assert template.compiled
    return template


def use(folder, text):
    (folder / "chat_template.jinja").write_text(text)
    return load_template(folder)


def test_the_folders_own_template_renders_gemma_4s_form_and_its_hash_is_the_files(tokenizer_folder):
    template = load_template(tokenizer_folder)
    assert template.render(TURNS) == "<bos><|turn>user\nhi<turn|>\n<|turn>model\nhello<turn|>\n"
    assert template.render(TURNS[:1], generation_prompt=True) == "<bos><|turn>user\nhi<turn|>\n<|turn>model\n"
    assert (
        find_template(tokenizer_folder).sha256
        == hashlib.sha256((tokenizer_folder / "chat_template.jinja").read_bytes()).hexdigest()
    )


@pytest.mark.parametrize("inside", ["{{ bos_token }}x", [{"name": "default", "template": "{{ bos_token }}x"}]])
def test_a_template_inside_the_tokenizers_config_is_found(inside, tokenizer_folder):
    (tokenizer_folder / "chat_template.jinja").unlink()
    config = json.loads((tokenizer_folder / "tokenizer_config.json").read_text())
    (tokenizer_folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": inside}))
    assert load_template(tokenizer_folder).render([]) == "<bos>x"


def test_named_templates_without_a_default_are_refused(tokenizer_folder):
    (tokenizer_folder / "chat_template.jinja").unlink()
    (tokenizer_folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "rag", "template": "x"}]})
    )
    with pytest.raises(CheckpointError, match=r"its chat templates are rag, none called default"):
        load_template(tokenizer_folder)


def test_a_base_model_without_a_template_is_refused_and_the_key_to_set_is_named(tokenizer_folder):
    (tokenizer_folder / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match=r"has no chat template .* set data.template"):
        load_template(tokenizer_folder)


def test_the_recipes_template_takes_the_place_of_the_folders(tokenizer_folder, tmp_path):
    (tmp_path / "own.jinja").write_text("own")
    assert load_template(tokenizer_folder, str(tmp_path / "own.jinja")).render(TURNS) == "own"
    with pytest.raises(DataError, match=r"data.template: .* cannot be read"):
        load_template(tokenizer_folder, str(tmp_path / "missing.jinja"))


def test_a_template_that_is_not_jinja_is_refused_with_its_line(tokenizer_folder):
    with pytest.raises(DataError, match=r"chat_template.jinja line 2: is not Jinja"):
        use(tokenizer_folder, "a\n{% if %}")


def test_generation_markers_are_accepted_and_change_nothing(tokenizer_folder):
    text = "{% for m in messages %}{% generation %}{{ m.content }};{% endgeneration %}{% endfor %}"
    assert use(tokenizer_folder, text).render(TURNS) == "hi;hello;"


def test_json_in_a_template_is_written_without_escapes(tokenizer_folder):
    assert use(tokenizer_folder, "{{ messages[0] | tojson }}").render([{"content": "é<"}]) == '{"content": "é<"}'


@pytest.mark.parametrize(
    "text",
    ["{{ messages.append(1) }}", "{{ ''.__class__.mro() }}", "{{ strftime_now('%Y') }}", "{{ raise_exception('no') }}"],
)
def test_a_template_cannot_change_messages_leave_the_sandbox_or_read_the_clock(text, tokenizer_folder):
    template = use(tokenizer_folder, text)
    for _ in range(2):  # the second time the sandbox remembers
        with pytest.raises(TemplateFailure):
            template.render(TURNS)


FAILURES = [
    ("\n\n{{ 1 / 0 }}", "line 3 fails: ZeroDivisionError, division by zero; mend it, or set data.template to another"),
    ("\n{{ messages[0].foo.bar }}", "line 2 fails: 'dict object' has no attribute 'foo'; mend it"),
    ("{{ nosuch() }}", "line 1 fails: 'nosuch' is undefined; mend it"),
    ("{{ 'a' + 1 }}", 'line 1 fails: TypeError, can only concatenate str (not "int") to str; mend it'),
    ("{% for x in 3 %}{% endfor %}", "line 1 fails: TypeError, 'int' object is not iterable; mend it"),
    ("{{ '%(a)s' % {} }}", "line 1 fails: KeyError, 'a'; mend it"),
    ("{% for i in range(10 ** 9) %}x{% endfor %}", "line 1 fails: OverflowError, Range too big"),
    (
        "\n{{ raise_exception('no\nway') }}",
        "line 2 refuses it: no way; change the row, or set data.template to one that takes it",
    ),
    ("{{ raise_exception('ab' * 10 ** 7) }}", "line 1 refuses it: ababab"),
    ("{{ strftime_now('%Y') }}", "line 1 fails: it writes today's date"),
    (
        "{% include 'x' %}",
        "line 1 fails: it includes, imports or extends another template, and a chat template is a single file",
    ),
    ("{% include 'x' ignore missing %}", "line 1 fails: it includes, imports or extends another template"),
    ("\n{% import 'x' as y %}", "line 2 fails: it includes, imports or extends another template"),
    ("{% extends ['x', 'y'] %}", "line 1 fails: it includes, imports or extends another template"),
    ("{{ '\\ud800' }}", "writes half of a surrogate pair, which is no text; mend it"),
    (
        "{% macro again() %}\n{{ again() }}{% endmacro %}{{ again() }}",
        "line 2 calls itself without end, or nests too deep; mend it",
    ),
    ("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}", "line 1 calls itself without end"),
    ("{% block a %}{{ self.a() }}{% endblock %}", "line 1 calls itself without end"),
]
MEMORY = [
    "{% set n = 10 ** 10 %}\n{{ 'a' * n }}",
    "\n{{ messages[0].content * 10 ** 9 }}",
    "\n{{ '%10000000000d' % messages | length }}",
    "\n{{ '{:10000000000}'.format(messages | length) }}",
    "\n{{ messages[0].content | center(10 ** 10) }}",
    "\n{{ messages | tojson(indent=10 ** 10) }}",
    "\n{{ messages[0].content.zfill(10 ** 10) }}",
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}\n{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(99) %}\n{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}\n{% set n.x = n.x.replace('', n.x) %}{% endfor %}",
]
TIME = [
    "\n{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "\n{{ lipsum(n=10 ** 7) }}",
    "{% set n = 10 ** 8 %}\n{{ 7 ** n % 10 }}",
]
NOT_COMPILED = [
    ("{{ 7 ** (10 ** 8) }}", "takes more than 0.8 s of CPU"),
    ("{{ 'a' * 10 ** 6 }}" * 30 + "{{ [1] | slice(10 ** 10) | list }}", "takes more than 0.8 s of CPU"),
    ("{% if x %}" * 3000 + "{% endif %}" * 3000, "calls itself without end, or nests too deep"),
    ("{% for x in y %}" * 30 + "{% endfor %}" * 30, "calls itself without end, or nests too deep"),
    ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "calls itself without end, or nests too deep"),
    ("{{ " + "[" * 400 + "]" * 400 + " }}", "calls itself without end, or nests too deep"),
    ("{{ " + "9" * 5000 + " }}", "fails: ValueError, Exceeds the limit"),
    (
        "a\n{{ 1 | nosuch }}",
        "line 2: is not Jinja (No filter named 'nosuch'.); mend it, or set data.template to another",
    ),
]

# In a process of its own, which a limit that fails to hold cannot take the tests with.
SCRIPT = """
import json, sys
from pathlib import Path
from gemsmith.system.workers import ProcessLimits, limited
from gemsmith.data.chat_template import TemplateFailure, find_template
folder = Path(sys.argv[1])
for text, cpu_s in json.load(sys.stdin):
    (folder / "chat_template.jinja").write_text(text)
    found, message = find_template(folder), ""
    try:
        with limited(ProcessLimits(cpu_s=cpu_s, memory_bytes=2**27)):
            found.render([{"role": "user", "content": "hi"}])
    except TemplateFailure as error:
        message = f"render: {error}"
    except Exception as error:
        message = f"compile: {type(error).__name__}: {error}"
    print(json.dumps(message), flush=True)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Returns what a template's text is refused with."""
    folder = tmp_path_factory.mktemp("templates")
    make_tokenizer(folder)
    refused = FAILURES + NOT_COMPILED
    slow = TIME + [text for text, message in refused if "0.8 s of CPU" in message]
    texts = [text for text, _ in refused] + MEMORY + TIME
    limits = [(text, 0.8 if text in slow else 30.0) for text in texts]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder], input=json.dumps(limits), capture_output=True, text=True, check=True
    )
    answers = dict(zip(texts, map(json.loads, done.stdout.splitlines()), strict=True))

    def look_up(text):
        assert "\n" not in answers[text] and len(answers[text]) < 700
        return answers[text].replace(str(folder / "chat_template.jinja"), "FILE")

    return look_up


@each(("text", "message"), FAILURES)
def test_whatever_a_template_raises_is_one_line_with_its_name_its_line_and_what_to_do(text, message, said):
    assert said(text).startswith(f"render: chat template FILE {message}")


@pytest.mark.parametrize("text", MEMORY)
def test_memory_without_bounds_is_refused_with_the_line(text, said):
    assert said(text).startswith("render: chat template FILE line 2 takes too much memory")


@pytest.mark.parametrize("text", TIME)
def test_time_without_bounds_is_refused_with_the_line(text, said):
    assert said(text).startswith("render: chat template FILE line 2 takes more than 0.8 s of CPU for one text")


@pytest.mark.parametrize(("text", "message"), NOT_COMPILED)
def test_what_cannot_be_compiled_within_bounds_is_refused(text, message, said):
    assert said(text).startswith(f"compile: DataError: chat template FILE {message}")


def test_a_template_that_is_no_text_file_is_refused(tokenizer_folder, tmp_path):
    large, latin = tmp_path / "large.jinja", tmp_path / "latin.jinja"
    large.write_text("x" * 1_000_001)
    latin.write_bytes(b"\xe9")
    os.mkfifo(tmp_path / "pipe.jinja")
    for file, message in (
        (large, "has 1,000,001 bytes, more than 1,000,000"),
        (latin, "cannot be read ('utf-8'"),
    ):
        with pytest.raises(DataError, match=re.escape(message)):
            find_template(tokenizer_folder, Data(train="-", template=str(file)))
        (tokenizer_folder / "chat_template.jinja").write_bytes(file.read_bytes())
        with pytest.raises(CheckpointError, match=re.escape(message)):
            find_template(tokenizer_folder)
    for file in (tmp_path / "pipe.jinja", tmp_path, Path("/dev/zero")):
        with pytest.raises(
            DataError, match=r"data.template: .* cannot be read \(.*(Is a directory|not a regular file)"
        ):
            find_template(tokenizer_folder, Data(train="-", template=str(file)))


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        ("a\ud800", "holds half of a surrogate pair"),
        ([{"template": "x"}, "y"], "its chat templates are None, none called default"),
        ([{"name": "default"}], "has no chat template"),
        (7, "has no chat template"),
    ],
)
def test_a_config_with_something_else_in_the_templates_place_is_refused(inside, message, tokenizer_folder):
    (tokenizer_folder / "chat_template.jinja").unlink()
    (tokenizer_folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": inside}))
    with pytest.raises(CheckpointError, match=message):
        find_template(tokenizer_folder)
