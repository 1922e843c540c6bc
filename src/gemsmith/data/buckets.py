"""How much room for pictures the rows of a step have: one of a few sizes, so that as few programs run all steps.

Every row of a step is padded to the same number of pictures, each of the same number of soft tokens. Were that one size
for the whole run, its fullest row would set what every step costs.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gemsmith.execution import bucket_of

MOST_BUCKETS = 3
"""Programs of a run."""
_WORTH = 0.05


class Bucket(NamedTuple):
    """Room of a row: so many pictures, each of so many soft tokens."""

    images: int
    soft_tokens: int

    @property
    def size(self) -> int:
        """Soft tokens that a row is padded to."""
        return self.images * self.soft_tokens

    def holds(self, other: "Bucket") -> bool:
        return other.images <= self.images and other.soft_tokens <= self.soft_tokens


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Those of a run, the smallest first, and which of them each step takes: `of_step[0]` is the first step's."""

    buckets: tuple[Bucket, ...]
    of_step: tuple[int, ...]

    def of(self, step: int) -> Bucket:
        """The bucket of a step, from 1."""
        return self.buckets[self.of_step[step - 1]]

    def count_steps(self) -> dict[Bucket, int]:
        """How many steps of the run take each bucket."""
        counted = Counter(self.of_step)
        return {bucket: counted[place] for place, bucket in enumerate(self.buckets)}


def find_buckets(
    rows: Sequence[Sequence[int]], order: Sequence[int], *, total_rows: int, rows_per_step: int
) -> Buckets:
    """The buckets of a run over packed rows whose pictures have so many soft tokens each.

    `order[k]` is the row at place k of the run, which ends after `total_rows`.
    """
    needs = [room_for(row) for row in rows]
    alike = set(needs)
    if len(alike) == 1:  # as a folder's photos often are: nothing is to be looked up, which takes 20 µs a row
        return Buckets(buckets=tuple(alike), of_step=(0,) * -(-total_rows // rows_per_step))
    placed = [needs[int(order[place])] for place in range(total_rows)]
    steps = [join(placed[begin : begin + rows_per_step]) for begin in range(0, total_rows, rows_per_step)]
    buckets = choose_buckets(steps)
    smallest = {need: next(place for place, one in enumerate(buckets) if one.holds(need)) for need in set(steps)}
    return Buckets(buckets=buckets, of_step=tuple(smallest[need] for need in steps))


def room_for(pictures: Sequence[int]) -> Bucket:
    """The room of a row whose pictures have so many soft tokens each; of one without any, the least there is.

    >>> room_for([256, 266]), room_for([])
    (Bucket(images=2, soft_tokens=288), Bucket(images=1, soft_tokens=32))
    """
    return Bucket(max(1, len(pictures)), bucket_of(max(pictures, default=1)))


def join(needs: Sequence[Bucket]) -> Bucket:
    """The least room that holds each of these."""
    return Bucket(max(need.images for need in needs), max(need.soft_tokens for need in needs))


def choose_buckets(steps: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """At most MOST_BUCKETS, the smallest first, for steps of which each takes the first that has room for it.

    The largest holds all of them. Of what the steps themselves need, the one that saves most comes to it, and once
    more, each where it saves a twentieth of the padded soft tokens: a program takes time to compile.

    >>> choose_buckets([Bucket(1, 64)] * 9 + [Bucket(2, 64)] * 9 + [Bucket(4, 96)])
    (Bucket(images=1, soft_tokens=64), Bucket(images=2, soft_tokens=64), Bucket(images=4, soft_tokens=96))
    """
    counted = Counter(steps)
    chosen: tuple[Bucket, ...] = (join(steps),)

    def padded(buckets: tuple[Bucket, ...]) -> int:
        return sum(count * next(one.size for one in buckets if one.holds(need)) for need, count in counted.items())

    while len(chosen) < MOST_BUCKETS:
        more = (tuple(sorted((*chosen, need), key=lambda one: (one.size, one))) for need in sorted(counted))
        best = min(more, key=padded)
        if padded(best) > (1 - _WORTH) * padded(chosen):
            break
        chosen = best
    return chosen
