"""What a release needs: a version that the tag decides, and a file by which the package is cited."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

from package_version import package_version

ROOT = Path(__file__).parents[2]


def git(folder, *command):
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", folder, *identity, *command], check=True, capture_output=True)


def commit(folder):
    git(folder, "commit", "-q", "--allow-empty", "-m", "a change")


@pytest.fixture
def tree(tmp_path):
    """A repository without tags, whose next version is 0.3.0."""
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.3.0 (unreleased)\n\n## 0.2.0 (2027-01-31)\n")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def test_the_tag_decides(tree):
    git(tree, "tag", "green-base")
    assert package_version(tree) == "0.3.0.dev0"  # the tag of another kind says nothing
    git(tree, "tag", "v0.2.0")
    assert package_version(tree) == "0.2.0"
    commit(tree)
    commit(tree)
    assert package_version(tree) == "0.3.0.dev2"
    git(tree, "tag", "v0.3.0rc1")
    assert package_version(tree) == "0.3.0rc1"
    versions = ["0.2.0", "0.3.0.dev2", "0.3.0rc1", "0.3.0", "0.3.0.post1"]
    assert sorted(reversed(versions), key=Version) == versions


def test_a_shallow_clone_and_an_archive_have_a_version(tree, tmp_path_factory):
    git(tree, "tag", "v0.2.0")
    commit(tree)
    clone, archive = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("archive")
    (tree / "CHANGELOG.md").write_text("## 0.3.0 (unreleased)\n")
    git(tree, "add", "CHANGELOG.md")
    commit(tree)
    git(tree, "clone", "-q", "--depth", "1", f"file://{tree}", clone)
    assert package_version(clone) == "0.3.0.dev0"
    (archive / "CHANGELOG.md").write_text("## 0.2.0 (2027-01-31)\n")
    assert package_version(archive) == "0.2.0"
    (archive / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: regard\nVersion: 0.2.0rc2\n")
    assert package_version(archive) == "0.2.0rc2"


def test_a_changelog_without_a_version_is_refused(tmp_path):
    (tmp_path / "CHANGELOG.md").write_text("## Unreleased\n")
    with pytest.raises(ValueError, match="has no heading such as"):
        package_version(tmp_path)


def test_the_citation_has_what_its_format_requires():
    """The required keys of the Citation File Format 1.2.0, and the facts of pyproject.toml."""
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert [{"name": each["name"]} for each in cited["authors"]] == project["authors"]
    assert cited["keywords"] == project["keywords"] and cited["license"] == project["license"]
    assert project["description"] in f"{cited['title']}.".replace("any", "Any", 1)
    optional = {
        "abstract",
        "commit",
        "contact",
        "date-released",
        "doi",
        "identifiers",
        "keywords",
        "license",
        "references",
    }
    optional |= {"license-url", "preferred-citation", "repository", "repository-code", "type", "url", "version"}
    assert set(cited) <= optional | {"cff-version", "message", "title", "authors"}
