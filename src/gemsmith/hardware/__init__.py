"""Facts about machines: chips, slices, prices, each with source and date. No machine-learning library is imported."""

from gemsmith.hardware.catalog import Catalog, Chip, Machine, Price, find_machine, load_catalog, machines_with

__all__ = ["Catalog", "Chip", "Machine", "Price", "find_machine", "load_catalog", "machines_with"]
