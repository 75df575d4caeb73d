"""Errors in the kernel's log: how they are written, and whose fault they are."""

from __future__ import annotations

import pytest

from orchestrator.health.xid import CONDEMNING, OF_THE_APPLICATION, RECOVERY_ACTION, Xid, bus_address, judge, parse

OFF_THE_BUS = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("line", "code", "address"),
    [
        (f"3,1234,5678901,-;{OFF_THE_BUS}", 79, "0000:3b:00"),
        (OFF_THE_BUS, 79, "0000:3b:00"),
        ("4,1,2,-;NVRM: GPU 0000:2B:00.0: GPU has fallen off the bus.", 79, "0000:2b:00"),
        ("[ 269.5] NVRM: GPU at 0000:01:00.0 has fallen off the bus.", 79, "0000:01:00"),
        ("NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping", 63, "0000:10:1c"),
        ("NVRM: Xid (0000:01:00): 31, Ch 00000008", 31, "0000:01:00"),
        ("NVRM: Xid (PCI:0000:65:00 GPU-I:01): 94, pid=7, Contained: SM (0x1)", 94, "0000:65:00"),
        ("NVRM: Xid (PCI:0008:01:00): 45", 45, "0008:01:00"),
    ],
)
def test_what_the_driver_writes(line: str, code: int, address: str) -> None:
    (found,) = parse([line])
    assert (found.code, found.address) == (code, address)


@pytest.mark.parametrize(
    "line",
    [
        "6,1,2,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15",
        "4,1,2,-;nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 32 LTSSM Fault Up",
        "4,1,2,-;NVRM: Xid (PCI:0000:3b:00): none",
        "4,1,2,-;NVRM: Xid (PCI:0000:3b:00): " + "9" * 5000,
        "4,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79" + "\0" * 100,
        "4,1,2,-;NVRM: Xid (PCI:zzzz:3b:00): 79",
        "\ufffd" * 5000,
        " SUBSYSTEM=pci",
        "",
    ],
)
def test_what_is_no_error_of_a_device(line: str) -> None:
    assert parse([line]) == []


def test_addresses_are_compared_in_one_spelling() -> None:
    assert {bus_address(text) for text in ("00000000:3B:00.0", "0000:3b:00.0", "0000:3B:00")} == {"0000:3b:00"}
    assert {bus_address(text) for text in ("", "::", "not:an:address", "0.0:3b:00", "0000:3b:00:1")} == {None}


@pytest.mark.parametrize("code", [48, 64, 74, 79, 94, 95, 119, 120, 140, 143])
def test_what_a_device_does_not_recover_from(code: int) -> None:
    trouble = judge(Xid(code=code, address="0000:3b:00", words="as it says"))
    assert trouble is not None
    assert trouble.condemns
    assert trouble.words.startswith(f"device 0000:3b:00: Xid {code}, {CONDEMNING[code]} (as it says)")


@pytest.mark.parametrize("code", [13, 31, 43, 45])
def test_what_is_the_applications(code: int) -> None:
    assert judge(Xid(code=code, address="0000:3b:00", words="")) is None


@pytest.mark.parametrize("code", [63, 92, 109, 121, 155, 999])
def test_what_is_only_told(code: int) -> None:
    trouble = judge(Xid(code=code, address="0000:3b:00", words=""))
    assert trouble is not None
    assert not trouble.condemns


@pytest.mark.parametrize(
    ("action", "told", "condemns"),
    [
        ("0x1 (GPU Reset Required)", True, True),
        ("0x2 (Node Reboot Required)", True, True),
        ("0x4 (Drain and Reset)", True, True),
        ("0x3 (Drain P2P)", True, False),
        ("0x0 (None)", False, False),
        ("something new", True, False),
    ],
)
def test_what_the_driver_asks_for(action: str, told: bool, condemns: bool) -> None:
    line = f"NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to {action}"
    (found,) = parse([line])
    assert found.code == RECOVERY_ACTION
    trouble = judge(found)
    assert (trouble is not None) is told
    assert trouble is None or trouble.condemns is condemns


def test_nobody_is_blamed_for_what_is_the_applications() -> None:
    assert not CONDEMNING.keys() & OF_THE_APPLICATION
