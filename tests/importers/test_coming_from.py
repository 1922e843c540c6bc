"""docs/how-to/coming-from.md says what the importers' rules and defaults say."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gemsmith.arch import find_variant
from gemsmith.importers import table
from gemsmith.importers.projects import AXOLOTL, PEFT, TRL
from gemsmith.recipe.load import default_values
from support.cases import each

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "coming-from.md").read_text(encoding="utf-8")
RULES = {"trl": TRL.rules, "axolotl": AXOLOTL.rules, "peft": PEFT.rules}
DEFAULTS: dict[str, Mapping[str, Any]] = {
    "trl": {**TRL.defaults, **table.read_defaults("trl_lora")},
    "axolotl": AXOLOTL.defaults,
    "peft": PEFT.defaults,
}
# A value of each key whose default, or absence, sets nothing in the recipe.
VALUES: dict[str, Any] = {
    "model_name_or_path": "google/gemma-4-31B-it", "target_modules": ["q_proj"], "max_steps": 7, "load_in_4bit": True,
    "save_total_limit": 3, "warmup_steps": 5, "warmup_ratio": 0.1, "learning_rate": 1e-4, "use_rslora": True, "r": 8,
    "lora_alpha": 8, "sequence_len": 512, "save_steps": 50, "sample_packing": True,
}  # fmt: skip
VALUES |= {"lora_r": 8, "lora_target_modules": ["q_proj"], "peft_use_rslora": True}
VALUES |= dict.fromkeys(("base_model", "base_model_name_or_path"), "google/gemma-4-31B-it")


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head."""
    lines = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0].splitlines()
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]


def pairs() -> Iterator[tuple[str, str, str]]:
    for ours, *theirs in rows("Their words, ours"):
        yield from ((ours, project, key) for project, key in zip(RULES, theirs, strict=True) if key)


def set_by(project: str, key: str) -> set[str]:
    """The recipe's keys that the rule of one of their keys sets."""
    given = {key: VALUES.get(key, DEFAULTS[project].get(key))}
    if key == "load_in_4bit":
        given |= {"bnb_4bit_quant_type": "nf4", "bnb_config_kwargs.bnb_4bit_quant_type": "nf4"}
    config = table.SourceConfig(
        file="f", project=project, given=given, defaults=DEFAULTS[project], devices=1, steps=None,
        variant=find_variant("gemma4-31b"), overridden=frozenset(), adapter_elsewhere=True, backend="trl",
    )  # fmt: skip
    return set(RULES[project][key](table.Setting(key, given[key], config)).sets)


@each(("ours", "project", "key"), [*pairs()])
def test_a_key_of_theirs_sets_the_key_beside_it(ours: str, project: str, key: str) -> None:
    assert ours in set_by(project, key)


def test_the_page_has_every_key_that_means_the_same() -> None:
    assert len([*pairs()]) > 50
    listed = {(project, key) for _, project, key in pairs()}
    settings = {project: table.read_rules(project) | table.read_rules("shared") for project in ("trl", "axolotl")}
    for project, found in (settings | {"peft": table.read_rules("peft")}).items():
        mapped = {key for key in found if set_by(project, key) if key not in ("lora_target_linear",)}
        assert {(project, key) for key in mapped} <= listed


def test_the_defaults_are_those_of_the_recipe_and_of_their_projects() -> None:
    keys = {(ours, project): key for ours, project, key in pairs()}
    found = rows("Other defaults")
    assert len(found) > 8
    for ours, default, trl, axolotl_, _ in found:
        assert default == json.dumps(default_values()[ours]).strip('"'), ours
        for project, said in (("trl", trl), ("axolotl", axolotl_)):
            key = keys.get((ours, project), "")
            known = DEFAULTS[project].get(key)
            allowed = {"", "must be given"} if known is None else {json.dumps(known).strip('"')}
            assert said in allowed, f"{ours}: {project}'s {key}"
