"""Scores of the base and the tuned model on held-out rows, through the served API."""
