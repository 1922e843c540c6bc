import pytest

from gemsmith.hardware import find_machine, load_catalogue
from gemsmith.plan.mesh import allowed_tp, choose_mesh
from gemsmith.plan.work import work_of
from gemsmith.recipe import Mesh, build_recipe
from gemsmith.zoo import find_variant


def choose(machine, *, model="gemma4-31b", mesh="auto", rows=8, **train):
    values = {"checkpoint": "x", "data": {"train": "x"}, "train": {"rows_per_step": rows, **train}}
    return choose_mesh(work_of(build_recipe(values), find_variant(model)), find_machine(load_catalogue(), machine), mesh)


@pytest.mark.parametrize(
    ("model", "allowed"),
    [("gemma4-31b", [1, 2, 4]), ("gemma4-26b-a4b", [1, 2]), ("gemma4-12b", [1]), ("gemma4-e4b", [1, 2]), ("gemma4-e2b", [1])],
)
def test_tp_divides_the_kv_heads_of_every_layer(model, allowed):
    assert allowed_tp(find_variant(model)) == allowed


@pytest.mark.parametrize("machine", ["v5p-8", "v6e-8", "2xh100", "8xh100", "tpu7x-4"])
def test_the_31b_fits_where_it_should_on_all_devices(machine):
    choice = choose(machine)
    assert not choice.problems
    assert choice.mesh.fsdp * choice.mesh.tp == find_machine(load_catalogue(), machine).devices


@pytest.mark.parametrize("machine", ["v5e-4", "1xh100", "g4-standard-48"])
def test_the_31b_does_not_fit_and_says_what_it_needs(machine):
    assert "GiB a chip of" in choose(machine).problems[0]


def test_too_few_rows_for_fsdp_make_tp_the_choice():
    assert choose("v6e-8", rows=2).mesh == Mesh(fsdp=2, tp=4)
    assert "train.rows_per_step is 2; fsdp 8 needs a multiple of it" in choose("v6e-8", model="gemma4-12b", rows=2).problems


def test_a_wanted_mesh_is_taken_and_its_faults_are_said():
    assert choose("v5p-8", mesh=Mesh(fsdp=1, tp=4)).mesh == Mesh(fsdp=1, tp=4)
    assert choose("v5p-8", mesh=Mesh(fsdp=1, tp=4)).problems == ()
    assert "is 4 devices (fsdp 1 x tp 4); this machine has 8" in choose("v6e-8", mesh=Mesh(fsdp=1, tp=4)).problems[0]
    assert "gemma4-31b's kv heads allow 1, 2, 4" in choose("v6e-8", mesh=Mesh(fsdp=1, tp=8)).problems[0]


def test_keeping_every_activation_does_not_fit_v5p():
    assert choose("v5p-8", remat="layer").problems == ()
    assert choose("v5p-8", remat="none").problems


def test_bytes_of_a_chip_with_two_devices_are_those_of_both():
    choice = choose("tpu7x-4")
    assert choice.hbm_bytes_per_chip == 2 * choice.memory.total
