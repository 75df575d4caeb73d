"""Staging beside the training: bit for bit the boundary's state, whoever makes the copy, or not used at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import optimizer as torch_optimizer

from orchestrator.checkpoint import copying
from orchestrator.training import stager
from orchestrator.training.boundary import Order
from orchestrator.training.overlap import PROOFS
from orchestrator.training.saved_state import SavedState
from tests.training import states
from tests.training.states import launch, state_of
from tests.training.test_captures import Given, Holder

PACES = ("nobody", "at once", "a thread")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that even a small state is copied in many pieces, some of them parts of a tensor."""
    monkeypatch.setattr("orchestrator.checkpoint.staging.PIECE_BYTES", 512)


@pytest.fixture(params=PACES)
def pace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who copies: only those who join, a thread that has done all of it before training goes on, or a real thread."""
    set_pace(request.param, monkeypatch)
    return str(request.param)


def set_pace(pace: str, patch: pytest.MonkeyPatch) -> None:
    class Never(threading.Thread):
        def start(self) -> None:
            """It never gets to run."""

    class AtOnce(threading.Thread):
        def start(self) -> None:
            self.run()

    kinds = {"nobody": Never, "at once": AtOnce, "a thread": threading.Thread}
    patch.setattr(threading, "Thread", kinds[pace])


class Job:
    """A training and its stager, without an agent."""

    def __init__(self, folder: Path, given: Given, **place: Any) -> None:
        self.place = launch(folder, **place)
        self.state: SavedState = state_of(self.place, **given)
        self.stager = self.state.stager
        self.sizes: dict[int, int | None] = {}
        """Bytes of what was staged, by step; None: it was given up."""
        self.there: list[int] = []
        """How many bytes were there, again and again."""
        self.steps = 0

    def save(self, slot: int = 0, *, may_overlap: bool = True) -> int:
        """Begin to stage the state as it is now, as the next step's."""
        self.steps += 1
        step = self.steps

        def finish(size_bytes: int | None, copy_ns: int) -> None:
            assert step not in self.sizes
            self.sizes[step] = size_bytes

        self.stager.stage(Order(slot=slot, step=step, absent=(), may_overlap=may_overlap), finish, self.there.append)
        return step

    def reference(self) -> bytes:
        """What blocking mode stages now, as the next step's."""
        self.save(slot=1, may_overlap=False)
        size_bytes = self.sizes.pop(self.steps)
        self.steps -= 1
        return self.staged(1, size_bytes)

    def staged(self, slot: int, size_bytes: int | None) -> bytes:
        return self.place.slot_paths[slot].read_bytes()[:size_bytes]


class Net(nn.Module):
    """Tied weights, running statistics, dropout, and a layer that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 12)
        self.norm = nn.BatchNorm1d(12)
        self.dropout = nn.Dropout(0.3)
        self.middle = nn.Linear(12, 12)
        self.middle.weight = nn.Parameter(torch.randn(12, 12).t())
        self.head = nn.Linear(12, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.middle(self.dropout(self.norm(self.embedding(numbers)))))
        return found


def backward(model: nn.Module) -> None:
    torch.autograd.backward(model(torch.randint(0, 40, (16,))).square().mean())


def plain_step(given: Given) -> None:
    backward(given["model"])
    given["optimizer"].step()
    given["optimizer"].zero_grad()


def accumulated_step(given: Given) -> None:
    for _ in range(4):
        backward(given["model"])
    given["optimizer"].step()
    given["optimizer"].zero_grad()


def two_optimizers_step(given: Given) -> None:
    """As adversarial networks train: one steps in the middle of the other's accumulation."""
    backward(given["model"])
    given["second"].step()
    given["second"].zero_grad()
    backward(given["model"])
    given["optimizer"].step()
    given["optimizer"].zero_grad()


def closure_step(given: Given) -> None:
    def closure() -> torch.Tensor:
        given["optimizer"].zero_grad()
        loss = given["model"](torch.arange(16)).square().mean()
        torch.autograd.backward(loss)
        return loss.detach()

    given["optimizer"].step(closure)


def scaled_step(given: Given) -> None:
    scaler = given["scaler"]
    torch.autograd.backward(scaler.scale(given["model"](torch.arange(16)).square().mean()))
    scaler.step(given["optimizer"])
    scaler.update()
    given["optimizer"].zero_grad()


def scheduled_step(given: Given) -> None:
    plain_step(given)
    given["scheduler"].step()


def adam(**options: Any) -> Given:
    model = Net()
    return {"model": model, "optimizer": optim.Adam(model.parameters(), lr=0.01, **options)}


def two_optimizers() -> Given:
    model = Net()
    first = [*model.embedding.parameters(), *model.norm.parameters()]
    return {
        "model": model,
        "optimizer": optim.SGD(first, lr=0.1, momentum=0.9),
        "second": optim.AdamW(model.middle.parameters(), lr=0.01),
    }


def lbfgs() -> Given:
    model = Net()
    model.middle = nn.Linear(12, 12)  # it refuses gradients that are not contiguous
    return {"model": model, "optimizer": optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)}


def scaled() -> Given:
    return {**adam(), "scaler": torch.amp.GradScaler("cpu")}


def scheduled() -> Given:
    given = adam()
    given["optimizer"].param_groups[0]["lr"] = torch.tensor(0.01)
    return {**given, "scheduler": optim.lr_scheduler.StepLR(given["optimizer"], 1)}


Trainings = [
    (adam, plain_step),
    (lambda: adam(fused=True), plain_step),
    (lambda: adam(foreach=False), plain_step),
    (adam, accumulated_step),
    (two_optimizers, two_optimizers_step),
    (lbfgs, closure_step),
    (scaled, scaled_step),
    (scheduled, scheduled_step),
]


@pytest.mark.parametrize(("make", "step"), Trainings)
def test_every_save_is_the_boundarys_state_bit_for_bit(
    make: Callable[[], Given], step: Callable[[Given], None], pace: str, tmp_path: Path
) -> None:
    """Also those that prove it, whoever copies, and whatever the steps that follow write."""
    torch.manual_seed(3)
    given = make()
    job = Job(tmp_path, given)
    for _ in range(2):
        step(given)
    for number in range(PROOFS + 3):
        expected = job.reference()
        at = job.save()
        for _ in range(1 + number % 2):
            step(given)
        job.stager.join()
        assert job.sizes[at] == len(expected)
        assert job.staged(0, len(expected)) == expected
        assert job.stager._blocked is None


def test_the_optimizer_waits_for_the_copy_and_takes_part_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_pace("nobody", monkeypatch)
    given = adam()
    plain_step(given)
    job = Job(tmp_path, given)
    at = job.save()
    backward(given["model"])
    assert at not in job.sizes, "nothing was copied yet"
    given["optimizer"].step()
    assert job.sizes[at], "complete before the optimizer wrote anything"


def test_a_copy_that_is_complete_is_known_before_anybody_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the upload begins early; only proofs wait for the end of their step."""
    set_pace("at once", monkeypatch)
    given = adam()
    plain_step(given)
    job = Job(tmp_path, given)
    early = []
    for _ in range(PROOFS + 1):
        at = job.save()
        early.append(at in job.sizes)
        plain_step(given)
    assert early == [False] * PROOFS + [True]


def test_no_hook_is_left_behind(tmp_path: Path) -> None:
    given = adam()
    plain_step(given)
    hooks = torch_optimizer._global_optimizer_pre_hooks
    before = len(hooks)
    job = Job(tmp_path, given)
    job.save()
    during = len(hooks)
    job.stager.join()
    assert (during, len(hooks)) == (before + 1, before)


def test_a_forked_process_leaves_the_copy_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader's process may train something of its own; the threads and the slot are not its."""
    set_pace("nobody", monkeypatch)
    given = adam()
    plain_step(given)
    job = Job(tmp_path, given)
    at = job.save()
    with monkeypatch.context() as child:
        child.setattr(job.stager, "_pid", os.getpid() + 1)
        other = nn.Linear(2, 2)
        optim.SGD(other.parameters(), lr=0.1).step()
    assert at not in job.sizes
    job.stager.join()
    assert job.sizes[at]


@pytest.mark.parametrize("may_overlap", [False, True])
def test_where_nothing_goes_on_all_is_there_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, may_overlap: bool
) -> None:
    """Leaving, the last step, under notice: `stage` returns with the shard complete; it is no proof either."""
    set_pace("nobody", monkeypatch)
    given = adam()
    plain_step(given)
    job = Job(tmp_path, given)
    at = job.save(may_overlap=may_overlap)
    assert (at in job.sizes) is not may_overlap
    job.stager.join()
    assert job.stager._proofs == int(may_overlap)


def test_the_next_save_completes_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_pace("nobody", monkeypatch)
    given = adam()
    plain_step(given)
    job = Job(tmp_path, given)
    first = job.save(0)
    second = job.save(1)
    assert list(job.sizes) == [first]
    job.stager.join()
    assert list(job.sizes) == [first, second]


def test_a_rank_that_owns_nothing_of_it_does_not_overlap(tmp_path: Path) -> None:
    """A victim's shard is its generators: there is nothing to copy later, so nothing is proved by it."""
    given = adam()
    job = Job(tmp_path, given, rank=2, world_size=3)
    sizes: list[int | None] = []
    order = Order(slot=0, step=1, absent=(2,), may_overlap=True)
    job.stager.stage(order, lambda size_bytes, copy_ns: sizes.append(size_bytes), job.there.append)
    assert len(sizes) == 1
    assert job.stager._proofs == 0


# --------------------------------------------------------------------------------------------------------- damage


def average_swapped_in(given: Given) -> None:
    """What evaluating with averaged weights does, in the middle of a step."""
    with torch.no_grad():
        for parameter in given["model"].parameters():
            parameter.lerp_(torch.zeros_like(parameter), 0.1)


def data_written(given: Given) -> None:
    for parameter in given["model"].parameters():
        parameter.data.add_(1.0)


def unhooked_fused_step(given: Given) -> None:
    """A fused optimizer that is stepped behind torch's hooks: no version changes."""
    backward(given["model"])
    versions = [parameter._version for parameter in given["model"].parameters()]
    optim.Adam.step.__wrapped__(given["optimizer"])  # type: ignore[attr-defined]
    assert versions == [parameter._version for parameter in given["model"].parameters()]


def state_written(given: Given) -> None:
    parameter = given["model"].middle.weight
    given["optimizer"].state[parameter]["exp_avg"].data.zero_()


@pytest.mark.parametrize("damage", [average_swapped_in, data_written, unhooked_fused_step, state_written])
def test_who_writes_behind_torchs_back_is_found_out_and_nothing_of_it_is_used(
    damage: Callable[[Given], None], pace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even if the copy was quicker than the damage this time: it will not always be."""
    torch.manual_seed(5)
    given = adam(fused=True)
    plain_step(given)
    job = Job(tmp_path, given)
    at = job.save()
    damage(given)
    plain_step(given)
    job.stager.join()
    assert job.sizes[at] is None
    for _ in range(3):
        expected = job.reference()
        later = job.save()
        assert job.sizes[later] == len(expected), "from now on all is copied at the boundary"
        assert job.staged(0, len(expected)) == expected
        damage(given)
        plain_step(given)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "was written between a step boundary and the next optimizer step; step 1 is not saved" in said


def test_damage_after_the_proofs_is_found_by_versions_where_they_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_pace("nobody", monkeypatch)
    given = adam()
    plain_step(given)
    job = Job(tmp_path, given)
    for _ in range(PROOFS):
        job.save()
        plain_step(given)
    at = job.save()
    average_swapped_in(given)
    plain_step(given)
    assert job.sizes[at] is None
    assert capsys.readouterr().err.count("is not saved") == 1


def test_new_memory_for_a_parameter_does_no_harm(pace: str, tmp_path: Path) -> None:
    """`p.data = x` leaves the old memory as it was, and that is what is copied."""
    given = adam()
    plain_step(given)
    job = Job(tmp_path, given)
    for _ in range(PROOFS + 2):
        expected = job.reference()
        at = job.save()
        for parameter in given["model"].parameters():
            parameter.data = parameter.detach() + 1
        plain_step(given)
        job.stager.join()
        assert job.sizes[at] == len(expected)
        assert job.staged(0, len(expected)) == expected


def test_a_copy_that_fails_gives_the_step_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = adam()
    plain_step(given)
    job = Job(tmp_path, given)
    at = job.save()
    job.stager.join()
    assert job.sizes[at]

    def fails(self: object, piece: copying.Piece) -> None:
        raise RuntimeError("out of luck")

    def reached(point: str, **where: int) -> None:
        if point == "while-staging":
            monkeypatch.setattr(copying.HostMover, "move", fails)

    monkeypatch.setattr(stager, "reached", reached)
    at = job.save()
    plain_step(given)
    job.stager.join()
    assert job.sizes[at] is None
    assert "out of luck" in str(job.stager._blocked)


def test_owners_that_cannot_be_watched_mean_blocking_and_it_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_pace("nobody", monkeypatch)
    given = adam()
    plain_step(given)
    job = Job(tmp_path, {**given, "ema": Holder(shadow=torch.ones(8))})
    for _ in range(3):
        at = job.save()
        assert job.sizes[at]
        plain_step(given)
    assert capsys.readouterr().err == (
        "orchestrator: the script waits while its state is staged: "
        "ema: holds tensors and may write others outside of an optimizer's step\n"
    )


def test_a_set_of_tensors_that_changes_is_proved_anew(tmp_path: Path) -> None:
    given = adam()
    job = Job(tmp_path, given)
    proofs = []
    for _ in range(5):
        job.save()
        proofs.append(job.stager._proofs)
        plain_step(given)  # after the first one Adam has its state
        job.stager.join()
    assert proofs == [0, 0, 1, 2, 2]


# ------------------------------------------------------------------------------------------------------- memory


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_fifty_saves_take_no_more_memory_than_ten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F105: nothing piles up from save to save, and nothing of a save is a second copy of the state."""
    monkeypatch.setattr("orchestrator.checkpoint.staging.PIECE_BYTES", 1 << 20)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    state_bytes = 3 * sum(parameter.numel() * 4 for parameter in model.parameters())

    def step() -> None:
        torch.autograd.backward(model(torch.ones(2, 512)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    step()
    job = Job(tmp_path, {"model": model, "optimizer": optimizer})
    seen: list[int] = []
    for number in range(50):
        at = job.save(number % 2)
        step()
        job.stager.join()
        assert job.sizes[at]
        seen.append(resident_bytes())
    assert max(seen[10:]) - seen[9] < state_bytes / 2  # a copy for each save would be forty times the state


# ------------------------------------------------------------------------------------------------------- devices


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the side stream and registered memory")
def test_on_a_device_the_copy_is_the_boundarys_state_too(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Net().cuda()
    given: Given = {"model": model, "optimizer": optim.Adam(model.parameters(), lr=0.01)}

    def step() -> None:
        torch.autograd.backward(model(torch.randint(0, 40, (16,), device="cuda")).square().mean())
        given["optimizer"].step()
        given["optimizer"].zero_grad()

    step()
    job = Job(tmp_path, given)
    for _ in range(PROOFS + 3):
        expected = job.reference()
        at = job.save()
        step()
        step()
        job.stager.join()
        assert job.sizes[at] == len(expected)
        assert job.staged(0, len(expected)) == expected
    assert job.stager._slots[0]._registered


def test_the_slots_of_both_helpers_are_alike(tmp_path: Path) -> None:
    """`states.stage`, which other tests use, stages what `Job.save` does."""
    given = adam()
    plain_step(given)
    job = Job(tmp_path, given)
    expected = job.reference()
    assert states.stage(job.state, 0, 1) == len(expected)
    assert job.staged(0, len(expected)) == expected
