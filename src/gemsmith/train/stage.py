"""The train stage: hands the run to the backend that `train.backend` names."""

from gemsmith.errors import MachineError
from gemsmith.records import TrainRecord
from gemsmith.run import Run


def train(run: Run, *, fresh: bool = False) -> TrainRecord:
    """The record of a finished training, which is also written to train.json; continues from the last checkpoint where there is one.

    `fresh` starts at step 0, and deletes what an earlier training left once the first step has run: until then nothing is lost.
    Raises MachineError where the backend is not installed, and whatever the backend raises.
    """
    if run.recipe.train.backend == "trl":
        return _train_with_trl(run, fresh=fresh)
    from gemsmith.train.tunix import train_with_tunix

    return train_with_tunix(run, fresh=fresh)


def _train_with_trl(run: Run, *, fresh: bool) -> TrainRecord:
    try:
        from gemsmith.train.trl_launch import train_in_processes

        if record := train_in_processes(run, fresh=fresh):
            return record
        from gemsmith.train.trl import train_with_trl
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gemsmith"):
            raise
        raise MachineError(f"train.backend: trl needs {error.name}, which is not installed; run: pip install 'gemsmith[trl]'") from None
    return train_with_trl(run, fresh=fresh)
