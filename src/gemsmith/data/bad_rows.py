"""Rows that cannot be used: all of them in one answer, by what is wrong with them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gemsmith.errors import DataError, RowError, some

OnBadRow = Literal["error", "drop"] | None
"""What a recipe wants done with them; None where no recipe says."""
_NAMED = 3


@dataclass(kw_only=True)
class BadRows:
    """Those of a source so far."""

    first: RowError | None = None
    places: dict[str, list[str]] = field(default_factory=dict)
    """What is wrong -> where such rows stand."""

    def add(self, origin: str, error: RowError) -> None:
        """Counts one, which stands at `origin`."""
        error.__traceback__ = error.__context__ = None  # which would hold the row's values
        self.first = self.first or error
        self.places.setdefault(error.kind, []).append(origin)

    @property
    def counts(self) -> Mapping[str, int]:
        """Rows by what is wrong with them, as a record has them."""
        return {f"row: {kind}": len(places) for kind, places in self.places.items()}

    def settle(self, rows: int, wanted: OnBadRow, key: str = "data.train") -> tuple[str, ...]:
        """A warning on the rows left out of so many, if any. Raises DataError unless they are to be, or if all are."""
        if self.first is None:
            return ()
        kinds = sorted(self.places.items(), key=lambda item: -len(item[1]))
        found = "; ".join(f"{kind}: {len(places):,} ({some(places, _NAMED)})" for kind, places in kinds)
        count = sum(map(len, self.places.values()))
        if wanted == "drop" and count < rows:
            return (f"{key}: rows left out that cannot be used: {count:,} of {rows:,} ({found})",)
        others = f"; {count:,} of {rows:,} rows cannot be used ({found})" if count > 1 else ""
        remedy = "" if wanted is None else "; so none is left" if count == rows else "; or set data.on_bad_row to drop"
        raise DataError(f"{self.first}{others}{remedy}")
