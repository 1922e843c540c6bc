"""What every section of a recipe is, and what a key says of itself in its annotation."""

import dataclasses
from typing import Annotated, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field


@dataclasses.dataclass(frozen=True)
class Says:
    """What a key says of itself, beside its section's stages."""

    stages: str = ""
    """Those that read it; `questions` are eval, and bench with bench.images; `held_out`: data with eval_steps;
    `trackers`: train, which comes to the same without."""
    path: bool = False  # whether it may name a file or folder of this machine that a run reads
    compiled: bool = True  # whether the compiled training step depends on it


T = TypeVar("T")
Listed = Annotated[tuple[T, ...], Field(strict=False)]  # a list in YAML
Steps = Annotated[int, Field(gt=0, le=10_000_000)]
RowCount = Annotated[int, Field(gt=0, le=100_000_000)]  # rows of a dataset
TokenCount = Annotated[int, Field(gt=0, le=2**20)]
"""Tokens of one text: four times what the largest Gemma 4 reads; the bound of the model itself is checked later."""
AtOnce = Annotated[int, Field(gt=0, le=16_384)]  # requests under way at once: each holds a connection, and so a port
InputPath = Annotated[T, Says(path=True)]
OfPlan = Annotated[T, Says("plan bench")]
AsServed = Annotated[T, Says("plan serve bench eval")]


class Section(BaseModel):
    """Base of every part of the recipe: frozen, and unknown keys are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, str_min_length=1)
    stages: ClassVar[str] = ""  # the stages that read its keys, but for those that name their own
