"""Dockerfiles against what they copy and the locks that they name; nothing is built here."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gemsmith import __version__
from gemsmith.serve.command import GPU_IMAGE
from gemsmith.serve.settings import PYTHON_VARIABLE

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
TORCH = "requirements/torch.lock"
STACKS = ("train-gpu", "train-gpu-vllm", "train-tpu")


def test_the_dockerfiles_are_found():
    assert {path.stem for path in DOCKERFILES} == {*STACKS}


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda path: path.stem)
def test_what_is_copied_is_there_and_not_ignored(file):
    copied = [source for line in re.findall(r"^COPY (.*)$", file.read_text(), re.M) for source in line.split()[:-1]]
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert len(copied) >= 5
    for source in copied:
        assert (ROOT / source).exists() and source.split("/")[0] in let_in, source


def installs(text: str) -> list[list[str]]:
    """The words of every pip install of a Dockerfile."""
    joined = text.replace("\\\n", " ")
    return [shlex.split(words) for words in re.findall(r"pip install ([^&|;\n]+)", joined)]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda path: path.stem)
def test_every_package_is_pinned_by_a_lock_or_here(file):
    text = file.read_text()
    for words in installs(text):
        locks = [word for word in words if word.startswith("requirements/")]
        assert {*words} - {*locks} <= {"--no-cache-dir", "--no-deps", "--require-hashes", "-r", "."}, words
        assert "--no-deps" in words and ("--require-hashes" in words) == any(lock != TORCH for lock in locks)
    assert any("requirements/train.lock" in words for words in installs(text))
    assert re.search(r"^FROM \S+:v?\d+\.\d+\.\d+\S*$", text, re.M)


@pytest.mark.install
@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda path: path.stem)
def test_pip_finds_what_an_image_installs_from_the_files_that_are_there_by_then(file, tmp_path):
    """Each pip install sees what the lines above it have copied; nothing is installed."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    place = tmp_path / "build"
    asked = 0
    for line in file.read_text().replace("\\\n", " ").splitlines():
        if line.startswith("COPY"):
            *sources, target = line.split()[1:]
            for source in sources:
                into = place / target / Path(source).name if target.endswith("/") else place / target
                into.parent.mkdir(parents=True, exist_ok=True)
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, into, dirs_exist_ok=True)
                else:
                    text = (ROOT / source).read_text()
                    # Without their hashes, for which pip would fetch gigabytes even where it installs nothing.
                    pins = re.findall(r"^\S+==\S+(?: ; [^\\\n]+)?", text, re.M)
                    into.write_text("\n".join(pins) if into.suffix == ".lock" else text)
        for words in installs(line)[:1]:
            given = [word for word in words if word not in ("--no-cache-dir", "--require-hashes")]
            pip = [str(tmp_path / "venv" / "bin" / "pip"), "install", "--dry-run", "--quiet", *given]
            subprocess.run(pip, cwd=place, check=True)
            asked += 1
    assert asked == 2


def test_the_image_that_is_built_is_the_one_that_launches_name():
    build = yaml.safe_load((ROOT / "docker" / "cloudbuild.yaml").read_text())
    assert build["substitutions"]["_VERSION"] == __version__ and build["substitutions"]["_STACK"] in STACKS
    assert build["images"][0].endswith("-docker.pkg.dev/${PROJECT_ID}/gemsmith/${_STACK}:${_VERSION}")


def test_what_is_in_the_image_is_listed_and_scanned_for_known_vulnerabilities():
    build = yaml.safe_load((ROOT / "docker" / "cloudbuild.yaml").read_text())
    _, listing, scan = build["steps"]
    (target,) = [word.removeprefix("docker:") for word in listing["args"] if word.startswith("docker:")]
    assert target == build["images"][0] and re.fullmatch(r"anchore/syft:v\d+\.\d+\.\d+", listing["name"])
    assert re.fullmatch(r"anchore/grype:v\d+\.\d+\.\d+", scan["name"])
    written = [step["args"][-1].partition("=")[2] for step in (listing, scan)]
    assert build["artifacts"]["objects"]["paths"] == written and scan["args"][0] == f"sbom:{written[0]}"


def test_weights_go_from_the_hub_to_a_bucket_by_the_command_that_is_documented():
    text = (ROOT / "docker" / "hub_to_bucket.yaml").read_text()
    build = yaml.safe_load(text)
    fetch, send = (step["args"] for step in build["steps"])
    (locked,) = re.findall(r"^huggingface_hub==\S+", (ROOT / "requirements" / "train.lock").read_text(), re.MULTILINE)
    assert locked in fetch[-1] and fetch[-1].endswith(f"--local-dir {send[-2]}") and send[-1] == "${_TO}"
    asked = {*re.findall(r"\$\{(\w+)\}", str(build["steps"]))}
    (command,) = re.findall(
        r"^gcloud builds .*hub_to_bucket.*$", (ROOT / "docs/how-to/launch.md").read_text(), re.MULTILINE
    )
    given = {*re.findall(r"(_[A-Z]+)=", command)}
    assert asked == {*build["substitutions"], *given} and given == {"_FROM", "_TO"}


def tool(name: str) -> str:
    """Of the environment, or on PATH."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda path: path.stem)
def test_hadolint_has_nothing_to_say(file):
    subprocess.run([tool("hadolint"), str(file)], check=True)


def test_shellcheck_has_nothing_to_say_of_what_is_rendered():
    scripts = sorted((ROOT / "tests" / "launch" / "golden").rglob("*.sh"))
    assert {"startup.sh", "submit.sh", "serve.sh"} <= {script.name for script in scripts}
    subprocess.run([tool("shellcheck"), *map(str, scripts)], check=True)


def test_the_image_with_vllm_is_made_of_the_one_that_serves():
    text = (ROOT / "docker" / "train-gpu-vllm.Dockerfile").read_text()
    assert f"FROM {GPU_IMAGE}\n" in text and PYTHON_VARIABLE in text
