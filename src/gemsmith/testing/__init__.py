"""Tiny checkpoints, trained runs and hostile servers: for tests, and as the start of the demo's base."""
