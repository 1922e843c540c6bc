"""Writes the SHA-256 of every file that a pin of the locks may install: `python scripts/lock_hashes.py [LOCK ...]`.

The index is the one that pip is set up to ask. Of a release the wheels for Python 3.11, 3.12 and 3.13 on Linux and
macOS are taken; where one of these Pythons has none on Linux with x86-64, the source archive, too; where there is none
of that either, the pin is an error. requirements/torch.lock has none: where PyTorch for CPUs comes from differs.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.tags import Tag
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version
from pip._internal.commands import create_command
from pip._internal.index.collector import LinkCollector, parse_links
from pip._internal.models.link import Link

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("train", "dev", "serve", "tpu", "gcs", "gpu")
MINORS = (11, 12, 13)
SYSTEMS = ("manylinux", "linux", "macosx")
PROCESSORS = ("x86_64", "aarch64", "arm64", "universal2")


def suits(tag: Tag, minor: int, *, linux: bool = False) -> bool:
    """Whether a wheel of that tag can be installed into CPython 3.`minor` on one of the systems; on Linux x86-64."""
    python, number = tag.interpreter, tag.interpreter[3:]
    if tag.abi == "abi3":
        right = python.startswith("cp3") and number.isdecimal() and int(number) <= minor
    else:
        right = python in ("py3", f"py3{minor}") or (python == f"cp3{minor}" and tag.abi in (python, "none"))
    everywhere = tag.platform == "any"
    if linux:
        return right and (everywhere or (tag.platform.startswith(SYSTEMS[:2]) and tag.platform.endswith("x86_64")))
    return right and (everywhere or (tag.platform.startswith(SYSTEMS) and tag.platform.endswith(PROCESSORS)))


def releases(names: Iterable[str]) -> Iterator[list[Link]]:
    """Of each package all files that pip's indexes list with their SHA-256."""
    command: Any = create_command("download")
    options, _ = command.parse_args([])
    with command.main_context():
        collector = LinkCollector.create(command.get_default_session(options), options=options)
        for name in names:
            addresses = collector.search_scope.get_index_urls_locations(name)
            pages = [page for address in addresses if (page := collector.fetch_response(Link(address)))]
            yield [link for page in pages for link in parse_links(page) if link.hash_name == "sha256"]


def hashes(found: Sequence[Link], pin: str) -> list[str]:
    """The SHA-256 of the files that the pin may install, sorted. Raises SystemExit where a Python has none on Linux.

    After the pin may stand a marker, such as ` ; python_version >= "3.13"`: the other Pythons do not install it.
    """
    name, _, version = pin.partition(" ")[0].partition("==")
    marker = Requirement(pin).marker
    minors = [minor for minor in MINORS if marker is None or marker.evaluate({"python_version": f"3.{minor}"})]
    wheels: dict[str, frozenset[Tag]] = {}
    sources = []
    for link in found:
        try:
            if link.filename.endswith(".whl"):
                distribution, there, _, tags = parse_wheel_filename(link.filename)
                if there == Version(version) and distribution == canonicalize_name(name):
                    wheels[str(link.hash)] = tags
            elif link.filename.endswith(".tar.gz") and parse_sdist_filename(link.filename)[1] == Version(version):
                sources.append(str(link.hash))
        except ValueError:
            continue  # a name of another age
    usable = {sha for sha, tags in wheels.items() if any(suits(tag, minor) for tag in tags for minor in minors)}
    lacking = [m for m in minors if not any(suits(tag, m, linux=True) for tags in wheels.values() for tag in tags)]
    if lacking:
        if not sources:
            sys.exit(f"error: {pin} is there for no Python 3.{lacking[0]} on Linux x86-64; pin another version")
        print(f"{pin}: built from its source for Python {', '.join(f'3.{minor}' for minor in lacking)}", flush=True)
        usable |= {*sources}
    return sorted(usable)


def main(names: Sequence[str]) -> None:
    """Writes each lock again: its pins, and under each the hashes."""
    for name in names or LOCKS:
        file = ROOT / "requirements" / f"{Path(name).stem}.lock"
        pinned = re.findall(r"^\S+==\S+(?: ; [^\\\n]*[^\\\s])?", file.read_text(encoding="utf-8"), re.M)
        found = releases(pin.partition("==")[0] for pin in pinned)
        hashed = {pin: hashes(links, pin) for pin, links in zip(pinned, found, strict=True)}
        lines = (" \\\n    --hash=sha256:".join([pin, *shas]) for pin, shas in hashed.items())
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        print(f"{file.relative_to(ROOT)}: {len(hashed)} packages", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
