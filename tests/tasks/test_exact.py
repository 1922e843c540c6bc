from gemsmith.tasks.base import Question
from gemsmith.tasks.exact import score


def right(answer: str, expected: str) -> bool:
    [verdict] = score(Question(messages=(), expected=expected, origin="here"), [answer])
    return verdict.right


def test_exact_ignores_white_space_at_the_ends_alone() -> None:
    assert right(" yes\n", "yes")
    assert not right("y es", "yes") and not right("Yes", "yes")
