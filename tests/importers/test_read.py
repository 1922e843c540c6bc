"""The files of a run as settings."""

import json
from pathlib import Path

from gemsmith.importers import port

FOLDER = Path(__file__).parent / "settings"
ADAPTER = json.loads((FOLDER / "adapter_config.json").read_text())
SFT = json.loads((FOLDER / "sft_config.json").read_text())


def test_a_folder_gives_its_files(tmp_path, write, of):
    write(tmp_path, ADAPTER, "adapter_config.json")
    write(tmp_path, SFT | {"warmup_steps": 0, "warmup_ratio": 0.03}, "training_args.json")
    write(tmp_path, {"max_steps": 1001, "log_history": []}, "trainer_state.json")
    ported = port([tmp_path])
    assert ported.recipe.optimizer.warmup(1001) == 31
    assert of(ported.rows, "warmup_ratio").status == "mapped"


def test_a_missing_file_a_folder_of_nothing_and_a_pickle_in_one_are_one_line_each(tmp_path, capsys, run):
    assert run(tmp_path / "no.yaml") == 2
    assert run(tmp_path) == 2
    (tmp_path / "training_args.bin").write_bytes(b"PK")
    assert run(tmp_path) == 2
    missing, empty, pickled = capsys.readouterr().err.splitlines()
    assert "does not exist" in missing and "is a folder without adapter_config.json" in empty and "runs code" in pickled
