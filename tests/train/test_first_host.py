import importlib.util

import pytest

from gemsmith.train.jax import upstream
from gemsmith.train.stage import is_later_host

NAMES = ("JAX_PROCESS_ID", "WORLD_SIZE", "RANK")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"JAX_PROCESS_ID": "0"}, False),
        ({"JAX_PROCESS_ID": "3"}, True),
        ({"WORLD_SIZE": "2", "RANK": "0"}, False),
        ({"WORLD_SIZE": "2", "RANK": "1"}, True),
        ({"RANK": "1"}, False),
    ],
)
def test_of_processes_that_train_together_all_but_one_are_later_hosts(monkeypatch, variables, expected):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_later_host() is expected


@pytest.mark.parametrize("number", [0, 1])
def test_on_a_tpu_slice_jax_says_which_host_this_is(monkeypatch, number):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(upstream, "tpu_host_number", lambda: number)
    assert is_later_host() is bool(number)
