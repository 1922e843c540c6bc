from gemsmith.launch.request import GB, disk_bytes, downloads_weights, format_footprint


def test_merged_weights_and_saved_steps_are_what_a_large_model_holds(launched):
    held = disk_bytes(launched(stages="plan,data,train,export"), with_weights=False)
    assert 61 < held["merged weights"] / GB < 66 and 20 < held["saved steps"] / GB < 25
    assert "merged weights" not in disk_bytes(launched(stages="plan,data,train"), with_weights=False)
    assert "merged weights 63" in format_footprint(held)


def test_a_base_in_a_mounted_bucket_is_not_copied(launched):
    assert not downloads_weights(launched())
    assert downloads_weights(launched("tpu-vm"))
    assert downloads_weights(launched(overrides=("checkpoint=google/gemma-4-31B-it",), stages="plan,data,train"))
