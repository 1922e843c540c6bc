"""The chat template, rendered as Hugging Face's tokenizers render it, and the control tokens that it alone may write.

Those end turns, open thoughts and call tools. A row's text is searched for them before it is rendered. The ids that it
comes to are looked at as well, for a control token can also arise where text meets what the template writes (`<|`
before `turn>`), where two texts meet, or where the tokenizer normalizes (a fullwidth `＜` to `<`).
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from gemsmith.data.documents import Document
from gemsmith.errors import CheckpointError, DataError, RowError
from gemsmith.system.files import expanduser, regular_file
from gemsmith.system.json import read_json
from gemsmith.system.workers import OutOfTime, restart_clock
from gemsmith.tasks.messages import BREAK, Message, images_of, map_strings, map_text, text_of

if TYPE_CHECKING:  # a process that renders rows starts in a third of the time without recipes
    from gemsmith.recipe.schema import Data

# Gemma's own is 20 kB.
_LARGEST_BYTES = 1_000_000
_LONGEST_REASON = 300
_DEEPEST = 100
_MEND = "mend it, or set data.template to another"
COPY_AGAIN = "copy it again from where the weights came from"


class TemplateFailure(Exception):  # noqa: N818 - beside DataError, which also names the row
    """A template did not render a conversation: one line that says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template as it was found. It is somebody else's program: `system.workers.limited` holds what it may use."""

    source: str
    text: str
    sha256: str
    names: Mapping[str, Any]
    """What it may read beside messages: the tokenizer's named tokens, such as bos_token, and enable_thinking."""

    @cached_property
    def compiled(self) -> jinja2.Template:
        """Raises DataError with the line where it is not Jinja, or takes more than its limits to compile."""
        restart_clock()
        try:
            compiled = _make_environment().from_string(self.text)
        except (Exception, OutOfTime) as error:  # noqa: BLE001 - Jinja computes what is constant while it compiles
            raise DataError(explain_failure(self.source, error)) from None
        # Each render copies them; Jinja keeps them in a ChainMap, whose copy is 9 of the 22 µs of a short template.
        compiled.globals = dict(compiled.globals)
        return compiled

    def render(self, messages: Sequence[Any], *, tools: Sequence[Any] = (), generation_prompt: bool = False) -> str:
        """The conversation as one text, with the beginning of the model's turn where wanted. Raises TemplateFailure."""
        compiled = self.compiled
        restart_clock()
        try:
            given = {"messages": messages, "tools": tools or None, "documents": None, **self.names}
            text = compiled.render(given, add_generation_prompt=generation_prompt)
            text.encode()
        except (Exception, OutOfTime) as error:  # noqa: BLE001 - a template can raise anything
            raise TemplateFailure(explain_failure(self.source, error)) from None
        return text


def find_template(folder: Path, data: "Data | None" = None) -> ChatTemplate:
    """The template of `data`, or else the folder's own: raises CheckpointError where it has none, as base models."""
    file = data.template if data else None
    settings = folder / "tokenizer_config.json"
    try:
        config = dict(read_json(settings))
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {folder}: has no {settings.name}; {COPY_AGAIN}") from None
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{settings}: is not a JSON object ({error}); {COPY_AGAIN}") from None
    source, text = _read_file(file) if file is not None else _find_in_folder(folder, config.get("chat_template"))
    # `bos_token` and the like, which templates write by name; each is given as text or as {"content": text}.
    tokens = {name: value for name, value in config.items() if name.endswith("_token")}
    tokens = {name: value.get("content") if isinstance(value, Mapping) else value for name, value in tokens.items()}
    names: dict[str, Any] = {name: text for name, text in tokens.items() if isinstance(text, str)}
    names |= {"enable_thinking": True} if data and data.thinking else {}
    try:
        sha256 = hashlib.sha256(text.encode()).hexdigest()
    except UnicodeEncodeError:  # JSON can spell half of a character
        what = "holds half of a surrogate pair, which is no text"
        raise CheckpointError(f"chat template {source}: {what}; {_MEND}") from None
    return ChatTemplate(source=source, text=text, sha256=sha256, names=names)


def check_template(file: str) -> None:
    """Raises DataError where the file cannot be read, or is not Jinja; it is parsed, and nothing in it is computed."""
    source, text = _read_file(file)
    try:
        _make_environment().parse(text)
    except (jinja2.TemplateSyntaxError, RecursionError, MemoryError) as error:
        raise DataError(explain_failure(source, error)) from None


def explain_failure(source: str, error: BaseException) -> str:
    """One line on what a template raised: its name, its line where known, the reason, what to do."""
    line = error.lineno if isinstance(error, jinja2.TemplateSyntaxError) else None
    for frame, number in walk_tb(error.__traceback__):  # the template's innermost line that was running
        if compiled := frame.f_globals.get("__jinja_template__"):
            line = compiled.get_corresponding_lineno(number)
    template = f"chat template {source}" + (f" line {line}" if line else "")
    match error:
        case jinja2.TemplateSyntaxError():
            return f"{template}: is not Jinja ({_one_line(error.message)}); {_MEND}"
        case _Refusal():
            remedy = "change the row, or set data.template to one that takes it"
            return f"{template} refuses it: {_one_line(str(error))}; {remedy}"
        case OutOfTime():
            reason = f"takes more than {error} of CPU for one text: it loops without end, or computes something huge"
        case MemoryError():
            reason = "takes too much memory: it makes a text, a list or a number that is huge"
        case RecursionError() | SyntaxError():
            reason = "calls itself without end, or nests too deep"
        case UnicodeEncodeError():
            reason = "writes half of a surrogate pair, which is no text"
        case jinja2.TemplateError():
            reason = f"fails: {_one_line(str(error)).rstrip('.')}"
        case _:
            reason = f"fails: {type(error).__name__}, {_one_line(str(error)).rstrip('.')}"
    return f"{template} {reason}; {_MEND}"


def _one_line(text: str | None) -> str:
    words = " ".join((text or "")[: 2 * _LONGEST_REASON].split())
    return words if len(words) <= _LONGEST_REASON else words[:_LONGEST_REASON] + "…"


def _read_file(file: str) -> tuple[str, str]:
    try:
        return file, regular_file(expanduser(file), most_bytes=_LARGEST_BYTES).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"data.template: {file} cannot be read ({why}); give a Jinja chat template file") from None


def _find_in_folder(folder: Path, inside: Any) -> tuple[str, str]:
    """The folder's chat_template.jinja, or else what its tokenizer_config.json has `inside`."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return str(file), regular_file(file, most_bytes=_LARGEST_BYTES).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: cannot be read ({error}); {COPY_AGAIN}") from None
    if isinstance(inside, list):
        named = {entry.get("name"): entry.get("template") for entry in inside if isinstance(entry, Mapping)}
        if "default" not in named:
            what = f"its chat templates are {', '.join(map(str, named))}, none called default"
            remedy = "write the one to use to a file and set data.template to it"
            raise CheckpointError(f"checkpoint {folder}: {what}; {remedy}")
        inside = named["default"]
    if isinstance(inside, str):
        return str(folder / "tokenizer_config.json"), inside
    what = "has no chat template (base models ship none); set data.template to a template file"
    like = "such as the chat_template.jinja of the instruction-tuned checkpoint of the same size"
    raise CheckpointError(f"checkpoint {folder}: {what}, {like}")


class _Generation(Extension):
    """Renders what is inside `{% generation %} … {% endgeneration %}`: where to train is not left to the template."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, remembering its verdicts, which follow from the object's type and the attribute's name alone.

    Half the time of Gemma's template of July 2026 went into asking again: 190 against 110 µs a render.
    """

    _verdicts: ClassVar[dict[tuple[type, str], bool]] = {}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        key = (type(obj), attr)
        if key not in self._verdicts:
            self._verdicts[key] = super().is_safe_attribute(obj, attr, value)
        return self._verdicts[key]

    def handle_exception(self, source: str | None = None) -> NoReturn:  # noqa: ARG002 - Jinja's interface
        """Leaves the traceback as it is: explain_failure reads it."""
        raise  # noqa: PLE0704 - Jinja calls this where it has caught something

    def get_template(self, *_: Any, **__: Any) -> NoReturn:
        what = "it includes, imports or extends another template"
        raise jinja2.TemplateError(f"{what}, and a chat template is a single file")

    select_template = get_template


def _make_environment() -> jinja2.Environment:
    # Text for a tokenizer, not for a browser: escaping would change it.
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])

    def raise_exception(message: object) -> None:
        raise _Refusal(str(message)[: 2 * _LONGEST_REASON])

    def strftime_now(_format: str) -> None:
        raise jinja2.TemplateError("it writes today's date, so that no two renders are the same")

    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment


class _Refusal(jinja2.TemplateError):
    """The template itself says that it does not take the conversation."""


SPECIAL_IDS = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<|tool_response>": 50, "<|turn>": 105, "<turn|>": 106}
# Images and sounds take their place, and transformers computes them as padding where there are none. Refused with any
# tokenizer, since a server may know them where tokenizer.json does not.
PLACEHOLDERS = ("<|image|>", "<|audio|>", "<|video|>")
EMPTY_THOUGHT = "<|channel>thought\n<channel|>"
# How Gemma 4 spells control tokens; such a token counts even where tokenizer.json does not flag it special. HTML tags,
# runs of line feeds and <unused7> are added tokens as well, and stay text.
_SPELLING = re.compile(r"<\|[^<|>]+\|?>|<[^<|>]+\|>")
_SPANS = "tool tool_call tool_response channel turn image audio".replace(" ", "|")
GEMMA_CONTROL = re.compile(
    rf'<(?:pad|eos|bos|unk|mask)>|<\|(?:{_SPANS})>|<(?:{_SPANS})\|>|<\|(?:"|think|image|audio|video)\|>'
)
"""Finds Gemma 4's control tokens in a text, those that data.control_tokens is about."""
# Around a text, it parts what the template writes from it; no white space, which templates trim, and no part of a word.
_GUARD = "."
_control_token = partial(RowError, "control token")
_REMEDY = "a control token that only the chat template may write; take it out, or set data.control_tokens"


@dataclass(frozen=True, kw_only=True, eq=False)
class ControlTokens:
    """A tokenizer's control tokens: their texts by id, and the pattern that finds one in a text."""

    tokenizer: Tokenizer
    texts: Mapping[int, str]
    pattern: re.Pattern[str]
    marks: np.ndarray  # bool by id; the last is False, and stands for all ids above
    _known: set[tuple[object, ...]] = field(default_factory=set)

    def among(self, ids: np.ndarray) -> np.ndarray:
        """The marked ones of the ids: of [2, 105, 9, 9, 106] they are [2, 105, 106]."""
        return ids[self.marks.take(ids, mode="clip")]

    def refuse_written(self, document: Document) -> None:
        """Raises RowError where a text holds one, which forges a turn, or trains the model to stop in the middle."""
        if document.tools and (found := self.pattern.search(_as_text(document.tools))):
            raise _control_token(f"{document.origin}: tools holds {found.group()}, {_REMEDY}")
        for index, message in enumerate(document.messages):
            if found := self.pattern.search(_words(message)):
                where = f"{document.origin}: {document.name(index)}"
                raise _control_token(f"{where} holds {found.group()}, {_REMEDY}")

    def refuse_made(self, document: Document, ids: np.ndarray, again: Callable[[Document], np.ndarray]) -> None:
        """Raises RowError where `ids` hold any that are not the template's; `again` makes a guarded document's ids.

        What the template writes itself is told by rendering the row once more, each text guarded; rows of the same
        turns whose ids show the same control tokens are known from then on.
        """
        found = self.among(ids)
        turns = document.messages
        counts = [(turn.role, len(turn.parts), len(images_of([turn])), len(turn.tool_calls)) for turn in turns]
        shape = (*counts, found.tobytes())
        if shape in self._known:
            return
        for index, message in enumerate(document.messages):
            encoded = self.tokenizer.encode(_words(message), add_special_tokens=False)
            alone = self.among(np.array(encoded.ids, np.int32))
            if len(alone):
                where = f"{document.origin}: {document.name(index)}"
                raise _control_token(f"{where} is tokenized to {self.texts[int(alone[0])]}, {_REMEDY}")
        own = self.among(again(_guard(document)))
        odd = next((one if one is not None else other for one, other in zip_longest(found, own) if one != other), None)
        if odd is not None:
            what = f"a text in it and what the chat template writes next to it make {self.texts[int(odd)]}"
            remedy = "a control token; change how that text begins or ends"
            raise _control_token(f"{document.origin}: {what}, {remedy}")
        self._known.add(shape)


def find_control_tokens(tokenizer: Tokenizer) -> ControlTokens:
    """The added tokens that are special, or spelled like one."""
    added = {
        number: token
        for number, token in tokenizer.get_added_tokens_decoder().items()
        if token.content and (token.special or token.content in SPECIAL_IDS or _SPELLING.fullmatch(token.content))
    }
    marks = np.zeros(max(added, default=0) + 2, bool)
    marks[list(added)] = True
    words = dict.fromkeys(PLACEHOLDERS, False) | {token.content: token.single_word for token in added.values()}
    # The longest first, as the tokenizer matches.
    patterns = (
        rf"(?<!\w){re.escape(text)}(?!\w)" if words[text] else re.escape(text)
        for text in sorted(words, key=len, reverse=True)
    )
    texts = {number: token.content for number, token in added.items()}
    return ControlTokens(tokenizer=tokenizer, texts=texts, pattern=re.compile("|".join(patterns)), marks=marks)


def _words(message: Message) -> str:
    """The message's texts, without an empty thought that an answer begins with: larger models are prompted by it."""
    text = text_of(message)
    if message.beside:
        return f"{text}\n{_as_text(message.beside)}"
    if message.role == "assistant" and (stripped := text.lstrip()).startswith(EMPTY_THOUGHT):
        return stripped.removeprefix(EMPTY_THOUGHT)
    return text


def settle_text(text: str, wanted: str) -> str:
    """The text without control tokens, where `drop` is `wanted`; where `text` is, with BREAK in each.

    One can be within another, and what is within so many others gets a BREAK, too.

    >>> settle_text("a<|tu<eos>rn>", "drop")
    'a'
    """
    for _ in range(_DEEPEST if wanted == "drop" else 0):
        if not GEMMA_CONTROL.search(text):
            break
        text = GEMMA_CONTROL.sub("", text)
    return GEMMA_CONTROL.sub(lambda found: found[0][0] + BREAK + found[0][1:], text)


def settle_document(document: Document, wanted: str) -> Document:
    """The document with its texts settled; the same one where it has no control token. Raises RowError as to empty."""
    if wanted == "error":
        return document
    spelled = [bool(GEMMA_CONTROL.search(_words(message))) for message in document.messages]
    if not any(spelled) and not GEMMA_CONTROL.search(_as_text(document.tools)):
        return document
    change, messages = partial(settle_text, wanted=wanted), list(document.messages)
    for index, message in enumerate(document.messages):
        if spelled[index]:
            messages[index] = map_text(message, change)
            if text_of(message).strip() and not text_of(messages[index]).strip():
                where = f"{document.origin}: {document.name(index)}"
                raise RowError("nothing but control tokens", f"{where} is nothing but control tokens; take the row out")
    return replace(document, messages=tuple(messages), tools=map_strings(document.tools, change))


def _as_text(value: Any) -> str:
    """A value of JSON with its strings as they are, quotes too."""
    return json.dumps(value, ensure_ascii=False, default=str).replace('\\"', '"')


def _guard(document: Document) -> Document:
    def guard(text: str) -> str:
        return f"{_GUARD}{text}{_GUARD}" if text.strip() else text

    return replace(document, messages=tuple(map_text(message, guard) for message in document.messages))
