r"""The forms that rows may have: which columns each reads, and what turns it makes of them.

{"instruction": "Add", "input": "1 and 2", "output": "3"}  →  user: Add\n1 and 2    assistant: 3
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from gemsmith.data.documents import Document
from gemsmith.data.parts import PLACEHOLDER, ImageSource, kind, read_column, read_parts
from gemsmith.errors import RowError, suggest
from gemsmith.system.json import parse_json
from gemsmith.tasks.messages import BREAK, ROLES, ImagePart, Message, images_of, text_of

_FIELDS = ("role", "content")
_FIELD_SET = {*_FIELDS}
_BESIDE = {"assistant": ("reasoning", "reasoning_content", "tool_calls"), "tool": ("tool_call_id", "name")}
_BESIDE["model"] = _BESIDE["assistant"]
TOOLS, SYSTEM = "tools", "system"
BESIDE = (TOOLS, SYSTEM)  # functions that a row declares, and its system turn: columns of any form but raw text
_ANSWERS = ("assistant", "model")  # the role of an answer, and what Gemma's own chat format calls it
_ROLES = {"model": "assistant", "developer": "system"}  # what else chat formats call a role
SPEAKERS = {"human": "user", "user": "user"} | dict.fromkeys(("gpt", *_ANSWERS), "assistant") | {"system": "system"}
"""Who speaks in ShareGPT's `from` -> the role."""
_QUESTION_NAMES = ("prompt", "instruction", "question", "query", "task")
_CONTEXT_NAMES = ("input", "context")
_ANSWER_NAMES = ("response", "output", "answer", "completion", "target", "solution", "label")
SYSTEM_NAMES = ("system", "system_prompt", "system_message")
_MOST_TURNS = 4096
_TURN_NAMES = ("conversation", "dialog", "dialogue", "chat", "turns")


class Turns(NamedTuple):
    """A row's turns as objects of role and content, and what the row calls each of them."""

    turns: Sequence[Any]
    names: tuple[str, ...]
    context: int = 0  # how many of the first are context alone: no answer among them is trained


class Form(NamedTuple):
    """A form of row: what makes turns of one, the columns that tell it, and those that it may have.

    `turns` takes a row, where it stands, and how many images of its own column stand before its question. It raises
    RowError.
    """

    turns: Callable[[Mapping[str, Any], str, int], Turns]
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    answer: str | None = None
    """The column that is missing where a row only asks; None: its turns then end with the question."""
    asks: bool = True  # False of text alone, all of which is trained, with no chat template around it


def message_turns(row: Mapping[str, Any], origin: str, _images: int) -> Turns:
    """A list of turns with role and content."""
    turns = _list_of(row["messages"], f"{origin}: messages", "{role, content}")
    return Turns(turns, _numbered("messages", len(turns)))


def sharegpt_turns(row: Mapping[str, Any], origin: str, _images: int) -> Turns:
    """A list of turns with from and value, or with role and content."""
    given = _list_of(row["conversations"], f"{origin}: conversations", "{from, value}")
    names = _numbered("conversations", len(given))
    return Turns([_spoken(turn, f"{origin}: {name}") for turn, name in zip(given, names, strict=True)], names)


def completion_turns(row: Mapping[str, Any], origin: str, images: int) -> Turns:
    """TRL's: two texts, or two lists of messages, of which only the second is trained."""
    asked, names = _as_messages(row, "prompt", _asked(row["prompt"], images))
    answered, called = _as_messages(row, "completion", {"role": "assistant", "content": row["completion"]})
    if not any(isinstance(turn, Mapping) and turn.get("role") in _ANSWERS for turn in answered):
        raise RowError("no answer", f"{origin}: completion has no assistant turn; add one, or take the row out")
    return Turns([*asked, *answered], names + called, context=len(asked))


def alpaca_turns(row: Mapping[str, Any], origin: str, images: int) -> Turns:
    """An instruction, maybe its input, and the output."""
    prompt, given = row["instruction"], row.get("input")
    if given not in (None, ""):
        if not isinstance(prompt, str) or not isinstance(given, str):
            what = f"instruction is {kind(prompt)}, input {kind(given)}"
            raise RowError("not text", f"{origin}: {what}; both must be text")
        prompt = f"{prompt}\n{given}"
    answer = {"role": "assistant", "content": row["output"]}
    return Turns([_asked(prompt, images), answer], ("instruction", "output"))


def raw_text_turns(row: Mapping[str, Any], origin: str, _images: int) -> Turns:
    """Text without a question."""
    text = row["text"]
    if not isinstance(text, str) or not text.strip():
        what = "empty" if isinstance(text, str) else kind(text)
        raise RowError("no text", f"{origin}: text is {what}; write some, or take the row out")
    return Turns([{"role": "assistant", "content": text}], ("text",))


def pair_form(prompt: str, response: str) -> Form:
    """A question and its answer, in two columns."""
    names = (prompt, response)

    def turns(row: Mapping[str, Any], _origin: str, images: int) -> Turns:
        return Turns([_asked(row[prompt], images), {"role": "assistant", "content": row[response]}], names)

    return Form(turns, names, answer=response)


FORMS = {
    "messages": Form(message_turns, ("messages",)),
    "prompt-response": pair_form("prompt", "response"),
    "prompt-completion": Form(completion_turns, ("prompt", "completion"), answer="completion"),
    "alpaca": Form(alpaca_turns, ("instruction", "output"), ("input",), answer="output"),
    "sharegpt": Form(sharegpt_turns, ("conversations",)),
    "question-answer": pair_form("question", "answer"),
    "text": Form(raw_text_turns, ("text",), answer="text", asks=False),
}
COLUMNS = frozenset([*BESIDE, *(column for form in FORMS.values() for column in (*form.needed, *form.optional))])


def guess_columns(names: Iterable[str]) -> dict[str, str]:
    """What data.columns could say of rows with these columns; empty where it need not, or that is not plain.

    >>> guess_columns(["Question", "Answer", "id"]), guess_columns(["instruction", "context", "response"])
    ({'prompt': 'Question', 'response': 'Answer'}, {'input': 'context', 'output': 'response'})
    """
    columns = {*names}
    theirs = {name.strip().lower(): name for name in columns}
    if len(theirs) < len(columns):
        return {}
    systems, questions, contexts, answers, turns = (
        [theirs[name] for name in known if name in theirs]
        for known in (SYSTEM_NAMES, _QUESTION_NAMES, _CONTEXT_NAMES, _ANSWER_NAMES, _TURN_NAMES)
    )
    if not questions:
        questions, contexts = contexts, []
    match len(turns), len(questions), len(contexts), len(answers):
        case _ if any({*form.needed} <= columns for form in FORMS.values()):
            found = {}
        case 1, 0, 0, 0:
            found = {"conversations": turns[0]}
        case 0, 1, 0, 1:
            found = {"prompt": questions[0], "response": answers[0]}
        case 0, 1, 1, 1:
            found = {"instruction": questions[0], "input": contexts[0], "output": answers[0]}
        case _:
            return {}
    if len(systems) == 1:
        found[SYSTEM] = systems[0]
    return {ours: column for ours, column in found.items() if ours != column}


def read_document(
    row: Mapping[str, Any], origin: str, form: Form, source: ImageSource, columns: Mapping[str, Any]
) -> Document:
    """The row's messages, and the columns beside them. Raises RowError naming what in the row cannot be used."""
    column = read_column(row, origin, source)
    turns, names, context = form.turns(row, origin, len(column))
    if form.asks and row.get(SYSTEM) not in (None, ""):
        turns, names = [{"role": "system", "content": row[SYSTEM]}, *turns], (SYSTEM, *names)
        context = context and context + 1
    left = iter(column) if column else None
    named = zip(turns, names, strict=True)
    messages = tuple([_read_message(turn, f"{origin}: {name}", left, source) for turn, name in named])
    if left and (more := len([*left])):
        what = f"{more} of the {len(column)} images in its column have no place in its messages"
        raise RowError("misplaced image", f'{origin}: {what}; put {{"type": "image"}} where each belongs')
    if form.asks:
        _check_turns(messages, names, origin)
    tools = _read_functions(row[TOOLS], f"{origin}: {TOOLS}", "parameters") if row.get(TOOLS) else ()
    return Document(messages=messages, origin=origin, names=names, context=context, tools=tools, columns=columns)


def _check_turns(messages: Sequence[Message], names: Sequence[str], origin: str) -> None:
    roles = [message.role for message in messages]
    if len(roles) > _MOST_TURNS:
        what = f"has {len(roles):,} turns; allowed are {_MOST_TURNS:,}, each rendered with all before it"
        raise RowError("too many turns", f"{origin}: {what}; split the row")
    if "assistant" not in roles:
        remedy = "so nothing to train on; add one, or take the row out"
        raise RowError("no answer", f"{origin}: has no assistant turn, {remedy}")
    if roles[0] == "assistant":
        raise RowError("no question", f"{origin}: begins with an assistant turn; put what it answers before it")
    if roles[-1] != "assistant":
        last = f"{names[-1]}, a turn of the role {roles[-1]} that nothing answers"
        raise RowError("ends without an answer", f"{origin}: ends with {last}; add the answer, or take the turn out")
    asked: Sequence[Mapping[str, Any]] = ()
    for name, turn in zip(names, messages, strict=True):
        text, takes_images = text_of(turn), turn.role == "user"
        if turn.role == "tool":
            _check_result(turn, f"{origin}: {name}", asked)
        else:
            asked = turn.tool_calls
        needs_text = turn.role in ("user", "assistant") and not turn.tool_calls
        if needs_text and (not text or text.isspace()) and not (takes_images and images_of([turn])):
            what = "prompt" if takes_images else "answer"
            raise RowError(f"empty {what}", f"{origin}: {name} is an empty {what}; fill it, or take the row out")
        if not takes_images and images_of([turn]):
            what = f"of the role {turn.role} and has an image"
            raise RowError("misplaced image", f"{origin}: {name} is {what}; only user turns may")


def _check_result(turn: Message, where: str, asked: Sequence[Mapping[str, Any]]) -> None:
    """Raises RowError where none of the calls before it is the one that a tool's result names."""
    name, number = ((turn.beside or {}).get(field) for field in ("name", "tool_call_id"))
    if not any(call.get("id") == number if number else call["function"]["name"] == name for call in asked):
        given = f"the tool_call_id {number!r}" if number else f"the name {name!r}"
        what = f"is a tool's result with {given}, and no tool call of the assistant turn before it has that"
        remedy = "give it the id of its call, or the name of the function"
        raise RowError("tool result without its call", f"{where} {what}; {remedy}")


def _read_message(turn: Any, where: str, column: Iterator[ImagePart] | None, source: ImageSource) -> Message:
    if not isinstance(turn, Mapping):
        raise RowError("not a turn", f"{where} is {kind(turn)}; must be an object with role and content")
    beside = None
    if turn.keys() != _FIELD_SET:
        turn, beside = _read_beside(turn, where)
    role = _ROLES.get(turn["role"], turn["role"]) if isinstance(turn["role"], str) else turn["role"]
    if role not in ROLES:
        near = suggest(str(role), ROLES)
        raise RowError("unknown role", f"{where} has the role {role!r}{near}; allowed: {', '.join(ROLES)}")
    message = Message(role=role, parts=read_parts(turn["content"], where, column, source), beside=beside)
    text = text_of(message)
    if BREAK in text:
        raise RowError("no Unicode", f"{where} holds U+FDD0 before U+FDEF, which are no characters; take them out")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = f"at character {error.start + 1}"
        raise RowError("no Unicode", f"{where} holds half a surrogate pair {place}; it is no Unicode text") from None
    return message


def _read_beside(turn: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], dict[str, Any] | None]:
    """The turn, with content where it only calls, and what it has beside content, as chat templates read it."""
    allowed = _BESIDE.get(str(turn.get("role")), ())
    beside = {name: value for name in allowed if (value := turn.get(name)) not in (None, "", [])}
    if "tool_calls" in beside:
        turn = {**turn, "content": turn.get("content") or ""}
        beside["tool_calls"] = _read_functions(beside["tool_calls"], f"{where}.tool_calls", "arguments")
    _check_fields(turn, where, (*_FIELDS, *allowed))
    if "reasoning_content" in beside:  # an older name of the same
        beside.setdefault("reasoning", beside.pop("reasoning_content"))
    for name, value in beside.items():
        if name != "tool_calls" and not isinstance(value, str):
            raise RowError("not text", f"{where} has {name} that is {kind(value)}; must be text")
    return turn, beside or None


def _read_functions(given: Any, where: str, field: str) -> list[dict[str, Any]]:
    """Functions that are declared or called, as chat templates read them; lists and objects may be their JSON."""
    found, what = [], f'{{"name": ..., "{field}": {{...}}}}, each maybe as {{"type": "function", "function": ...}}'
    for place, one in enumerate(_list_of(_parsed(given, where), where, what)):
        function = _without_nulls(one.get("function", one) if isinstance(one, Mapping) else one)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise RowError("unusable tool", f"{where}[{place}] names no function; must be {what}")
        value = _parsed(function.get(field) or {}, f"{where}[{place}].{field}")
        if not isinstance(value, Mapping):
            raise RowError("unusable tool", f"{where}[{place}].{field} is {kind(value)}; must be an object")
        # "", since templates take a result without an id for that of any call without one.
        found.append({"type": "function", "id": one.get("id") or "", "function": {**function, field: value}})
    return found


def _parsed(value: Any, where: str) -> Any:
    try:
        return parse_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise RowError("unusable tool", f"{where} is text that is not JSON ({error})") from None


def _without_nulls(value: Any) -> Any:
    """The value without what is null in its objects: tables fill a field that only some rows have so."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _check_fields(turn: Mapping[str, Any], where: str, fields: tuple[str, ...]) -> None:
    # Tables and chat APIs fill a field that only some messages have with null, [] or "".
    unknown = next((name for name, value in turn.items() if name not in fields and value not in (None, "", [])), None)
    if unknown is not None:
        near = f"{unknown}{suggest(unknown, fields)}"
        raise RowError("unknown field", f"{where} has an unknown field {near}; allowed: {', '.join(fields)}")
    if missing := next((name for name in fields[:2] if name not in turn), None):
        raise RowError("not a turn", f"{where} has no {missing}; must have {' and '.join(fields[:2])}")


def _spoken(turn: Any, where: str) -> Any:
    """A turn of ShareGPT's as one of role and content; what is none is left for whoever reads those."""
    if not isinstance(turn, Mapping) or turn.get("from") is None:
        return turn
    _check_fields(turn, where, ("from", "value"))
    if (role := SPEAKERS.get(str(turn["from"]))) is None:
        allowed = f"allowed: {', '.join(SPEAKERS)}; take such rows out"
        raise RowError("unknown role", f"{where} is from {turn['from']!r}; {allowed}")
    return {"role": role, "content": turn["value"]}


def _asked(prompt: Any, images: int) -> dict[str, Any]:
    if images and isinstance(prompt, str) and PLACEHOLDER not in prompt:
        prompt = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": prompt}]
    return {"role": "user", "content": prompt}


def are_messages(value: Any) -> bool:
    """Whether a column holds messages, and no text or parts of one message."""
    return isinstance(value, list) and any(isinstance(item, Mapping) and "role" in item for item in value)


def _as_messages(row: Mapping[str, Any], column: str, turn: dict[str, Any]) -> tuple[list[Any], tuple[str, ...]]:
    """The messages in a column and their names; of a text, or of the parts of one message, that turn."""
    value = row[column]
    if are_messages(value):
        return value, _numbered(column, len(value))
    return [turn], (column,)


def _list_of(turns: Any, where: str, what: str) -> list[Any]:
    if not isinstance(turns, list):
        raise RowError("not a list", f"{where} is {kind(turns)}; must be a list of {what}")
    return turns


@cache
def _numbered(column: str, count: int) -> tuple[str, ...]:
    """messages[0], messages[1], …: one tuple for all rows of as many turns."""
    return tuple(f"{column}[{index}]" for index in range(count))
