"""Tiny checkpoints, trained runs, hostile servers and a cloud on this machine: for tests and the demos."""
