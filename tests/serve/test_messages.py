"""Conversations as an OpenAI API takes them."""

import pytest

from gemsmith.errors import DataError
from gemsmith.images.check import to_data_url, validate_image
from gemsmith.images.patches import PatchConfig
from gemsmith.serve.client.chat import api_messages
from gemsmith.tasks.messages import ImagePart, Message, TextPart, plain_messages, text_message
from support.images import image_bytes

ONE, OTHER = image_bytes(seed=1), image_bytes(seed=2)


def test_text_alone_is_a_string_as_templates_take_it():
    messages = [text_message("system", "a"), text_message("user", "b")]
    assert tuple(api_messages(messages)) == plain_messages(messages)


def test_each_image_stands_in_its_place(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(OTHER)
    parts = (TextPart(text="a "), ImagePart(data=ONE), TextPart(text=" b"), ImagePart(path=str(file)))
    messages = [text_message("system", "s"), Message(role="user", parts=parts)]
    patching = PatchConfig(budget=70, patch=4)
    seen = [validate_image(ONE, patching), validate_image(str(file), patching)]
    system, user = api_messages(messages, seen, patching)
    assert system == {"role": "system", "content": "s"}
    urls = [{"url": to_data_url(data, patching)} for data in (ONE, OTHER)]
    assert user["content"] == [
        {"type": "text", "text": "a "},
        {"type": "image_url", "image_url": urls[0]},
        {"type": "text", "text": " b"},
        {"type": "image_url", "image_url": urls[1]},
    ]
    file.write_bytes(ONE)
    with pytest.raises(DataError, match=r"a.png: has changed"):
        api_messages(messages, seen, patching)
