from gemsmith.launch.upload import GB, disk_bytes, format_footprint


def test_merged_weights_and_saved_steps_are_what_a_large_model_holds(launched):
    held = disk_bytes(launched(stages="plan,data,train,export"))
    assert 61 < held["merged weights"] / GB < 66 and 20 < held["saved steps"] / GB < 25
    assert "merged weights" not in disk_bytes(launched(stages="plan,data,train"))
    assert "merged weights 63" in format_footprint(held)


def test_a_base_in_a_mounted_bucket_is_not_copied(launched):
    assert "the base" not in disk_bytes(launched())
    assert "the base" in disk_bytes(launched("tpu-vm"))
    assert "the base" in disk_bytes(launched(overrides=("checkpoint=google/gemma-4-31B-it",), stages="plan,data,train"))
