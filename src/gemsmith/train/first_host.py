"""Which of the processes that train together writes to the run directory, known before they have joined."""

import importlib.util
import os


def is_later_host() -> bool:
    """Whether this process trains with others and is not the first: in JAX, as torchrun's, or on a TPU slice."""
    if number := os.environ.get("JAX_PROCESS_ID"):
        return number != "0"
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        return os.environ["RANK"] != "0"
    if importlib.util.find_spec("libtpu") is None:
        return False
    from gemsmith.train.tunix.upstream import tpu_host_number

    return tpu_host_number() > 0
