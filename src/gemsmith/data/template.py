"""The chat template: found beside the weights or in a file, and rendered the way Hugging Face's tokenizers render it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gemsmith.errors import CheckpointError, DataError


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A compiled template. `names` are the tokenizer's named tokens that it may write, such as bos_token."""

    source: str
    sha256: str
    names: Mapping[str, str]
    compiled: jinja2.Template

    def render(self, messages: Sequence[Mapping[str, str]], *, generation_prompt: bool = False) -> str:
        """The conversation as one text, ended by the beginning of the model's turn where wanted. Raises jinja2.TemplateError."""
        return self.compiled.render(messages=messages, tools=None, documents=None, add_generation_prompt=generation_prompt, **self.names)


def load_template(folder: Path, file: str | None = None) -> ChatTemplate:
    """The template in `file`, or else the checkpoint folder's own.

    Raises DataError where the file cannot be used, CheckpointError where the folder has none: base models ship none.
    """
    config = _read_tokenizer_config(folder)
    source, text = _read_file(file) if file is not None else _find_template(folder, config)
    try:
        compiled = _make_environment().from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"chat template {source} line {error.lineno}: is not Jinja ({error.message})") from None
    return ChatTemplate(source=source, sha256=hashlib.sha256(text.encode()).hexdigest(), names=_named_tokens(config), compiled=compiled)


def _read_file(file: str) -> tuple[str, str]:
    try:
        return file, Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.template: {file} cannot be read ({error}); give a Jinja chat template file") from None


def _find_template(folder: Path, config: Mapping[str, Any]) -> tuple[str, str]:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return str(file), file.read_text(encoding="utf-8")
    inside = config.get("chat_template")
    if isinstance(inside, list):
        named = {entry["name"]: entry["template"] for entry in inside}
        if "default" not in named:
            raise CheckpointError(
                f"checkpoint {folder}: its chat templates are {', '.join(named)}, none called default; write the one to use to a file "
                "and set data.template to it"
            )
        inside = named["default"]
    if isinstance(inside, str):
        return str(folder / "tokenizer_config.json"), inside
    raise CheckpointError(
        f"checkpoint {folder}: has no chat template (base models ship none); set data.template to a template file, such as the "
        "chat_template.jinja of the instruction-tuned checkpoint of the same size"
    )


def _read_tokenizer_config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {folder}: has no tokenizer_config.json; copy it from where the weights came from") from None
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{file}: is not a JSON object ({error}); copy it again from where the weights came from") from None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, which templates write by name; each is given as text or as {"content": text}."""
    texts = {
        name: value.get("content") if isinstance(value, Mapping) else value for name, value in config.items() if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


class _Generation(Extension):
    """Accepts `{% generation %} … {% endgeneration %}` and renders what is inside: where to train is not left to the template."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, remembering its verdicts, which follow from the object's type and the attribute's name alone.

    Half the time of Gemma's template of July 2026 went into asking again: 190 against 110 µs a render.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._verdicts: dict[tuple[type, str], bool] = {}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        key = (type(obj), attr)
        if key not in self._verdicts:
            self._verdicts[key] = super().is_safe_attribute(obj, attr, value)
        return self._verdicts[key]


def _make_environment() -> jinja2.Environment:
    # Text for a tokenizer, not for a browser: escaping would change it.
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _refuse_clock
    return environment


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _refuse_clock(_format: str) -> None:
    raise jinja2.TemplateError("it writes today's date, so that no two renders are the same; set data.template to one that does not")
