"""Folders in memory: locked while their agent lives, removed by the next agent when it has died."""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.checkpoint.staging_folder import make_locked, remove_dead


def test_what_dead_agents_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / f"orchestrator-{os.getuid()}"
    dead, alive, ours = root / "gpt-1a-1" / "n1", root / "gpt-1a-2" / "n1~2", root / "gpt-1a-3" / "n1~3"
    another = root / "bert-2b-1" / "n1"
    locks = {folder: make_locked(folder) for folder in (dead, alive, ours, another)}
    for folder in locks:
        (folder / "g00000001-r00000.slot-0").write_bytes(b"state")
    os.close(locks.pop(dead))
    os.close(locks.pop(another))
    assert remove_dead(root, "gpt-1a-*") == [dead]
    assert not dead.parent.exists()
    assert all((folder / "g00000001-r00000.slot-0").exists() for folder in (alive, ours, another))
    assert remove_dead(root, "gpt-1a-*") == []


def test_a_folder_is_private_and_locked_again_after_a_removal(tmp_path: Path) -> None:
    folder = tmp_path / f"orchestrator-{os.getuid()}" / "gpt-1a-1" / "n1"
    os.close(make_locked(folder))
    assert remove_dead(folder.parent.parent, "gpt-*") == [folder]
    make_locked(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert remove_dead(folder.parent.parent, "gpt-*") == []
