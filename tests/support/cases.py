"""Tables of cases that one test holds."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any


def each(
    names: str | tuple[str, ...], cases: Iterable[Any], *, ids: Iterable[str] | None = None
) -> Callable[[Callable], Callable]:
    """As `pytest.mark.parametrize`, in one test with a subtest for each case, which share what its fixtures made."""
    keys = (names,) if isinstance(names, str) else names
    rows = [(case,) if isinstance(names, str) else case for case in cases]
    labels = [*ids] if ids else [", ".join(map(repr, row))[:200] for row in rows]

    def decorate(test: Callable) -> Callable:
        signature = inspect.signature(test)
        fixtures = [one for name, one in signature.parameters.items() if name not in keys]

        @wraps(test)
        def run(**given: Any) -> None:
            handed = {one.name: given[one.name] for one in fixtures}
            for row, label in zip(rows, labels, strict=True):
                with given["subtests"].test(label):
                    test(**handed, **dict(zip(keys, row, strict=True)))

        asked = {one.name: one for one in fixtures}
        asked.setdefault("subtests", inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD))
        run.__signature__ = signature.replace(parameters=[*asked.values()])
        return run

    return decorate
