"""Facts about machines: chips, slices, prices, each with its source and date.

No machine-learning library is imported.
"""

from gemsmith.hardware.catalogue import Catalogue, Chip, Machine, Price, find_machine, load_catalogue

__all__ = ["Catalogue", "Chip", "Machine", "Price", "find_machine", "load_catalogue"]
