"""The JAX backend: Gemma 4 with Qwix's adapters in Tunix's PeftTrainer."""

import sys

# Tunix imports tensorboardX, which imports torch where that is installed: 2 s of each start, and of no use here.
if "torch" not in sys.modules:
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import tensorboardX.writer  # noqa: F401
    finally:
        del sys.modules["torch"]
