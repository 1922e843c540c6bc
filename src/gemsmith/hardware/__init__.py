"""Facts about machines: chips, slices, prices, each with its source and date.

No machine-learning library is imported.
"""

from gemsmith.hardware.catalog import (
    Catalogue,
    Chip,
    Machine,
    Price,
    billed_hours,
    doubts_of,
    load_catalogue,
    own_catalogue,
    own_files,
)
from gemsmith.hardware.lookup import find_machine, machines_with

__all__ = [
    "Catalogue",
    "Chip",
    "Machine",
    "Price",
    "billed_hours",
    "doubts_of",
    "find_machine",
    "load_catalogue",
    "machines_with",
    "own_catalogue",
    "own_files",
]
