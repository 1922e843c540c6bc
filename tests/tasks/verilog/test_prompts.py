"""The words decide the score: a changed one makes it comparable with nothing."""

from gemsmith.tasks.messages import plain_messages
from gemsmith.tasks.verilog.task import PROMPTS, ask


def test_the_official_prompt_is_that_of_verilog_evals_script_byte_by_byte():
    system, user = plain_messages(ask("\nMake a module named TopModule.\n - output zero\n\n", "official"))
    assert system == {
        "role": "system",
        "content": "\nYou are a Verilog RTL designer that only writes code using correct Verilog syntax.\n",
    }
    assert user == {
        "role": "user",
        "content": "\nQuestion:\nMake a module named TopModule.\n - output zero\n"
        "\nEnclose your code with [BEGIN] and [DONE]. Only output the code snippet\nand do NOT output anything else.\n"
        "\nAnswer:\n",
    }


def test_our_own_asks_in_one_message_for_one_block():
    (user,) = plain_messages(ask("\nMake a module.\n", "fenced"))
    assert user["role"] == "user" and user["content"].startswith("Make a module.\n\nAnswer with one block of Verilog")


def test_a_prompt_of_the_users_own_is_one_message_with_the_question_in_its_place():
    (user,) = plain_messages(ask("\n{clk} in, {q} out.\n", "You know {this}.\n{question}\nNow: {question}\n"))
    assert user["content"] == "You know {this}.\n{clk} in, {q} out.\nNow: {clk} in, {q} out.\n"
    assert user["role"] == "user"


def test_the_official_prompt_is_the_default():
    assert PROMPTS[0] == "official"
