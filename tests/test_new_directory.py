"""Directories that appear when they are whole: what they replace, and what they must not."""

from __future__ import annotations

import os
import shutil

import pytest

from trtllm_treewy.cli import main
from trtllm_treewy.new_directory import new_directory


def make(output, text="new", **options):
    with new_directory(output, **options) as folder:
        (folder / "file").write_text(text)


@pytest.fixture
def out(tmp_path):
    """An earlier directory."""
    make(tmp_path / "out", "old")
    return tmp_path / "out"


def test_it_replaces_what_is_there(out, tmp_path):
    make(out)
    assert (out / "file").read_text() == "new"
    assert os.listdir(tmp_path) == ["out"]


def test_an_error_leaves_what_was_there_and_no_folders(out, tmp_path):
    for place in (out, tmp_path / "a" / "b"):
        with pytest.raises(KeyboardInterrupt), new_directory(place):
            raise KeyboardInterrupt
    assert (out / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


def test_a_link_stays_one_and_its_folder_is_replaced(out, tmp_path):
    (tmp_path / "link").symlink_to(out)
    (tmp_path / "dangling").symlink_to(tmp_path / "later")
    make(tmp_path / "link")
    make(tmp_path / "dangling")
    assert (out / "file").read_text() == (tmp_path / "later" / "file").read_text() == "new"
    assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["dangling", "later", "link", "out"]


def test_a_file_is_replaced_too(tmp_path):
    (tmp_path / "out").write_text("")
    make(tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("name", ["out", "a[1]", "*"])
def test_what_killed_processes_left(tmp_path, name):
    """Half a directory goes, and the one before it comes back where it was moved away."""
    half, old = (tmp_path / f".{name}.building-99999999-x{end}" for end in ("", "-old"))
    for folder in (half, old):
        folder.mkdir()
        (folder / "file").write_text("old")
    with pytest.raises(KeyboardInterrupt), new_directory(tmp_path / name):
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name / "file").read_text() == "old"


def test_what_is_read_is_not_replaced(out, tmp_path):
    (out / "source").mkdir()
    (tmp_path / "link").symlink_to(out)
    for place in (out, tmp_path / "link"):
        with pytest.raises(ValueError, match="source lies in .*out, which would be replaced"):
            make(place, keep=out / "source")
    assert (out / "source").is_dir()
    make(out / "source" / "deeper", keep=out / "source")


def test_a_mount_point_is_refused_before_the_work(out, monkeypatch):
    monkeypatch.setattr(os.path, "ismount", lambda path: path == out)
    with pytest.raises(ValueError, match="mounted, .*: choose a folder in it"):
        make(out)


COMMANDS = {
    "convert-checkpoint": [],
    "build": ["--backend", "onnx", "--dtype", "float32", "--max-seq-len", "64", "--force"],
    "triton-repo": ["--model-path", "1/checkpoint", "--name", "m", "--force"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_do_not_remove_the_model_that_they_read(command, shipped_model, tmp_path, capsys):
    if command == "build":
        pytest.importorskip("onnx")
    words = [*COMMANDS[command], "--output", str(tmp_path / "out"), "--quiet"]
    assert main([command, str(shipped_model), *words]) == 0
    place = tmp_path / "out" / "m" if command == "triton-repo" else tmp_path / "out"
    shutil.copytree(shipped_model, place / "model")
    capsys.readouterr()
    assert main([command, str(place / "model"), *words]) == 2
    assert "which would be replaced" in capsys.readouterr().err
    assert (place / "model" / "model.safetensors").is_file()
