"""What Gemsmith's environments and images are made of, with licenses: CycloneDX, and a list of licenses by package.

`make sbom` writes build/sbom.cdx.json and build/licenses.txt. The packages are those of requirements/*.lock, their
licenses those of the metadata that is installed here, or else that pip's index has.
"""

import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from gemsmith.system.version import __version__

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
_CLASSIFIER = "License :: OSI Approved :: "
# A lock -> what is said of its packages: those of dev.lock are in no image and no user's environment.
SCOPES = {"train": "required", "torch": "required", "serve": "required", "tpu": "optional", "gcs": "optional"}
SCOPES |= {"gpu": "optional", "dev": "excluded"}


def read_pins() -> dict[str, str]:
    """`name==version` of every lock -> its scope, the widest where several locks have it."""
    found: dict[str, str] = {}
    for lock, scope in SCOPES.items():
        for pin in re.findall(r"\S+==\S+", (ROOT / "requirements" / f"{lock}.lock").read_text(encoding="utf-8")):
            found.setdefault(pin, scope)
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def installed(folders: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """`name==version`, the name canonical -> metadata of what is installed in these folders of packages."""
    every = metadata.distributions(path=[*map(str, folders)])
    return {_key(each.metadata["Name"], each.version): each.metadata.json for each in every}


def asked(pins: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The same of pins that are not installed, as pip's index says it; nothing is installed."""
    options = ["--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-"]
    # For a pin of the last Python alone; a target is asked for beside it, and left as it is.
    options += ["--python-version", "3.13", "--ignore-requires-python", "--target", str(BUILD)]
    done = subprocess.run([sys.executable, "-m", "pip", "install", *options, *pins], stdout=subprocess.PIPE, check=True)
    every = [item["metadata"] for item in json.loads(done.stdout)["install"]]
    return {_key(each["name"], each["version"]): each for each in every}


def _key(name: str, version: str) -> str:
    return f"{canonicalize_name(name)}=={version.partition('+')[0]}"


def read_license(found: Mapping[str, Any]) -> str:
    """What a package's metadata says of its license: an expression of SPDX, a name, or `not stated`."""
    classified = [
        each.removeprefix(_CLASSIFIER) for each in found.get("classifier", []) if each.startswith(_CLASSIFIER)
    ]
    text = (found.get("license") or "").strip().removeprefix("UNKNOWN")
    stated = found.get("license_expression") or (text if 0 < len(text) < 80 and "\n" not in text else "")
    return stated or " AND ".join(classified) or (text.splitlines() or ["not stated"])[0].strip()


def make_sbom(licenses: Mapping[str, str], scopes: Mapping[str, str]) -> dict[str, Any]:
    """The CycloneDX document of these pins."""
    components = []
    for pin, license_name in licenses.items():
        name, _, version = pin.partition("==")
        purl = f"pkg:pypi/{canonicalize_name(name)}@{version}"
        component: dict[str, Any] = {
            "type": "library",
            "bom-ref": purl,
            "name": name,
            "version": version,
            "scope": scopes[pin],
        }
        components.append(component | {"purl": purl, "licenses": [{"license": {"name": license_name}}]})
    program: dict[str, Any] = {"type": "application", "name": "gemsmith", "version": __version__}
    program["licenses"] = [{"license": {"id": "Apache-2.0"}}]
    head = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1}
    return head | {"metadata": {"component": program}, "components": components}


def main() -> None:
    """Writes both files."""
    scopes = read_pins()
    keys = {pin: _key(*pin.split("==")) for pin in scopes}
    folders = [*ROOT.glob(".venv/lib/python3*/site-packages"), *ROOT.glob(".venv-serve/lib/python3*/site-packages")]
    found = {key: data for folder in folders for key, data in installed([folder]).items()}
    if missing := [pin for pin, key in keys.items() if key not in found]:
        found |= asked(missing)
    licenses = {pin: read_license(found[key]) for pin, key in keys.items()}
    BUILD.mkdir(exist_ok=True)
    (BUILD / "sbom.cdx.json").write_text(json.dumps(make_sbom(licenses, scopes), indent=1) + "\n", encoding="utf-8")
    by_license = defaultdict(list)
    for pin, name in licenses.items():
        by_license[name].append(pin)
    lines = [f"{name}: {', '.join(pins)}" for name, pins in sorted(by_license.items(), key=lambda item: -len(item[1]))]
    (BUILD / "licenses.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"build/sbom.cdx.json, build/licenses.txt: {len(licenses)} packages, {len(lines)} licenses")


if __name__ == "__main__":
    main()
