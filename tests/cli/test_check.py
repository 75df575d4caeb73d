"""`orchestrator check`: findings, levels, exit codes, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from orchestrator.cli import check
from orchestrator.errors import StoreFullError
from orchestrator.storage import opening
from orchestrator.storage.base import Piece
from orchestrator.storage.memory import MemoryStore
from orchestrator.testing.metadata import SimulatedAWS
from tests.cli.conftest import Command
from tests.gcs_server import GCSServers
from tests.s3_servers import BUCKET, S3Servers


def levels(output: str) -> dict[str, str]:
    """Level of each finding."""
    return {finding["what"]: finding["level"] for finding in json.loads(output)}


def test_a_good_machine(command: Command, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    result = command("check", "--store", str(store), "--staging", str(tmp_path), "--json")
    assert result.exit_code == 0
    found = levels(result.stdout)
    for what in ("python", "torch", "orchestrator", "monotonic clock", "state folder", "staging folder", "store"):
        assert found[what] == "ok", what
    assert list(store.iterdir()) == []
    assert list((tmp_path / "state" / "orchestrator").iterdir()) == []


def test_as_a_table(command: Command, tmp_path: Path) -> None:
    result = command("check", "--staging", str(tmp_path))
    assert result.exit_code == 0
    assert "what to do" in result.stdout
    assert f"{tmp_path}, mode 0700" in result.stdout


def test_a_store_that_is_not_there_yet_is_not_made(command: Command, tmp_path: Path) -> None:
    result = command("check", "--store", str(tmp_path / "a" / "b"), "--staging", str(tmp_path), "--json")
    assert result.exit_code == 0
    assert "the first run makes it" in result.stdout
    assert not (tmp_path / "a").exists()


def test_sources_of_notices_are_read_once(command: Command, tmp_path: Path) -> None:
    leave = tmp_path / "leave"
    words = ("check", "--notices", f"file:{leave}", "--staging", str(tmp_path), "--json")
    result = command(*words)
    assert result.exit_code == 0
    assert levels(result.stdout)[f"file {leave}"] == "ok"
    leave.touch()
    assert levels(command(*words).stdout)[f"file {leave}"] == "warn"
    leave.write_text("what?")
    result = command(*words)
    assert result.exit_code == 1
    assert levels(result.stdout)[f"file {leave}"] == "fail"


def test_a_source_that_there_is_not(command: Command) -> None:
    result = command("check", "--notices", "heroku")
    assert result.exit_code == 2
    assert "there is no source 'heroku'" in result.stderr


def test_the_cloud_that_auto_finds_is_read() -> None:
    async def serve(ready: Callable[[str], None], over: threading.Event) -> None:
        async with SimulatedAWS() as aws:
            ready(aws.url)
            await asyncio.to_thread(over.wait, 20)

    urls: queue.Queue[str] = queue.Queue()
    over = threading.Event()
    server = threading.Thread(target=lambda: asyncio.run(serve(urls.put, over)))
    server.start()
    url = urls.get(timeout=10)
    try:
        findings = check.check_notices(f"auto@{url}")
    finally:
        over.set()
        server.join(20)
    assert [finding.level for finding in findings] == ["ok"] * 5
    assert findings[0].found == f"{url} answers as aws"


def test_no_staging_folder(command: Command) -> None:
    result = command("check", "--staging", "/nosuch", "--json")
    assert result.exit_code == 1
    assert levels(result.stdout)["staging folder"] == "fail"
    assert "--staging" in result.stdout


def test_staging_that_others_may_empty(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    found = {finding.what: finding for finding in check.check_staging(folder)}
    assert found["staging mode"].level == "warn"
    assert "chmod +t" in found["staging mode"].advice


def test_a_store_that_cannot_be_made(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = command("check", "--store", str(tmp_path / "file" / "store"), "--staging", str(tmp_path), "--json")
    assert result.exit_code == 1
    assert levels(result.stdout)["store"] == "fail"


class OverwritingStore(MemoryStore):
    """A store whose create-if-absent is none."""

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        self.delete(key)
        super().create(key, pieces)


class FullStore(MemoryStore):
    """A store without any space."""

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        raise StoreFullError(key, "no space is left")


@pytest.mark.parametrize(
    ("store", "says"),
    [(OverwritingStore(), "create-if-absent is not exclusive"), (FullStore(), "no space is left")],
)
def test_a_store_that_breaks_the_rules(monkeypatch: pytest.MonkeyPatch, store: MemoryStore, says: str) -> None:
    monkeypatch.setattr(opening, "open_store", lambda url, patience_seconds: store)
    (finding,) = check.check_store("memory")
    assert finding.level == "fail"
    assert says in finding.found
    assert list(store.entries("")) == []


@pytest.mark.parametrize(("readings", "level"), [([5.0, 5.02], "ok"), ([5.0, 5.0], "fail"), ([5.0, 4.0], "fail")])
def test_clocks(readings: list[float], level: str) -> None:
    pauses: list[float] = []
    assert check.check_clock(iter(readings).__next__, pauses.append).level == level


def test_kinds_of_file_systems(tmp_path: Path) -> None:
    assert check.file_system_of(Path("/proc/self")) == "proc"
    assert check.file_system_of(tmp_path / "nosuch") != "unknown"


def test_a_state_folder_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    finding = check.check_state_folder()
    assert finding.level == "fail"
    assert "XDG_STATE_HOME" in finding.advice


@pytest.mark.parametrize(
    ("name", "bucket", "expected"),
    [
        ("seaweedfs", BUCKET, ("ok", "writes once, and reads back")),
        ("seaweedfs", "no-such-bucket", ("fail", "there is no bucket 'no-such-bucket'")),
        ("nanio", BUCKET, ("fail", "silently ignores If-None-Match")),
    ],
)
def test_a_bucket(
    name: str, bucket: str, expected: tuple[str, str], s3_servers: S3Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = s3_servers.shared(name)
    for variable, value in server.variables().items():
        monkeypatch.setenv(variable, value)
    (finding,) = check.check_store(f"s3://{bucket}/jobs")
    assert finding.level == expected[0]
    assert expected[1] in finding.found
    assert finding.found.count("s3://") == 1
    with server.client() as client:
        assert client.list_objects_v2(Bucket=BUCKET, Prefix="jobs/").get("Contents", []) == []


@pytest.mark.parametrize(
    ("bucket", "expected"),
    [
        (BUCKET, ("ok", "writes once, and reads back")),
        ("no-such-bucket", ("fail", "there is no bucket 'no-such-bucket' at http://127.0.0.1:")),
    ],
)
def test_a_bucket_of_gcs(
    bucket: str, expected: tuple[str, str], gcs_servers: GCSServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = gcs_servers.shared()
    for variable, value in server.variables().items():
        monkeypatch.setenv(variable, value)
    (finding,) = check.check_store(f"gs://{bucket}/jobs")
    assert finding.level == expected[0]
    assert expected[1] in finding.found
    assert finding.advice == ("" if finding.level == "ok" else "make it, or correct the store's URL")
    assert list(server.bucket("jobs").objects("")) == []


def test_a_bucket_of_gcs_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/no/such/file")
    (finding,) = check.check_store("gs://bucket/jobs")
    assert finding.level == "fail"
    assert "no usable credentials for gs://bucket" in finding.found


def test_a_folder_whose_name_is_too_long_is_a_finding(command: Command, tmp_path: Path) -> None:
    result = command("check", "--store", str(tmp_path / ("x" * 300)), "--job", "a")
    assert result.exit_code == 1
    assert "too long" in "".join(result.stdout.split("│")).replace("\n", " ")


# ------------------------------------------------------------------------------------------------- devices

NVIDIA_SMI = """#!/bin/sh
case "$*" in
  *remapped*) echo "GPU-aa, No, {failed}" ;;
  *recovery*) exit 2 ;;
  *) {answer} ;;
esac
"""
ONE_DEVICE = "echo GPU-aa, 00000000:3B:00.0, 35, 0, Not Active"


@pytest.mark.parametrize(
    ("answers", "level", "found"),
    [
        ((ONE_DEVICE, "No"), "ok", "1 of NVIDIA's"),
        ((ONE_DEVICE, "Yes"), "fail", "it has to be exchanged"),
        (("echo no driver; exit 9", "No"), "warn", "status 9: no driver"),
    ],
)
def test_devices(
    answers: tuple[str, str], level: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(NVIDIA_SMI.format(answer=answers[0], failed=answers[1]))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    findings = list(check.check_devices())
    assert (findings[0].what, findings[0].level) == ("devices", level)
    assert found in findings[0].found
    assert level == "warn" or (findings[1].what, findings[1].level) == ("kernel log", "ok")


def test_where_there_are_no_devices_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.health.joining.has_devices", lambda: False)
    assert list(check.check_devices()) == []
