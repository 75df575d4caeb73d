"""What the kernel counts as killed for want of memory: both kinds of cgroups, and a real kill where one can be made."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.health.memory import counter_of, kills

V1 = "12:cpu,cpuacct:/pods/a\n4:memory:/pods/a\n0::/\n"
V2 = "0::/kubepods.slice/pod1/worker\n"


def system(root: Path, groups: str, **files: str) -> Path:
    """A machine with process 7 in these cgroups."""
    (root / "proc/7").mkdir(parents=True)
    (root / "proc/7/cgroup").write_text(groups)
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


EVENTS = "low 0\nhigh 0\nmax 31\noom 2\noom_kill 2\noom_group_kill 0\n"


@pytest.mark.parametrize(
    ("groups", "path", "content", "count"),
    [
        (V2, "kubepods.slice/pod1/worker/memory.events", EVENTS, 2),
        (V2, "memory.events", EVENTS, 2),
        (V1, "memory/pods/a/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", 3),
        (V1, "memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n", 0),
    ],
)
def test_where_the_count_is(groups: str, path: str, content: str, count: int, tmp_path: Path) -> None:
    counter = counter_of(7, system(tmp_path, groups, **{path: content}))
    assert counter == tmp_path / "sys/fs/cgroup" / path
    assert kills(counter) == count


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        (V2, {}),
        (V2, {"memory.events": "low 0\n"}),
        (V1, {"memory/memory.oom_control": "oom_kill_disable 0\n"}),  # a kernel before 4.13
        ("nonsense", {}),
    ],
)
def test_what_cannot_be_seen_is_not_zero(groups: str, files: dict[str, str], tmp_path: Path) -> None:
    assert counter_of(7, system(tmp_path, groups, **files)) is None
    assert counter_of(8, tmp_path) is None


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A cgroup of this machine with room for 40 MiB."""
    own = next(
        (
            line.split(":", 2)[2]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line.split(":", 2)[1] == "memory"
        ),
        None,
    )
    if own is None:
        pytest.skip("this machine has no memory cgroup of version 1")
    folder = Path("/sys/fs/cgroup/memory") / own.lstrip("/") / f"orchestrator-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(40 << 20))
    except OSError:
        pytest.skip("no cgroup can be made here")
    yield folder
    folder.rmdir()


def test_a_real_kill_is_counted(small_cgroup: Path) -> None:
    code = (
        "import os, sys\n"
        f"open({str(small_cgroup / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        "print('in', flush=True)\nsys.stdin.readline()\n"
        "data = [bytearray(1 << 20) for _ in range(400)]\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"
    counter = counter_of(process.pid)
    assert counter == small_cgroup / "memory.oom_control"
    before = kills(counter)
    process.communicate("go\n", timeout=60)
    assert process.returncode == -9
    assert before == 0
    assert kills(counter) == 1
