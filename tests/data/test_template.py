import hashlib
import json

import jinja2
import pytest

from gemsmith.data.template import load_template
from gemsmith.errors import CheckpointError, DataError

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def use(folder, text):
    (folder / "chat_template.jinja").write_text(text)
    return load_template(folder)


def test_the_folders_own_template_renders_gemma_4s_form_and_its_hash_is_the_files(tokenizer_folder):
    template = load_template(tokenizer_folder)
    assert template.render(TURNS) == "<bos><|turn>user\nhi<turn|>\n<|turn>model\nhello<turn|>\n"
    assert template.render(TURNS[:1], generation_prompt=True) == "<bos><|turn>user\nhi<turn|>\n<|turn>model\n"
    assert template.sha256 == hashlib.sha256((tokenizer_folder / "chat_template.jinja").read_bytes()).hexdigest()


@pytest.mark.parametrize("inside", ["{{ bos_token }}x", [{"name": "default", "template": "{{ bos_token }}x"}]])
def test_a_template_inside_the_tokenizers_config_is_found(inside, tokenizer_folder):
    (tokenizer_folder / "chat_template.jinja").unlink()
    config = json.loads((tokenizer_folder / "tokenizer_config.json").read_text())
    (tokenizer_folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": inside}))
    assert load_template(tokenizer_folder).render([]) == "<bos>x"


def test_named_templates_without_a_default_are_refused(tokenizer_folder):
    (tokenizer_folder / "chat_template.jinja").unlink()
    (tokenizer_folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "rag", "template": "x"}]}))
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
    "text", ["{{ messages.append(1) }}", "{{ ''.__class__.mro() }}", "{{ strftime_now('%Y') }}", "{{ raise_exception('no') }}"]
)
def test_a_template_cannot_change_messages_leave_the_sandbox_or_read_the_clock(text, tokenizer_folder):
    template = use(tokenizer_folder, text)
    for _ in range(2):  # the second time the sandbox remembers
        with pytest.raises(jinja2.TemplateError):
            template.render(TURNS)
