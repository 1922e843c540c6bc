import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from gemsmith.errors import DataError, MachineError
from gemsmith.images import workers
from gemsmith.images.check import validate_image
from gemsmith.images.decode import InvalidImageError, make_rgb
from gemsmith.images.patches import PatchConfig, make_patches
from gemsmith.images.workers import check_images, decode_ahead
from support.images import image_bytes

PATCHING = PatchConfig(budget=70, patch=4)


@pytest.fixture
def images(tmp_path):
    for seed in range(6):
        (tmp_path / f"{seed}.png").write_bytes(image_bytes(10 + seed, 8, seed=seed))
    return [validate_image(str(tmp_path / f"{seed}.png"), PATCHING) for seed in range(6)]


def test_images_are_looked_at_in_order_and_faults_are_among_them(tmp_path, images):
    sources = [images[0].path, b"no image", image_bytes(3, 3), str(tmp_path / "none"), images[5].path]
    found = list(check_images(sources, PATCHING, processes=2))
    assert found[0] == images[0] and found[4] == images[5] and found[2].width == 3
    assert [fault.reason for fault in found if isinstance(fault, InvalidImageError)] == ["not an image", "missing"]


def test_patches_come_with_their_step_in_order(images):
    steps = [("a", images[:2]), ("b", []), ("c", images[2:])]
    found = list(decode_ahead(steps, PATCHING, processes=2))
    assert [(item, len(patches)) for item, patches in found] == [("a", 2), ("b", 0), ("c", 4)]
    for image, patches in zip(images, found[0][1] + found[2][1], strict=True):
        plain = make_patches(make_rgb(Path(image.path).read_bytes()), PATCHING)
        assert np.array_equal(patches.values, plain.values) and np.array_equal(patches.positions, plain.positions)
        assert patches.soft_tokens == image.soft_tokens


def test_no_more_steps_are_decoded_than_asked_for(images):
    asked = []

    def steps():
        for step in range(600):
            asked.append(step)
            yield step, images[:1]

    decoded = decode_ahead(steps(), PATCHING, processes=1, ahead=3)
    for step in range(4):
        assert next(decoded)[0] == step
        assert len(asked) == step + 4
    decoded.close()


def test_a_file_that_changed_ends_the_step_that_needs_it(images):
    Path(images[1].path).write_bytes(image_bytes(seed=9))
    steps = decode_ahead([(step, [images[step]]) for step in range(2)], PATCHING, processes=1)
    assert next(steps)[0] == 0
    with pytest.raises(DataError, match=r"1.png: has changed"):
        next(steps)


def killing(monkeypatch, code: str) -> None:
    command = (*workers._COMMAND[:-1], f"{code}; {workers._COMMAND[-1]}")
    monkeypatch.setattr(workers, "_COMMAND", command)


def test_a_decoder_that_crashes_is_a_fault_of_its_image_and_of_no_other(monkeypatch, images):
    killing(
        monkeypatch,
        "import os, signal, gemsmith.images.check as check; kept = check.validate_image; "
        "check.validate_image = lambda source, patching: kept(source, patching) if source != b'crash' "
        "else os.kill(os.getpid(), signal.SIGSEGV)",
    )
    found = list(check_images([images[0].path, b"crash", images[1].path], PATCHING, processes=1))
    assert found[0] == images[0] and found[2] == images[1]
    assert (found[1].reason, found[1].line) == ("damaged", "crashes its decoder (SIGSEGV)")


def test_a_decoder_that_crashes_in_training_is_one_line(monkeypatch, images):
    killing(monkeypatch, f"import os; os.kill(os.getpid(), {int(signal.SIGABRT)})")
    with pytest.raises(DataError, match=r"0.png: crashes its decoder \(SIGABRT\); take it out"):
        list(decode_ahead([("a", images[:1])], PATCHING, processes=1))


def test_a_process_that_is_killed_for_memory_is_no_fault_of_the_image(monkeypatch, images):
    killing(monkeypatch, f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})")
    with pytest.raises(MachineError, match=r"0.png: the process that decoded it was killed; where memory ran out"):
        list(check_images([images[0].path], PATCHING, processes=1))


def test_no_process_or_thread_is_left(images):
    before = threading.active_count()
    decoded = decode_ahead([(step, images) for step in range(9)], PATCHING, processes=2)
    next(decoded)
    decoded.close()
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    for _ in range(600):
        if threading.active_count() == before and not children.read_text().split():
            break
        time.sleep(0.1)
    assert threading.active_count() == before and not children.read_text().split()
