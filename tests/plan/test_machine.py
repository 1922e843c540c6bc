import pytest

from gemsmith.plan.machine import RUNTIME, describe_changes
from gemsmith.plan.stage import plan_only
from gemsmith.runs.plan_records import MachinePlan


def test_the_parts_are_the_peak_and_the_runtime_beside_it(recipe):
    machines = plan_only(recipe(), "all").machines
    for machine in machines:
        held = sum(machine.parts.values()) - machine.parts[RUNTIME]
        assert held == pytest.approx(machine.hbm_bytes_per_chip, abs=20), machine.name
    assert any(machine.fits for machine in machines) and not all(machine.fits for machine in machines)


def test_a_machine_fits_when_its_parts_add_up_to_no_more_than_it_has(recipe):
    for machine in plan_only(recipe(), "all").machines:
        enough = sum(machine.parts.values()) <= machine.hbm_limit_bytes_per_chip
        assert machine.fits == enough == (machine.exceeded_by is None), machine.name


def test_what_is_too_large_is_named(recipe):
    parts = {machine.name: machine.exceeded_by for machine in plan_only(recipe(), "h100,l4,v5p-8").machines}
    assert parts == {"1xh100": "saved activations", "1xl4": "frozen weights", "v5p-8": None}


def test_the_fix_is_planned_with_hours_and_dollars(recipe):
    (machine,) = plan_only(recipe(), "h100").machines
    assert machine.hours is None and machine.fix.hours[0] > 0
    assert machine.fix.hbm_bytes_per_chip < 0.95 * machine.hbm_limit_bytes_per_chip
    assert machine.fix.usd == pytest.approx([10.98 * hours for hours in machine.fix.hours], rel=1e-3)


def test_what_the_start_takes_is_named(recipe):
    (machine,) = plan_only(recipe(), "v5p-8").machines
    assert "start, estimated: load 61 to 307 s, compile 180 to 480 s" in machine.notes


def test_evaluations_and_answers_are_an_item_of_the_hours(recipe, tmp_path):
    (tmp_path / "held.jsonl").write_text('{"prompt": "p", "response": "r"}\n' * 16)
    data = {"data.eval": str(tmp_path / "held.jsonl"), "data.packing": False}
    without = recipe(max_steps=100, remat="layer", global_batch_size=4).override(data)
    with_loss = without.override({"train.eval_steps": 25})
    with_answers = with_loss.override({"train.sample_answers": 3})
    plans = [plan_only(each, "v5p-8").machines[0] for each in (without, with_loss, with_answers)]
    note = "evaluations, estimated: 4 of 4 batches"
    assert [sum(each.startswith(note) for each in plan.notes) for plan in plans] == [0, 1, 1]
    assert any("4 batches, and 3 answers of up to 64 tokens: " in each for each in plans[2].notes)
    # A weight and token: 2 FLOPs forward, of 6 with layers recomputed and no gradient of the base.
    assert 16 * 0.28 < plans[1].evaluations_s[0] / plans[1].step_s[0] < 16 * 0.34
    more = [3600 * (plan.hours[1] - plans[0].hours[1]) for plan in plans]
    assert more == pytest.approx([plan.evaluations_s[1] for plan in plans], rel=0.02, abs=0.02 * more[2])
    elsewhere = plan_only(with_loss.override({"data.eval": "hub:a/b"}), "v5p-8").machines[0]
    assert elsewhere.evaluations_s == (0, 0) and any("time of train.eval_steps is not in" in n for n in elsewhere.notes)


def test_an_old_price_is_marked_in_the_plan(recipe):
    (machine,) = plan_only(recipe(), "8xh200").machines
    assert any("not checked, older than 90 days" in note for note in machine.notes)


def test_slices_and_what_goes_between_them_are_named(recipe):
    one, two = plan_only(recipe(), "v6e-16,2xv6e-16").machines
    (note,) = (note for note in two.notes if "slices" in note and "each" in note)
    assert note.startswith("2 slices, each with whole weights") and "400 Gbit/s a host" in note
    assert not any("whole weights" in note for note in one.notes)
    assert two.price.usd_per_hour == 2 * one.price.usd_per_hour and two.compiled is None


def test_a_plan_of_an_earlier_version_still_opens():
    old = {"name": "v5p-8", "chips": 4, "fits": True, "hbm_bytes_per_chip": 1, "hbm_limit_bytes_per_chip": 2}
    old |= {"step_s": [1, 2], "hours": [1, 2], "usd": None, "mesh": {"fsdp": 4}}
    opened = MachinePlan.model_validate(old)
    assert opened.parts == {} and opened.fix is None and opened.usd_per_million_tokens is None


def test_changes_read_as_they_are_written():
    changes = {"train.gradient_accumulation_steps": 4, "train.mesh": {"replica": 1, "fsdp": 1, "sequence": 2, "tp": 2}}
    assert (
        describe_changes(changes) == "train.gradient_accumulation_steps: 4, train.mesh: {fsdp: 1, sequence: 2, tp: 2}"
    )


def test_the_parts_of_a_cpu_add_up_with_python_among_them(recipe):
    (machine,) = plan_only(recipe("gemma4-e2b", machines=("cpu",), global_batch_size=1)).machines
    held = sum(size for name, size in machine.parts.items() if name != "runtime")
    assert held == pytest.approx(machine.hbm_bytes_per_chip) and machine.parts["process"] > 1.1 * 2**30
    assert "Python, libraries and compilation in it" in machine.notes[-1]
