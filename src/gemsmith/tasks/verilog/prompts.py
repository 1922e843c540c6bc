"""What a model is asked for a problem of verilog-eval: word for word as its own script asks, or as Gemsmith does.

The sentences in OFFICIAL_SYSTEM and OFFICIAL_RULE are those of scripts/sv-generate in NVlabs/verilog-eval at commit
c498220, for the task spec-to-rtl and with no option set: a score is comparable with a published one only where the
model was asked the same. They are under this license:

    MIT License

    Copyright (c) 2023-2024 NVIDIA Research Projects

    Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
    documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
    rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to
    permit persons to whom the Software is furnished to do so, subject to the following conditions:

    The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
    Software.

    THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
    WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS
    OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
    OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""

from collections.abc import Callable, Mapping

from gemsmith.tasks.messages import Message, text_message

OFFICIAL_SYSTEM = "\nYou are a Verilog RTL designer that only writes code using correct Verilog syntax.\n"
OFFICIAL_RULE = (
    "\nEnclose your code with [BEGIN] and [DONE]. Only output the code snippet\nand do NOT output anything else.\n"
)
FENCED_RULE = "Answer with one block of Verilog that holds the whole TopModule and every module that it uses."


def ask_officially(specification: str) -> tuple[Message, ...]:
    """A system message, and the specification between `Question:` and `Answer:` with the rule on [BEGIN] and [DONE]."""
    asked = f"\nQuestion:\n{specification.strip()}\n{OFFICIAL_RULE}\nAnswer:\n"
    return text_message("system", OFFICIAL_SYSTEM), text_message("user", asked)


def ask_for_a_block(specification: str) -> tuple[Message, ...]:
    """The specification with one sentence on the form of the answer, as a chat model's user would write."""
    return (text_message("user", f"{specification.strip()}\n\n{FENCED_RULE}"),)


PROMPTS: Mapping[str, Callable[[str], tuple[Message, ...]]] = {"official": ask_officially, "fenced": ask_for_a_block}
"""By the names that a recipe gives them, the default first."""
