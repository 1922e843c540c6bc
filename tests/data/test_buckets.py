import numpy as np
import pytest

from gemsmith.data import batches as buckets
from gemsmith.data.batches import BucketShape, choose_buckets, find_buckets, join, room_for


def test_a_step_takes_the_smallest_bucket_that_has_room_for_its_fullest_row():
    rows = [[64], [64, 64], [], [64] * 4, [64]]
    order = [0, 2, 1, 0, 3, 4, 4]
    found = find_buckets(rows, order, total_rows=7, global_batch_size=2)
    assert found.buckets == (BucketShape(1, 64), BucketShape(2, 64), BucketShape(4, 64))
    assert [found.of(step) for step in (1, 2, 3, 4)] == [
        BucketShape(1, 64),
        BucketShape(2, 64),
        BucketShape(4, 64),
        BucketShape(1, 64),
    ]


def test_rows_that_are_alike_have_one_bucket_and_are_not_looked_up():
    found = find_buckets([[250], [256], [230]], [], total_rows=7, global_batch_size=2)
    assert found.buckets == (BucketShape(1, 256),) and found.of_step == found.buckets * 4


def test_a_bucket_that_saves_less_than_a_twentieth_is_not_worth_a_program():
    assert choose_buckets([BucketShape(1, 64)] * 9 + [BucketShape(10, 64)] * 191) == (BucketShape(10, 64),)
    assert choose_buckets([BucketShape(1, 64)] * 12 + [BucketShape(10, 64)] * 188) == (
        BucketShape(1, 64),
        BucketShape(10, 64),
    )


@pytest.mark.parametrize("seed", range(20))
def test_there_are_few_buckets_and_no_step_lacks_room(seed, monkeypatch):
    random = np.random.default_rng(seed)
    rows = [random.integers(1, 281, random.integers(0, 7)).tolist() for _ in range(200)]
    order, places = random.permutation(200).tolist(), {"total_rows": 200, "global_batch_size": 3}
    found = find_buckets(rows, order, **places)
    assert 1 <= len(found.buckets) <= 3 and len(found.of_step) == 67
    for step in range(1, 68):
        need = join([room_for(rows[row]) for row in order[3 * step - 3 : 3 * step]])
        assert found.of(step).holds(need)
        assert not any(one.holds(need) and one.size < found.of(step).size for one in found.buckets)
    monkeypatch.setattr(buckets, "MOST_BUCKETS", 1)
    [whole] = find_buckets(rows, order, **places).buckets
    assert whole == found.buckets[-1] == join([room_for(row) for row in rows])
