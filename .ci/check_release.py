#!/usr/bin/env python3
"""Stops a release whose tag, version, changelog and files do not agree.

    .ci/check_release.py TAG [PROJECT]

PROJECT is the name of the project on PyPI, empty if it is not known yet: files of another name are not uploaded.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main(tag: str, project: str = "") -> int:
    """Print what does not agree. Returns 1 if something does not."""
    wrong = problems(ROOT, tag, project)
    for one in wrong:
        sys.stderr.write(f"error: {one}\n")
    return int(bool(wrong))


def problems(root: Path, tag: str, project: str) -> list[str]:
    """A sentence for each disagreement."""
    source = (root / "finetune" / "__init__.py").read_text(encoding="utf-8")
    version = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)[0]
    name = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
    found = []
    if tag != f"v{version}":
        found.append(
            f"the tag is {tag} and the version {version}. Set __version__ in finetune/__init__.py, or tag v{version}."
        )
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changes, re.MULTILINE):
        found.append(f"CHANGELOG.md has no section `## [{version}] - YYYY-MM-DD`. Give the release its own.")
    if project and project != name:
        found.append(f"pyproject.toml names the project {name}, and PYPI_PROJECT is {project}. Make them equal.")
    stem = re.sub(r"[-_.]+", "_", name).lower()
    expected = {f"{stem}-{version}.tar.gz", f"{stem}-{version}-py3-none-any.whl"}
    files = {path.name for path in (root / "dist").glob("*")}
    if files != expected:
        found.append(
            f"dist/ has {', '.join(sorted(files)) or 'no files'}, not {', '.join(sorted(expected))}. Run `make dist`."
        )
    return found


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
