import inspect

from gemsmith.launch import provider as target
from gemsmith.launch.providers import TARGETS, cloud_run, tpu_vm


def test_modules_have_all_that_a_target_is_asked_for():
    asked = {name for name, value in vars(target.Target).items() if inspect.isfunction(value)} - {"__init__"}
    asked = {name for name in asked if not name.startswith("_")}
    assert len(asked) == 8
    assert len(TARGETS) == 4
    for module in TARGETS.values():
        assert all(callable(getattr(module, name)) for name in asked)
        assert {type(module.MOUNTS_WEIGHTS), type(module.SUPPORTS_ANY_MACHINE)} == {bool}
    assert TARGETS["cloud-run"] is cloud_run and TARGETS["tpu-vm"] is tpu_vm


def test_a_request_knows_its_bucket(launched):
    request = launched()
    assert request.bucket == "runs"
