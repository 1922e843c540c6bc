"""What each record was made from."""

from gemsmith.analysis.summary import read_findings
from gemsmith.report import sections as provenance


def test_values_of_the_recipe_are_parted_from_their_reasons(make_run):
    run = make_run(steps=2)
    made = provenance.make_provenance(read_findings(run))
    assert ("model: null", "# what the checkpoint is") in made["recipe_lines"]
    assert list(made["records"]) == ["plan", "data", "train", "export", "verify", "serve", "bench", "eval"]
    run.recipe_file.unlink()
    assert provenance.make_provenance(read_findings(run))["recipe_lines"] == []
