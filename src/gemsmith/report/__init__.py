"""The report: one HTML page, and a table for the terminal, from the records of a run alone."""
