"""Facts about machines: chips, slices, prices, each with its source and date.

No machine-learning library is imported.
"""

from gemsmith.hardware.catalogue import Catalogue, Chip, Machine, Price, load_catalogue, own_catalogue, own_files
from gemsmith.hardware.names import find_machine, machines_with
from gemsmith.hardware.prices import billed_hours, doubts_of

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
