"""Talking to a served model by hand: in the terminal, or on a page with base and tuned side by side."""
