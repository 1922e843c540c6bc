import pickle
import subprocess
import sys
from functools import partial

from gemsmith.images.check import validate_image
from gemsmith.images.decode import InvalidImageError
from gemsmith.images.patches import PatchConfig
from support.images import image_bytes

PATCHING = PatchConfig(budget=70)


def test_each_request_is_answered_in_turn_until_there_are_no_more():
    calls = (partial(validate_image, data, PATCHING) for data in (image_bytes(), b"", image_bytes(5, 5)))
    requests = b"".join(map(pickle.dumps, calls))
    command = [sys.executable, "-P", "-c", "from gemsmith.images.workers import main; main()"]
    replies = subprocess.run(command, input=requests, capture_output=True, check=True).stdout
    found = []
    while replies:
        found.append(pickle.loads(replies))
        replies = replies[len(pickle.dumps(found[-1], pickle.HIGHEST_PROTOCOL)) :]
    assert [getattr(reply, "width", None) for reply in found] == [12, None, 5]
    assert isinstance(found[1], InvalidImageError) and found[1].reason == "empty"
