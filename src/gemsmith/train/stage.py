"""The train stage: hands the run to the backend that `train.backend` names."""

from gemsmith.errors import RecipeError
from gemsmith.records import TrainRecord
from gemsmith.run import Run


def train(run: Run, *, fresh: bool = False) -> TrainRecord:
    """The record of a finished training, which is also written to train.json; continues from the last checkpoint where there is one.

    `fresh` starts at step 0, and deletes what an earlier training left once the first step has run: until then nothing is lost.
    Raises RecipeError for a backend that this version does not have, and whatever the backend raises.
    """
    if run.recipe.train.backend != "tunix":
        raise RecipeError(f"train.backend: {run.recipe.train.backend!r} was given, but this version trains with 'tunix' only; set that")
    from gemsmith.train.tunix import train_with_tunix

    return train_with_tunix(run, fresh=fresh)
