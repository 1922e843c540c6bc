def test_the_version_is_printed(gemsmith):
    assert gemsmith("--version")[:2] == (0, "gemsmith, version 0.1.0\n")
