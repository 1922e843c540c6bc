"""The problems of NVlabs/verilog-eval, spec to RTL: a folder of Prob…_prompt.txt, Prob…_ref.sv and Prob…_test.sv."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from gemsmith.errors import DataError
from gemsmith.files import regular_file

_ENDS = {"prompt": "_prompt.txt", "reference": "_ref.sv", "testbench": "_test.sv"}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One specification, the module that meets it, and the testbench that compares a TopModule with that."""

    name: str
    prompt: str
    reference: str
    testbench: str


def read_problems(folder: Path) -> tuple[Problem, ...]:
    """The problems in a folder, or in its dataset_spec-to-rtl, by name. Raises DataError."""
    if not folder.is_dir():
        raise DataError(f"dataset {folder}: is not a folder; give that of verilog-eval's dataset_spec-to-rtl")
    if not any(folder.glob(f"*{_ENDS['testbench']}")) and (folder / "dataset_spec-to-rtl").is_dir():
        folder = folder / "dataset_spec-to-rtl"
    names = sorted({file.name.removesuffix(end) for end in _ENDS.values() for file in folder.glob(f"*{end}")})
    if not names:
        raise DataError(
            f"dataset {folder}: holds no problem; each is three files: NAME_prompt.txt, NAME_ref.sv and NAME_test.sv"
        )
    return tuple(
        Problem(name=name, **{part: _read(folder / f"{name}{end}") for part, end in _ENDS.items()}) for name in names
    )


def problems_sha256(problems: tuple[Problem, ...]) -> str:
    """A digest of every problem's name and files."""
    digest = hashlib.sha256()
    for problem in problems:
        for text in (problem.name, problem.prompt, problem.reference, problem.testbench):
            digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


def _read(file: Path) -> str:
    try:
        return regular_file(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"dataset {file.parent}: lacks {file.name}; copy the dataset again") from None
    except UnicodeDecodeError:
        raise DataError(f"dataset {file}: is not UTF-8 text; copy the dataset again") from None
