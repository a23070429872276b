"""Files are written whole or not at all, and nothing else is replaced."""

from __future__ import annotations

import os
import stat

import pytest

import regard as rg
from regard.base.errors import RegardError
from regard.base.whole_files import DRAFT, remove_drafts, whole_file, write_whole


@pytest.mark.parametrize("name", ["a\0b", "\ud800.html", "n" * 300])
def test_a_name_that_no_file_can_have_is_refused_and_leaves_nothing(tmp_path, name):
    with pytest.raises(rg.RegardError, match="cannot be written"):
        write_whole(tmp_path / name, "text")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["a\0b", "\ud800.html", "n" * 300])
def test_no_draft_is_made_for_a_name_that_no_file_can_have(tmp_path, name):
    with pytest.raises(rg.RegardError, match="cannot be written"), whole_file(tmp_path / name, "save") as draft:
        draft.write_text("text")
    assert os.listdir(tmp_path) == []


def test_a_draft_of_another_library_keeps_the_mode_of_the_file(tmp_path):
    private, new = tmp_path / "private", tmp_path / "new"
    private.write_text("old")
    private.chmod(0o600)
    for path in (private, new):
        with whole_file(path, "save") as draft:
            draft.write_text("new")
            draft.chmod(0o640)
    assert private.read_text() == "new"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (private, new)] == [0o600, 0o644]


def test_a_pipe_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(rg.RegardError, match="it is a device or a pipe"):
        write_whole(tmp_path / "pipe", "text")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode) and os.listdir(tmp_path) == ["pipe"]


def test_a_link_stays_a_link_and_the_mode_stays(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o600)
    link.symlink_to(real)
    write_whole(link, "new")
    assert link.is_symlink() and real.read_text() == "new" and stat.S_IMODE(real.stat().st_mode) == 0o600


def test_drafts_of_killed_processes_are_removed_files_and_folders(tmp_path):
    with whole_file(tmp_path / "inner" / "kept", "save") as draft:
        draft.write_text("content")
        is_folder = draft.parent.name.startswith(DRAFT)
    for folder in (tmp_path, tmp_path / "inner"):
        (folder / f"{DRAFT}file").write_text("half")
        (folder / f"{DRAFT}folder").mkdir()
        (folder / f"{DRAFT}folder" / "kept").write_text("half")
    remove_drafts(tmp_path)
    assert is_folder and [path.name for path in sorted(tmp_path.rglob("*"))] == ["inner", "kept"]


@pytest.mark.parametrize("write", [lambda path: write_whole(path, "text"), lambda path: _write_draft(path)])
def test_links_in_a_circle_are_refused_and_stay(tmp_path, write):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(RegardError, match="cannot be written"):
        write(tmp_path / "a")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_symlink()) == ["a", "b"]
    assert len(list(tmp_path.iterdir())) == 2, "no draft is left"


def _write_draft(path):
    with whole_file(path, "save") as draft:
        draft.write_text("text")
