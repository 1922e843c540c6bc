"""A run directory on a disk that is full, read-only or gone: one line each time, and the same command goes on later."""

import subprocess

import pytest


def errors(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("error: ")]


def test_a_disk_that_is_full_at_any_moment_is_one_line_and_the_same_command_goes_on(
    gemsmith, recipe, small_disk, tmp_path, record_property
):
    disk, ends = small_disk(tmp_path / "disk", "4k"), []
    for size in range(4, 200, 8):
        subprocess.run(["mount", "-o", f"remount,size={size}k", str(disk)], check=True)
        code, _, err = gemsmith("run", recipe.name, "--run", disk / "run", "--until", "data")
        ends.append(code)
        if code == 0:
            break
        assert code == 2 and len(errors(err)) == 1 and "Traceback" not in err, f"{size}k: {err}"
        assert "no space left" in errors(err)[0].lower(), f"{size}k: {err}"
    assert ends[-1] == 0 and len(ends) > 3
    record_property("tries", len(ends) - 1)


def test_a_run_directory_that_becomes_read_only_is_one_line(gemsmith, recipe, small_disk, tmp_path):
    disk = small_disk(tmp_path / "disk", "5m")
    assert gemsmith("run", recipe.name, "--run", disk / "run", "--until", "plan")[0] == 0
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for verb in ("data", "train", "run"):
        code, _, err = gemsmith(verb, disk / "run")
        assert code == 2 and len(errors(err)) == 1 and "read-only file system" in err, f"{verb}: {err}"
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert gemsmith("data", disk / "run")[0] == 0


@pytest.mark.parametrize("verb", ["data", "run"])
def test_a_run_directory_that_has_gone_is_one_line(gemsmith, recipe, small_disk, tmp_path, verb):
    disk = small_disk(tmp_path / "disk", "5m")
    assert gemsmith("run", recipe.name, "--run", disk / "run", "--until", "plan")[0] == 0
    subprocess.run(["umount", str(disk)], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(disk)], check=True)  # the fixture unmounts it
    code, _, err = gemsmith(verb, disk / "run")
    assert code == 2 and len(errors(err)) == 1 and "Traceback" not in err, err
