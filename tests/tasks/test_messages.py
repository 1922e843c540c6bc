"""Messages of typed parts: what their readers see, also of a part that is no text."""

from gemsmith.tasks.messages import (
    ImagePart,
    Message,
    TextPart,
    images_of,
    join_texts,
    map_text,
    plain_messages,
    text_message,
    text_of,
)


def test_a_message_of_text_is_a_string_for_templates_and_servers():
    chat_loop = [text_message("user", "a\n"), text_message("assistant", "")]
    plain = ({"role": "user", "content": "a\n"}, {"role": "assistant", "content": ""})
    assert plain_messages(chat_loop) == plain
    assert [list(message) for message in plain_messages(chat_loop)] == [["role", "content"]] * 2


def test_texts_next_to_each_other_are_joined_and_others_are_not():
    a, b, image = TextPart(text="a"), TextPart(text="b"), ImagePart(path="a.png")
    assert join_texts([a, b, image, b, a]) == (TextPart(text="ab"), image, TextPart(text="ba"))
    assert join_texts([image]) == (image,)
    assert join_texts([]) == (TextPart(text=""),)


def test_each_text_is_changed_and_every_other_part_stays():
    image = ImagePart(path="a.png")
    message = Message(role="user", parts=(TextPart(text="a"), image, TextPart(text="b")))
    changed = map_text(message, str.upper)
    assert changed.parts == (TextPart(text="A"), image, TextPart(text="B"))
    assert (changed.role, text_of(changed)) == ("user", "AB")


def test_a_image_is_a_place_among_the_parts_for_templates():
    image, text = ImagePart(path="a.png"), TextPart(text="what?")
    message = Message(role="user", parts=(text, image, text, image))
    place, spoken = {"type": "image"}, {"type": "text", "text": "what?"}
    assert plain_messages([message]) == ({"role": "user", "content": [spoken, place, spoken, place]},)
    assert images_of([message, text_message("assistant", "a"), message]) == (image,) * 4


def test_a_images_bytes_are_not_printed():
    assert "kilo" not in repr(ImagePart(data=b"kilobytes"))
