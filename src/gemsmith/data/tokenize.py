r"""Documents rendered to token ids, each marked as trained or not: the loss mask is decided here and nowhere else.

    <bos><|turn>user\nhi<turn|>\n<|turn>model\nhello<turn|>\n
    .......................................^^^^^^^^^^^^..        ^ trained: the answer, and the token that ends the turn

What comes before an answer must be, letter for letter, what a server would prompt the model with; that is checked for
every turn. Prompt and answer are tokenized apart and joined, as they are when the model answers: a token over the
border would be one it never has to write.

Each placeholder that the chat template wrote becomes the soft tokens of its image:

    <|turn> user \n <|image|> what ?  →  <|turn> user \n <|image> <|image|> … <|image|> <image|> what ?
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from gemsmith.data.chat_template import (
    COPY_AGAIN,
    EMPTY_THOUGHT,
    SPECIAL_IDS,
    ChatTemplate,
    ControlTokens,
    TemplateFailure,
    explain_failure,
    find_control_tokens,
    find_template,
)
from gemsmith.data.documents import Document
from gemsmith.data.encode import WordEncoder
from gemsmith.errors import CheckpointError, DataError, RowError
from gemsmith.images.check import ImageInfo
from gemsmith.system.workers import OutOfTime, ProcessLimits, limited
from gemsmith.tasks.messages import BREAK, images_of, plain_messages, text_of

_no_mask = partial(RowError, "no mask")


class ImageTokenIds(NamedTuple):
    """Ids: of a soft token's place, and of what stands before and after an image's."""

    image: int
    begin: int
    end: int


def read_image_tokens(folder: Path, tokenizer: Tokenizer) -> ImageTokenIds:
    """The ids in config.json. Raises CheckpointError where one is missing, or is no added token of the tokenizer."""
    from gemsmith.checkpoints.folder import read_config

    config, ids = read_config(folder), []
    for key in ("image_token_id", "boi_token_id", "eoi_token_id"):
        number = config.get(key)
        if not isinstance(number, int):
            raise CheckpointError(f"checkpoint {folder}: its config.json has no {key}, which rows with images need")
        # Not one that a text may come to, such as a letter's.
        token = tokenizer.get_added_tokens_decoder().get(number)
        if token is None or tokenizer.encode(token.content, add_special_tokens=False).ids != [number]:
            what = f"{key} of its config.json, {number}, is no added token of tokenizer.json"
            raise CheckpointError(f"checkpoint {folder}: {what}; give the tokenizer that the weights came with")
        ids.append(number)
    return ImageTokenIds(*ids)


def place_soft_tokens(ids: np.ndarray, counts: Sequence[int], tokens: ImageTokenIds) -> tuple[np.ndarray, np.ndarray]:
    """The ids with `counts` soft tokens for each placeholder, and for each of these ids the place it came from.

    image 9, begin 7, end 8, counts [2], ids [5 9 6] → [5 7 9 9 8 6], [0 1 1 1 1 2]
    """
    places = np.flatnonzero(ids == tokens.image)
    lengths = np.ones(len(ids), np.int64)
    lengths[places] = np.asarray(counts, np.int64) + 2
    origin = np.repeat(np.arange(len(ids)), lengths)
    ends = np.cumsum(lengths)[places]
    spread = ids[origin]
    spread[ends - lengths[places]], spread[ends - 1] = tokens.begin, tokens.end
    return spread, origin


TURN_END = "<turn|>"
_RESULT_BEGIN = "<|tool_response>"  # what the model ends a turn with that calls tools; it is one of its stop ids
_THOUGHT_BEGIN = "<|channel>"


class Piece(NamedTuple):
    """A stretch of rendered text that is trained as a whole or not at all."""

    text: str
    trained: bool


class SplitText(NamedTuple):
    """One sequence of a document."""

    pieces: tuple[Piece, ...]
    messages: tuple[int, ...]  # how many of the messages come before each trained piece, and at last how many are in it


@dataclass(frozen=True, kw_only=True, eq=False)
class Rendered:
    """One document in tokens: `ids` int32 and `trained` bool, both of shape (L,)."""

    ids: np.ndarray
    trained: np.ndarray
    origin: str
    images: tuple[ImageInfo, ...] = ()  # in the order of their soft tokens

    @property
    def soft_tokens(self) -> int:
        """Those of all its images."""
        return sum(image.soft_tokens for image in self.images)


@dataclass(frozen=True, kw_only=True)
class Renderer:
    """A checkpoint's chat template, which renders within the limits, if any, and its tokenizer."""

    template: ChatTemplate
    tokenizer: Tokenizer
    encoder: WordEncoder
    control: ControlTokens
    limits: ProcessLimits | None = None
    image_tokens: Callable[[], ImageTokenIds]  # asked only for rows with images: a checkpoint of text alone has none


def open_renderer(
    folder: Path, template: ChatTemplate | None = None, *, limits: ProcessLimits | None = None
) -> Renderer:
    """The renderer of a checkpoint folder, with its own chat template or the one given. Raises CheckpointError."""
    tokenizer = open_tokenizer(folder)
    return Renderer(
        template=template or find_template(folder),
        tokenizer=tokenizer,
        encoder=WordEncoder(tokenizer),
        control=find_control_tokens(tokenizer),
        limits=limits,
        image_tokens=cache(partial(read_image_tokens, folder, tokenizer)),
    )


def open_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer.json. Raises CheckpointError where it is damaged or not Gemma 4's."""
    file = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 (tokenizers raises plain Exception)
        raise CheckpointError(f"{file}: cannot be read ({error}); {COPY_AGAIN}") from None
    remedy = "give Gemma 4's own tokenizer"
    for token, expected in SPECIAL_IDS.items():
        if (found := tokenizer.token_to_id(token)) != expected:
            raise CheckpointError(f"{file}: {token} is id {found}, Gemma 4's is {expected}; {remedy}")
        if tokenizer.encode(token, add_special_tokens=False).ids != [expected]:
            raise CheckpointError(f"{file}: does not read {token} in a text as one token; {remedy}")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def raise_row_error(_origin: str, error: RowError) -> None:
    """Raises the error."""
    raise error


def render_documents(
    renderer: Renderer, documents: Sequence[Document], on_bad: Callable[[str, RowError], object] = raise_row_error
) -> list[Rendered]:
    """Every document in tokens, in order; where its turns cannot stand in one sequence, one for each assistant turn.

    Raises RowError naming the row where the mask cannot be decided, or its text holds or makes a control token; where
    `on_bad` returns, that row is left out.
    """
    sequences: list[tuple[SplitText, Document, int]] = []
    with limited(renderer.limits, extra_bytes=sum(map(_text_bytes, documents))):
        for document in documents:
            try:
                renderer.control.refuse_written(document)
                splits = split_document(renderer.template, document)
            except RowError as error:
                on_bad(document.origin, error)
                continue
            sequences += [(split, document, number) for number, split in enumerate(splits)]
    ids = iter(_encode(renderer, [piece.text for split, *_ in sequences for piece in split.pieces]))
    rendered, bad = [], set()
    for split, document, number in sequences:
        pieces = [*islice(ids, len(split.pieces))]
        if document.origin in bad:
            continue
        # Prompt [2, 105, 9], answer [7, 106] → ids [2, 105, 9, 7, 106], trained [0, 0, 0, 1, 1].
        trained, end = np.zeros(sum(map(len, pieces)), bool), 0
        for piece, part in zip(split.pieces, pieces, strict=True):
            begin, end = end, end + len(part)
            trained[begin:end] = piece.trained
        joined = Rendered(ids=np.concatenate(pieces), trained=trained, origin=document.origin)
        try:
            renderer.control.refuse_made(document, joined.ids, partial(_sequence_ids, renderer, number))
        except RowError as error:
            bad.add(document.origin)
            on_bad(document.origin, error)
            continue
        if images_of(document.messages):
            joined = _place_images(joined, split, document, renderer.image_tokens())
        _check_ids(joined)
        rendered.append(joined)
    return [one for one in rendered if one.origin not in bad] if bad else rendered


def _encode(renderer: Renderer, texts: Sequence[str]) -> list[np.ndarray]:
    """The int32 ids of each text, what is between BREAKs apart, so that no control token arises there."""
    if not any(BREAK in text for text in texts):
        return renderer.encoder.encode(texts)
    parts = [text.split(BREAK) for text in texts]
    ids = iter(renderer.encoder.encode([*chain.from_iterable(parts)]))
    return [np.concatenate([*islice(ids, len(each))]) for each in parts]


def _text_bytes(document: Document) -> int:
    """At most what its texts take where every turn is rendered twice with all before it, at 4 bytes a character."""
    characters = sum(len(text_of(message)) for message in document.messages)
    if document.tools or any(message.beside for message in document.messages):
        characters += len(repr((document.tools, [message.beside for message in document.messages])))
    return 8 * (len(document.messages) + 1) * characters


def split_document(template: ChatTemplate, document: Document) -> list[SplitText]:
    r"""The document's text cut into trained and untrained pieces: one sequence, or one for each assistant turn.

    Some templates put an empty thought channel before an answer only when the model is to write it. A sequence with
    several answers is then not what the model sees when serving, so each gets its own: prompt with channel, answer.

        [("<bos><|turn>user\nhi<turn|>\n<|turn>model\n", False), ("hello<turn|>", True), ("\n", False)]

    Raw text has no template around it, and its end is trained as well:

        [("<bos>", False), ("Once upon a time …", True), ("<eos>", True)]

    Of a turn that calls tools, its reasoning, the calls and the `<|tool_response>` after them are trained, and never
    the results. Where the template drops earlier turns' reasoning, each answer gets a sequence of its own as well.
    """
    messages, answers = plain_messages(document.messages), document.answers
    if answers[0] == 0:  # text that nothing asks for
        text = text_of(document.messages[0])
        return [SplitText((Piece("<bos>", False), Piece(text, True), Piece("<eos>", True)), (0, 1))]
    try:
        render = partial(template.render, tools=document.tools) if document.tools else template.render
        full = render(messages)
        upto = [full if index + 1 == len(messages) else render(messages[: index + 1]) for index in answers]
        prompts = [render(messages[:index], generation_prompt=True) for index in answers]
        turns = [_cut_turn(document, *cut) for cut in zip(answers, prompts, upto, strict=True)]
        for tool in document.tools:
            if (name := tool["function"]["name"]) not in prompts[0]:
                what = f"the chat template does not write its tool {name}"
                raise _no_mask(f"{document.origin}: {what}; set data.template")
        whole = not any(turn.apart for turn in turns)
        if whole and any(message.reasoning for message in document.messages):
            whole = all(full.startswith(turn.prompt + turn.answer) for turn in turns)
        if whole:
            return [SplitText(_join_turns(full, turns, document), (*answers, len(messages)))]
    except TemplateFailure as error:
        raise RowError("chat template", f"{document.origin}: {error}") from None
    except (MemoryError, OutOfTime) as error:  # while what it rendered is cut
        raise DataError(f"{document.origin}: {explain_failure(template.source, error)}") from None
    return [
        SplitText((Piece(turn.prompt, False), Piece(turn.answer, True), Piece(turn.rest, False)), (index, index + 1))
        for index, turn in zip(answers, turns, strict=True)
    ]


class _Turn(NamedTuple):
    """One assistant turn: what prompts it, the answer with its end token, what the template writes after it.

    `apart`: the prompt ends in an empty thought channel that the rendered conversation does not have.
    """

    prompt: str
    answer: str
    rest: str
    apart: bool


def _cut_turn(document: Document, index: int, prompt: str, upto: str) -> _Turn:
    """Cuts `upto`, the conversation up to and including this answer, behind its generation prompt."""
    where = f"{document.origin}: {document.name(index)}"
    message, content = document.messages[index], text_of(document.messages[index])
    apart = not upto.startswith(prompt) and prompt.endswith(EMPTY_THOUGHT)
    shared = prompt.removesuffix(EMPTY_THOUGHT) if apart else prompt
    if not upto.startswith(shared):
        continues = f"is not how the rendered row continues ({_tail(upto[: len(prompt)])})"
        remedy = "so the mask cannot be decided; let user and assistant take turns, or set data.template"
        raise _no_mask(f"{where}: the chat template's generation prompt {_tail(prompt)} {continues}, {remedy}")
    answer = upto[len(shared) :]
    if not apart and answer.startswith(EMPTY_THOUGHT) and not content.lstrip().startswith(EMPTY_THOUGHT):
        prompt += EMPTY_THOUGHT
        answer = answer.removeprefix(EMPTY_THOUGHT)
    calls = message.tool_calls
    if apart and answer.startswith(_THOUGHT_BEGIN):
        raise _no_mask(f"{where}: has reasoning, and the chat template asks for none; set data.thinking to true")
    ending = _RESULT_BEGIN if calls and answer.endswith(_RESULT_BEGIN) else TURN_END
    body, end, rest = answer.rpartition(ending)
    if not end or rest.strip():
        what = f"the chat template does not end the answer with {TURN_END} ({_tail(answer)})"
        raise _no_mask(f"{where}: {what}; set data.template")
    if calls and content.strip():
        what = "has text beside its tool calls, which the chat template writes after them"
        raise _no_mask(f"{where}: {what}; take it out, or make it reasoning")
    if message.beside:
        written = (message.reasoning, *(call["function"]["name"] for call in calls), content)
        if lost := next((text for text in written if text.strip() not in body), None):
            remedy = "set data.template to a later revision, or take it out of the row"
            raise _no_mask(f"{where}: the chat template does not write {_tail(lost)}; {remedy}")
    elif body.strip() != content.strip():
        what = f"changes the answer {_tail(content)} to {_tail(body)} (it takes thoughts out, for one)"
        raise _no_mask(f"{where}: the chat template {what}; write the answer as it is to be trained")
    return _Turn(prompt, body + end, rest, apart)


def _join_turns(full: str, turns: Sequence[_Turn], document: Document) -> tuple[Piece, ...]:
    """One sequence for the whole conversation: every answer trained, everything between untrained."""
    pieces: list[Piece] = []
    done = 0
    for turn in turns:
        if not full.startswith(turn.prompt + turn.answer):
            what = f"renders an earlier turn otherwise once later ones follow ({_tail(turn.answer)})"
            remedy = "so one sequence cannot train all answers; set data.template, or keep one answer a row"
            raise _no_mask(f"{document.origin}: the chat template {what}, {remedy}")
        pieces += [Piece(turn.prompt[done:], False), Piece(turn.answer, True)]
        done = len(turn.prompt) + len(turn.answer)
    if full[done:]:
        pieces.append(Piece(full[done:], False))
    return tuple(pieces)


def check_prompts(renderer: Renderer, rows: Iterable[tuple[Document, int]]) -> list[np.ndarray]:
    """The ids of each row's prompt, int32 of shape (L,), as many of its first messages as the number beside it says.

    Raises DataError, naming row and token, where a row holds a control token, or its prompt makes one.
    """
    found = []
    for document, count in rows:
        renderer.control.refuse_written(document)
        prompt = replace(document, messages=document.messages[:count])
        ids = _prompt_ids(renderer, prompt)
        renderer.control.refuse_made(prompt, ids, partial(_prompt_ids, renderer))
        if wanted := len(images_of(prompt.messages)):
            tokens, images = renderer.image_tokens(), prompt.images[:wanted]
            if (placed := int(np.count_nonzero(ids == tokens.image))) != len(images):
                raise _misplaced(prompt, placed, len(images))
            ids, _ = place_soft_tokens(ids, [image.soft_tokens for image in images], tokens)
        found.append(ids)
    return found


def written_answers(renderer: Renderer, documents: Sequence[Document]) -> list[str]:
    """What a server tells of each document's last answer: the text of its trained tokens, without control tokens.

    Of {"name": "f", "arguments": {"a": 1}} that is call:f{a:1}. Raises as render_documents.
    """
    found = []
    for document in documents:
        last = render_documents(renderer, [document])[-1]
        begin = np.flatnonzero(np.diff(last.trained.astype(np.int8), prepend=0) == 1)[-1]
        found.append(renderer.tokenizer.decode(last.ids[begin:][last.trained[begin:]].tolist()))
    return found


def _prompt_ids(renderer: Renderer, document: Document) -> np.ndarray:
    try:
        with limited(renderer.limits, extra_bytes=_text_bytes(document)):
            messages = plain_messages(document.messages)
            text = renderer.template.render(messages, tools=document.tools, generation_prompt=True)
    except TemplateFailure as error:
        raise DataError(f"{document.origin}: {error}") from None
    return _encode(renderer, [text])[0]


def _place_images(joined: Rendered, split: SplitText, document: Document, tokens: ImageTokenIds) -> Rendered:
    """The same with the soft tokens of its images. Raises DataError where the template did not write each once."""
    upto = [0, *accumulate(len(images_of([message])) for message in document.messages)]
    assert upto[-1] == len(document.images), "looked at before"
    placed = joined.ids == tokens.image
    # Each run of what is trained begins where an answer does: so many images come before it.
    begins = np.flatnonzero(np.diff(joined.trained.astype(np.int8), prepend=0) == 1)
    found = [*(int(np.count_nonzero(placed[:begin])) for begin in begins), int(np.count_nonzero(placed))]
    wanted = [upto[count] for count in split.messages]
    if found != wanted or (placed & joined.trained).any():
        raise _misplaced(document, found[-1], wanted[-1])
    images = document.images[: wanted[-1]]
    ids, origin = place_soft_tokens(joined.ids, [image.soft_tokens for image in images], tokens)
    return replace(joined, ids=ids, trained=joined.trained[origin], images=images)


def _misplaced(document: Document, placed: int, images: int) -> DataError:
    what = f"does not write the image placeholder once for each image, in its place ({placed} for {images})"
    return DataError(f"{document.origin}: the chat template {what}; set data.template to Gemma 4's")


def _sequence_ids(renderer: Renderer, number: int, document: Document) -> np.ndarray:
    with limited(renderer.limits, extra_bytes=_text_bytes(document)):
        pieces = split_document(renderer.template, document)[number].pieces
    return np.concatenate(_encode(renderer, [piece.text for piece in pieces]))


def _check_ids(rendered: Rendered) -> None:
    """Raises DataError where it is not <bos> … with a turn's end in what is trained."""
    ids, trained = rendered.ids, rendered.trained
    if ids[0] != SPECIAL_IDS["<bos>"] or np.count_nonzero(ids == SPECIAL_IDS["<bos>"]) != 1:
        what = "the chat template does not write <bos> once, at the start"
        raise DataError(f"{rendered.origin}: {what}; set data.template to Gemma 4's")
    if not trained.any():
        raise DataError(f"{rendered.origin}: no token of it is trained; take the row out")
    assert ids[trained][-1] in (SPECIAL_IDS[TURN_END], SPECIAL_IDS[_RESULT_BEGIN], SPECIAL_IDS["<eos>"])


def _tail(text: str) -> str:
    return repr(text if len(text) <= 60 else "…" + text[-60:])
