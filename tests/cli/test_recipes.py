import sys

import pytest


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed_for_a_shell(gemsmith, shell):
    if shell == "bash" and sys.platform != "linux":
        pytest.skip("click asks the machine's bash for its version")
    code, out, _ = gemsmith("completion", shell)
    assert code == 0 and "_GEMSMITH_COMPLETE" in out
