import pytest

from gemsmith.errors import InputError
from gemsmith.launch.upload import LOCKS, WHEEL, check_wheel


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (LOCKS, "has no wheel; it must have"),
        ((*LOCKS, "gemsmith-0.0.9-py3-none-any.whl"), "has gemsmith-0.0.9-py3-none-any.whl; it must have"),
        ((*LOCKS, WHEEL, "a.whl"), f"has a.whl, {WHEEL}; it must have {WHEEL} alone"),
        ((*LOCKS[1:], WHEEL), "has no train.lock; make build/wheel"),
    ],
)
def test_what_a_folder_lacks_is_said(tmp_path, files, said):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(InputError, match="--wheel") as caught:
        check_wheel(tmp_path)
    assert said in str(caught.value)


def test_a_folder_that_is_not_there_is_said(tmp_path):
    with pytest.raises(InputError, match="is no folder; make build/wheel"):
        check_wheel(tmp_path / "none")


@pytest.mark.parametrize("on", ["cloud-run", "gke", "sky"])
def test_targets_that_run_containers_refuse_it(launched, tmp_path, on):
    with pytest.raises(
        InputError, match=f"--provider {on} runs a container; leave it out, or choose --provider tpu-vm"
    ):
        launched(on, wheel=tmp_path)


def test_an_image_beside_it_is_refused(launched, tmp_path):
    with pytest.raises(InputError, match="--wheel: does not go with --image"):
        launched("tpu-vm", wheel=tmp_path, image="mine")
