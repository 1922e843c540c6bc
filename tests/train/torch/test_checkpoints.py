"""Steps of the TRL backend on disk; nothing here needs PyTorch."""

import contextlib
import random
import shutil

import numpy as np
import pytest

from gemsmith.arch import lora_targets
from gemsmith.errors import CorruptCheckpointError
from gemsmith.export.adapters import read_run_adapter
from gemsmith.recipe.schema import Train
from gemsmith.runs.resolve import recipe_variant
from gemsmith.runs.run import Run
from gemsmith.train.torch.checkpoints import PeftCheckpoints

METADATA = {"recipe": {"lora.rank": 4}, "steps": [], "resumed_at": []}


@pytest.fixture
def run(prepared_run):
    """A run with the steps 2 and 4, of random matrices."""
    run = prepared_run(train={"backend": "trl"})
    numbers = np.random.default_rng(0)

    def draw(*shape):
        return numbers.standard_normal(shape).astype(np.float32)

    targets = lora_targets(recipe_variant(run.recipe), run.recipe.lora.targets)
    for step in (2, 4):
        matrices = {f"{target.module}.a": draw(4, target.shape[1]) for target in targets}
        moments = {"step": draw(1), **{f"{name}.exp_avg": array for name, array in matrices.items()}}
        matrices |= {f"{target.module}.b": draw(target.shape[0], 4) for target in targets}
        PeftCheckpoints(run).save(step, matrices, moments, METADATA | {"resumed_at": [step]})
    return run


def damages(folder, count):
    """Flips a bit or a byte, and deletes or cuts each file, in turn; it is mended before the next."""
    chosen, files = random.Random(0), sorted(folder.iterdir())
    for number in range(count + 2 * len(files)):
        file = files[number % len(files)]
        before = bytearray(file.read_bytes())
        place = chosen.randrange(min(len(before), chosen.choice((600, len(before)))))
        if number < count:
            after = before.copy()
            after[place] = after[place] ^ 1 << chosen.randrange(8) if number % 3 else chosen.randrange(256)
            file.write_bytes(after)
        elif number < count + len(files):
            file.unlink()
        else:
            file.write_bytes(before[:place])
        yield f"{number}: {file.name} at {place}"
        file.write_bytes(before)


def same(one, other):
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


def flat(adapter):
    return {f"{name}.{side}": getattr(pair, side) for name, pair in adapter.modules.items() for side in "ab"}


def test_damage_to_any_file_is_found_or_changes_nothing(run):
    checkpoints = PeftCheckpoints(run)
    metadata, (matrices, moments), found = checkpoints.read_metadata(4), checkpoints.read(4), []
    for what in damages(run.checkpoints / "4", 200):
        assert checkpoints.steps() == [2, 4] and checkpoints.others() == [], what
        try:
            now, (again, later) = checkpoints.read_metadata(4), checkpoints.read(4)
        except CorruptCheckpointError as error:
            found.append(str(error))
        else:
            assert now == metadata and same(again, matrices) and same(later, moments), what
        with contextlib.suppress(CorruptCheckpointError):
            assert same(flat(read_run_adapter(run)), matrices), what
    assert len(found) > 195 and not any("\n" in error for error in found)


def test_a_step_that_lost_all_that_tells_it_is_no_step(run):
    shutil.rmtree(run.checkpoints / "4")
    (run.checkpoints / "4").mkdir()
    assert PeftCheckpoints(run).steps() == [2]


def test_a_saved_step_replaces_the_oldest(run):
    keep = Train.model_validate(run.recipe.train.model_dump() | {"save_total_limit": 1})
    checkpoints = PeftCheckpoints(Run(path=run.path, recipe=run.recipe.model_copy(update={"train": keep})))
    matrices, moments = checkpoints.read(4)
    checkpoints.save(6, matrices, moments, METADATA)
    assert checkpoints.steps() == [6]
    assert same(checkpoints.read(6)[0], matrices)
