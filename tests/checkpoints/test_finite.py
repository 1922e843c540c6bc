import shutil

import numpy as np
import pytest

from gemsmith.checkpoints.folder import open_checkpoint, refuse_nonfinite_base
from gemsmith.checkpoints.safetensors import count_nonfinite
from gemsmith.errors import CheckpointError

BROKEN = {
    "BF16": (b"\xc0\x7f", b"\x80\xff"),
    "F16": (b"\x01\x7c", b"\x00\xfc"),
    "F32": (b"\x01\x00\x80\xff", b"\x00\x00\x80\x7f"),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_nan_and_infinity_are_found_by_tensor_and_file(tiny_checkpoint, tmp_path, dtype):
    folder = tmp_path / "base"
    shutil.copytree(tiny_checkpoint("tiny-31b", dtype), folder)
    base = open_checkpoint(str(folder))
    refuse_nonfinite_base(base, consequence="nothing is broken")
    name = sorted(name for name in base.places if "layers.3" in name and name.endswith("up_proj.weight"))[0]
    place = base.places[name]
    with place.file.open("r+b") as file:
        for count, bits in enumerate(BROKEN[place.dtype], start=1):
            file.seek(place.end - count * len(bits))
            file.write(bits)
            file.flush()
            assert count_nonfinite(place) == count == np.count_nonzero(~np.isfinite(place.read().astype(np.float32)))
    values = f"2 of {np.prod(place.shape):,} values"
    with pytest.raises(
        CheckpointError,
        match=rf"{name} in {place.file.name} holds NaN or infinity \({values}\), so nothing can be trained",
    ):
        refuse_nonfinite_base(base, consequence="nothing can be trained")
