"""The kernel's log is read from its end on, and never waited for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.health.kernel_log import KERNEL_LOG, KernelLog


def test_only_what_is_new(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text("4,1,1,-;before\n")
    log = KernelLog(path)
    assert log.new_lines() == []
    with path.open("a") as file:
        file.write("4,2,2,-;first\n SUBSYSTEM=pci\n4,3,3,-;second\n")
    assert log.new_lines() == ["4,2,2,-;first", " SUBSYSTEM=pci", "4,3,3,-;second"]
    assert log.new_lines() == []
    log.close()


def test_records_that_were_overwritten_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kmsg"
    path.touch()
    log = KernelLog(path)
    answers: list[bytes | OSError] = [BrokenPipeError(), b"4,9,9,-;the oldest left\n", BlockingIOError()]

    def read(file: int, count: int) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(os, "read", read)
        assert log.new_lines() == ["4,9,9,-;the oldest left"]
    assert answers == []
    log.close()


def test_a_log_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        KernelLog(tmp_path / "none")


@pytest.mark.skipif(not os.access(KERNEL_LOG, os.R_OK), reason="this user may not read the kernel's log")
def test_the_real_one() -> None:
    try:
        log = KernelLog()
    except OSError:
        pytest.skip("the kernel keeps its log to itself")
    log.new_lines()  # what was written in this moment, if anything; it does not wait for more
    log.close()
