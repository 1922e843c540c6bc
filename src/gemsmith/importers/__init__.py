"""GPU recipes of other projects, read and written as Gemsmith's, with a table of what became of every key."""

from gemsmith.importers.convert import Ported, port

__all__ = ["Ported", "port"]
