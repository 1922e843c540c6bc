"""Messages of typed parts: what their readers see, also of a part that is no text."""

from dataclasses import dataclass

from gemsmith.messages import Message, TextPart, join_texts, map_text, plain_messages, text_message, text_of


@dataclass(frozen=True)
class Picture:
    """A part of a kind that is no text."""


def test_a_message_of_text_is_a_string_for_templates_and_servers():
    talk = [text_message("user", "a\n"), text_message("assistant", "")]
    plain = ({"role": "user", "content": "a\n"}, {"role": "assistant", "content": ""})
    assert plain_messages(talk) == plain
    assert [list(message) for message in plain_messages(talk)] == [["role", "content"]] * 2


def test_texts_next_to_each_other_are_joined_and_others_are_not():
    a, b, picture = TextPart(text="a"), TextPart(text="b"), Picture()
    assert join_texts([a, b, picture, b, a]) == (TextPart(text="ab"), picture, TextPart(text="ba"))
    assert join_texts([picture]) == (picture,)
    assert join_texts([]) == (TextPart(text=""),)


def test_each_text_is_changed_and_every_other_part_stays():
    picture = Picture()
    message = Message(role="user", parts=(TextPart(text="a"), picture, TextPart(text="b")))
    changed = map_text(message, str.upper)
    assert changed.parts == (TextPart(text="A"), picture, TextPart(text="B"))
    assert (changed.role, text_of(changed)) == ("user", "AB")
