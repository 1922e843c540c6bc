import pytest

from gemsmith.errors import RunError
from gemsmith.launch.sync import fetch_home, fetch_records
from gemsmith.system.storage import Bucket

NAMES = ("recipe.yaml", "train.json", "adapter/adapter_config.json", "merged/a.json", "data/rows", "logs/l")


@pytest.fixture
def root(tmp_path):
    (tmp_path / "store").mkdir()
    bucket = Bucket(f"file://{tmp_path}/store")
    for name in NAMES:
        bucket.write(f"run/{name}", b"{}")
    return bucket.url


def test_records_adapter_and_logs_come_home(root, tmp_path):
    assert fetch_home(root, tmp_path / "home", merged=False) == 4
    assert (tmp_path / "home" / "adapter" / "adapter_config.json").exists()
    assert fetch_home(root, tmp_path / "home", merged=True) == 6


def test_a_report_needs_the_records_alone(root, tmp_path):
    fetch_records(root, tmp_path / "home")
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["recipe.yaml", "train.json"]


def test_another_folder_is_not_written_into(root, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").touch()
    with pytest.raises(RunError, match="is not empty and holds no"):
        fetch_home(root, tmp_path / "home", merged=False)


def test_a_launch_that_has_not_begun_is_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="holds no run yet"):
        fetch_home(f"file://{tmp_path}/empty", tmp_path / "home", merged=False)
