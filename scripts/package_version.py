"""The version of the package, from the git tag.

hatchling calls `package_version`, and `python scripts/package_version.py` prints it. A commit with the tag v0.2.0 is
version 0.2.0. For other commits the first heading of CHANGELOG.md says which version comes: "0.3.0 (unreleased)", five
commits after the last tag, is 0.3.0.dev5. A copy may know less: in a clone without tags the number of commits is 0, an
archive has only CHANGELOG.md, and a source distribution has its version in PKG-INFO.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADING = re.compile(r"^## (\d+\.\d+\.\d+) \((\w[\w-]*)\)$", re.MULTILINE)
DESCRIBED = re.compile(r"v(\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)-(\d+)-g[0-9a-f]+")


def package_version(root: Path = ROOT) -> str:
    """The version of the source tree in `root`, in the form of PEP 440."""
    if (root / "PKG-INFO").exists():  # a source distribution
        return re.search(r"^Version: (\S+)$", (root / "PKG-INFO").read_text(encoding="utf-8"), re.MULTILINE)[1]
    tag, commits = _last_tag(root)
    if tag and commits == 0:
        return tag
    heading = HEADING.search((root / "CHANGELOG.md").read_text(encoding="utf-8"))
    if heading is None:
        raise ValueError(
            f"{root / 'CHANGELOG.md'} has no heading such as '## 0.2.0 (unreleased)' or '## 0.2.0 (2027-01-31)'"
        )
    version, state = heading.groups()
    if state == "unreleased":
        return f"{version}.dev{commits}"
    return f"{version}.post{commits}" if commits else version


def _last_tag(root: Path) -> tuple[str, int]:
    """The version of the last tag and the commits since then; ("", 0) without git, without tags, or without history."""
    if not (root / ".git").exists():  # git would find the repository around this folder
        return "", 0
    command = ["git", "-C", str(root), "describe", "--tags", "--long", "--match", "v[0-9]*"]
    try:
        found = DESCRIBED.fullmatch(subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip())
    except OSError:
        found = None
    return (found[1], int(found[2])) if found else ("", 0)


if __name__ == "__main__":
    print(package_version())
