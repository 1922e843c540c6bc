import pickle
import subprocess
import sys
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from gemsmith.images import decode as rgb
from gemsmith.images.decode import InvalidImageError, is_animated, make_rgb, png_bytes, read_bytes
from support.cases import each
from support.images import image_bytes, image_values, unusable_images, usable_images

USABLE, UNUSABLE = usable_images(), unusable_images()


@each("name", USABLE)
def test_every_kind_becomes_rgb_by_the_rule(name):
    data, first = USABLE[name]
    made = make_rgb(data)
    assert made.mode == "RGB" and np.asarray(made)[0, 0].tolist() == first


@each("name", UNUSABLE)
def test_every_fault_has_its_reason_and_one_line(name):
    data, reason = UNUSABLE[name]
    with pytest.raises(InvalidImageError) as error:
        make_rgb(data)
    assert error.value.reason == reason
    assert error.value.line and "\n" not in error.value.line


@pytest.mark.parametrize("orientation", range(2, 9))
def test_each_orientation_of_exif_is_undone(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    made = np.asarray(make_rgb(image_bytes(3, 2, exif=exif)))
    plain = image_values(3, 2)
    undone = {
        2: plain[:, ::-1],
        3: plain[::-1, ::-1],
        4: plain[::-1],
        5: plain.transpose(1, 0, 2),
        6: np.rot90(plain, -1),
        7: plain.transpose(1, 0, 2)[::-1, ::-1],
        8: np.rot90(plain),
    }
    assert np.array_equal(made, undone[orientation])


def test_half_transparent_pixels_are_mixed_with_white_as_vllm_mixes_them():
    stream = BytesIO()
    Image.new("RGBA", (1, 1), (100, 0, 0, 128)).save(stream, "PNG")
    assert np.asarray(make_rgb(stream.getvalue()))[0, 0].tolist() == [177, 127, 127]


@each("name", USABLE)
def test_the_png_that_is_sent_on_has_the_same_pixels_and_nothing_else(name):
    made = make_rgb(USABLE[name][0])
    sent = png_bytes(made)
    with Image.open(BytesIO(sent)) as opened:
        assert opened.mode == "RGB" and not opened.getexif() and not opened.info
        assert np.array_equal(np.asarray(opened), np.asarray(made))
    assert np.array_equal(np.asarray(make_rgb(sent)), np.asarray(made))


def test_more_than_one_frame_is_told():
    assert [name for name in USABLE if is_animated(USABLE[name][0])] == ["animated"]


def test_a_file_that_is_not_there_or_is_a_folder_is_missing(tmp_path):
    for path in (tmp_path / "none.png", tmp_path):
        with pytest.raises(InvalidImageError) as error:
            read_bytes(str(path))
        assert error.value.reason == "missing"


def test_a_huge_file_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(rgb, "MAX_FILE_BYTES", 10)
    (tmp_path / "a.png").write_bytes(bytes(11))
    with pytest.raises(InvalidImageError, match="too large"):
        read_bytes(str(tmp_path / "a.png"))


def test_a_fault_survives_the_way_from_another_process():
    fault = pickle.loads(pickle.dumps(InvalidImageError("damaged", "cannot be decoded")))
    assert (fault.reason, fault.line) == ("damaged", "cannot be decoded")


def test_no_program_is_run_for_any_format():
    """Pillow knows EPS, for which it starts Ghostscript."""
    code = "from gemsmith.images.decode import FORMATS; print(*FORMATS)"
    formats = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "EPS" not in formats and {"PNG", "JPEG"} <= {*formats}
