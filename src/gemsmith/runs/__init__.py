"""The run directory: files, stages, records, the resolved recipe."""
