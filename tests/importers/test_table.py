"""One row for each key: what the rules make of a value."""

from pathlib import Path

import yaml

from gemsmith.importers import port

FOLDER = Path(__file__).parent / "settings"
AXOLOTL = yaml.safe_load((FOLDER / "axolotl.yaml").read_text())


def test_a_key_that_no_rule_knows_is_a_difference_unless_it_is_not_set(tmp_path, write):
    ported = port([write(tmp_path, AXOLOTL | {"unheard_of": 3, "unheard": None})])
    assert [row.key for row in ported.differences] == ["unheard_of"]
