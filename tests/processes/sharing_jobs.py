"""Real gloo groups whose ranks restore together: `python -m tests.processes.sharing_jobs FOLDER`.

One interpreter imports torch once and forks the ranks of each job. What each rank found out is printed as one line of
JSON for each job; a rank that fails, or does not end in a time that is shorter than the group's own, fails its job.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.boxes import whole
from orchestrator.checkpoint.layout import DTYPES, local_box, local_part
from orchestrator.checkpoint.reader import read_committed
from orchestrator.checkpoint.restore import parts_of
from orchestrator.errors import OrchestratorError, PeerError
from orchestrator.storage.filesystem import FolderStore
from orchestrator.training import rng, sharing
from orchestrator.training.sharing import Gang, read_together
from tests.checkpoint import shards
from tests.checkpoint.sharded import cut, shard
from tests.checkpoint.stores import CountingStore, CutStore
from tests.processes.forks import fork
from tests.training import states

BASE = shards.checkpoint_id()
JOB_SECONDS_MAX = 40
GROUP_SECONDS = 10 * JOB_SECONDS_MAX
CPU = torch.device("cpu")
Job = Callable[[int, Path], Any]


def gang_of(rank: int, world_size: int, folder: Path) -> Gang:
    """The gang of this process's group."""
    gang = Gang.of(states.launch(folder, rank=rank, world_size=world_size, generation=2, base=BASE), CPU)
    assert gang is not None
    return gang


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    """Some float32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bits(tensor: torch.Tensor) -> bytes:
    """What would be saved of it, byte for byte."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
    return b"" if plain.numel() == 0 else plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def read_bytes(store: CountingStore) -> int:
    """How much was asked for of shards and receipts."""
    return sum((stop or 0) - start for key, start, stop in store.reads if "shard-" in key)


# ---------------------------------------------------------------------------------------------------- exactness


def all_kinds() -> dict[str, torch.Tensor]:
    """Every dtype, with bits that arithmetic would change; no elements, one, a few; more than a bucket."""
    draw = torch.Generator().manual_seed(3)
    noise = torch.randint(0, 256, (24,), dtype=torch.uint8, generator=draw)
    kinds = {f"noise.{name}": noise.view(dtype) for dtype, name in DTYPES.items() if dtype is not torch.bool}
    return kinds | {
        "bool": noise > 100,
        "number": torch.tensor(-0.0),
        "half": torch.tensor(3.5, dtype=torch.bfloat16),
        "none": torch.empty(3, 0, 2),
        "nan": torch.tensor([float("nan"), float("-inf"), 1e-45]),
        "matrix": numbers(7, 5, 3),
        "columns": numbers(9, 7, seed=2),
        "wide": numbers(1, 90, seed=3),
        "repeated": numbers(3, 1, 4, seed=4).expand(3, 5, 4),
        "conjugate": torch.randn(4, 3, dtype=torch.complex64, generator=draw).conj(),
        "parameter": nn.Parameter(numbers(5, 4, seed=5)),
    }


def target_for(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Other contents in memory of another layout."""
    if name == "columns":
        return torch.zeros(7, 9).t()
    if name == "repeated":
        return torch.zeros(3, 1, 4).expand(3, 5, 4)
    if name == "conjugate":
        return torch.zeros(4, 3, dtype=tensor.dtype).conj()
    if name == "parameter":
        return nn.Parameter(torch.zeros(5, 4))
    if name == "matrix":
        return torch.zeros(7, 10, 3)[:, ::2]
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def save_kinds(folder: Path) -> None:
    """By two ranks."""
    tensors = {name: tensor.detach().resolve_conj().contiguous() for name, tensor in all_kinds().items()}
    shards.save(FolderStore(folder / "store"), folder, tensors, world_size=2)


def exact(rank: int, folder: Path) -> Any:
    """Three ranks, buckets of 40 bytes; nothing may draw from a generator."""
    sharing.BUCKET_BYTES = 40
    index = read_committed(store := FolderStore(folder / "store"), BASE)
    targets = {name: target_for(name, tensor) for name, tensor in all_kinds().items()}
    if rank == 1:  # in another order
        targets = dict(reversed(targets.items()))
    before = rng.digest(rng.capture())
    read_together(gang_of(rank, 3, folder), store, index, parts_of(index, targets), set(targets))
    assert rng.digest(rng.capture()) == before
    return [name for name, tensor in all_kinds().items() if bits(targets[name]) != bits(tensor)]


# ------------------------------------------------------------------------------------------------------ how much

STATE = {"large": (5, 1 << 20), "medium": (1 << 20,), "rows": (999, 333), "small": (17,)}
STATE_BYTES = sum(4 * torch.Size(shape).numel() for shape in STATE.values())


def whole_state() -> dict[str, torch.Tensor]:
    return {name: numbers(*shape, seed=number) for number, (name, shape) in enumerate(STATE.items())}


def save_state(folder: Path) -> None:
    shards.save(FolderStore(folder / "store"), folder, whole_state(), world_size=3)


def save_state_by_two(folder: Path) -> None:
    shards.save(FolderStore(folder / "store"), folder, whole_state(), world_size=2)


def once(rank: int, folder: Path) -> Any:
    """How many bytes each of three ranks reads, and of which shards."""
    store = CountingStore(FolderStore(folder / "store"))
    index = read_committed(store, BASE)
    targets = {name: torch.zeros(shape) for name, shape in STATE.items()}
    read_together(gang_of(rank, 3, folder), store, index, parts_of(index, targets), set(targets))
    wrong = [name for name, tensor in whole_state().items() if not torch.equal(targets[name], tensor)]
    touched = sorted({key.rsplit("/", 1)[-1] for key, _, _ in store.reads if key.endswith(".safetensors")})
    return {"bytes": read_bytes(store), "wrong": wrong, "shards": touched}


def other_plans(rank: int, folder: Path) -> Any:
    """The last rank needs a tensor less: each reads for itself."""
    store = CountingStore(FolderStore(folder / "store"))
    index = read_committed(store, BASE)
    targets = {name: torch.zeros(shape) for name, shape in STATE.items() if rank < 2 or name != "medium"}
    read_together(gang_of(rank, 3, folder), store, index, parts_of(index, targets), set(targets))
    needed = sum(tensor.nbytes for tensor in targets.values())
    wrong = [name for name, tensor in targets.items() if not torch.equal(whole_state()[name], tensor)]
    return {"bytes": read_bytes(store), "needed": needed, "wrong": wrong}


def other_numbering(rank: int, folder: Path) -> Any:
    """The script numbers its ranks otherwise than we do: only the first one has the same number."""
    launched_as = [0, 2, 1][rank]
    store = CountingStore(FolderStore(folder / "store"))
    index = read_committed(store, BASE)
    targets = {name: torch.zeros(shape) for name, shape in STATE.items()}
    read_together(gang_of(launched_as, 3, folder), store, index, parts_of(index, targets), set(targets))
    wrong = [name for name, tensor in targets.items() if not torch.equal(whole_state()[name], tensor)]
    return {"bytes": read_bytes(store), "needed": STATE_BYTES, "wrong": wrong}


def no_gang(rank: int, folder: Path) -> Any:
    """A group that is not all ranks is not used."""
    launch = states.launch(folder, rank=rank, world_size=4, base=BASE)
    return Gang.of(launch, CPU) is None and Gang.of(launch.model_copy(update={"world_size": 1}), CPU) is None


# ------------------------------------------------------------------------------------------------------- sharded


def model_of(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return model


def save_model(folder: Path) -> None:
    """The same state as a model's, by three ranks."""
    places = [states.launch(folder, rank=rank, world_size=3) for rank in range(3)]
    states.save(
        FolderStore(folder / "store"),
        [(place, states.state_of(place, model=model_of(whole_state()))) for place in places],
        BASE.step,
    )


def sharded(rank: int, folder: Path) -> Any:
    """Of sharded tensors each rank reads its part alone; what is plain or replicated is read by one."""
    mesh = DeviceMesh("cpu", torch.arange(3))
    expected = whole_state()
    targets: dict[str, torch.Tensor] = {
        "large": shard(torch.zeros(STATE["large"]), mesh, [Shard(1)], rank),
        "medium": shard(torch.zeros(STATE["medium"]), mesh, [Replicate()], rank),
        "rows": torch.zeros(STATE["rows"]),
        "small": shard(torch.zeros(STATE["small"]), mesh, [Shard(0)], rank),
    }
    model = model_of(targets)
    store = CountingStore(FolderStore(folder / "store"))
    place = states.launch(folder, rank=rank, world_size=3, local_world_size=1, generation=2, base=BASE)
    assert states.state_of(place, model=model).restore(store) == 2
    wrong = [
        name
        for name, tensor in model.state_dict().items()
        if not torch.equal(cut(expected[name], local_box(name, tensor)), local_part(tensor))
        or (name in ("large", "medium") and not isinstance(tensor, DTensor))
        or (name == "rows" and local_box(name, tensor) != whole(STATE[name]))
    ]
    return {"bytes": read_bytes(store), "wrong": wrong}


# ------------------------------------------------------------------------------------------------------- failures


def empty_model(**others: torch.Tensor) -> nn.Module:
    return model_of({name: torch.zeros(shape) for name, shape in STATE.items()} | others)


def restored(rank: int, folder: Path, *stores: Any, **given: Any) -> Any:
    """What became of a restore: the model's wrong tensors, or the error."""
    model = given.setdefault("model", empty_model())
    place = states.launch(folder, rank=rank, world_size=3, local_world_size=1, generation=2, base=BASE)
    try:
        states.state_of(place, **given).restore(*stores)
    except OrchestratorError as error:
        named = error.rank if isinstance(error, PeerError) else None
        return {"error": type(error).__name__, "text": str(error), "rank": named}
    expected = whole_state()
    return {"wrong": [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, expected[name])]}


def damaged_for(rank: int, folder: Path) -> CutStore:
    """A store in which one block of its own shard is cut short for rank 1."""

    def length(key: str, start: int, stop: int) -> int:
        middle = 3 << 20
        return stop - start - (rank == 1 and key.endswith(".safetensors") and start <= middle < stop)

    return CutStore(FolderStore(folder / "store"), length)


def one_cannot_read(rank: int, folder: Path) -> Any:
    return restored(rank, folder, damaged_for(rank, folder))


def one_cannot_read_the_nearest(rank: int, folder: Path) -> Any:
    """All go on to the second store, together."""
    second = CountingStore(FolderStore(folder / "store"))
    return restored(rank, folder, damaged_for(rank, folder), second) | {"bytes": read_bytes(second)}


def one_has_no_index(rank: int, folder: Path) -> Any:
    """A rank that fails before it knows what there is to read."""

    class Lost(CountingStore):
        def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
            return b"not JSON" if rank == 2 and key == fmt.index_key(BASE) else super().read(key, start, stop)

    return restored(rank, folder, Lost(FolderStore(folder / "store")))


def one_refuses(rank: int, folder: Path) -> Any:
    """A rank whose script has another model: it says so after both stores, and nobody waits."""
    store = FolderStore(folder / "store")
    return restored(rank, folder, store, store, model=empty_model(small=torch.zeros(17 + (rank == 0))))


def one_fails_at_length(rank: int, folder: Path) -> Any:
    """An error that is longer than what is told of it, and not one of ours."""

    class Long(CountingStore):
        def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
            if rank == 2 and key.endswith(".safetensors"):
                raise ValueError("ü" * 2000)
            return super().read(key, start, stop)

    try:
        return restored(rank, folder, Long(FolderStore(folder / "store")))
    except ValueError as error:
        return {"error": type(error).__name__, "text": str(error)}


def one_dies(rank: int, folder: Path) -> Any:
    """Rank 1 goes while it reads: the others learn it from their broken connections, not from a time-out."""

    def length(key: str, start: int, stop: int) -> int:
        if rank == 1 and key.endswith(".safetensors") and start >= 1 << 20:
            tell(None)
            os._exit(0)
        return stop - start

    store = CutStore(FolderStore(folder / "store"), length)
    return restored(rank, folder, store, store)


def one_dies_while_it_sends(rank: int, folder: Path) -> Any:
    """Rank 1 goes when all have read: the others have waited for a bucket of its."""
    sharing.BUCKET_BYTES = 1 << 20
    broadcast = sharing._broadcast
    sent = []

    def until_death(gang: Gang, source: int, *others: Any) -> None:
        if rank == source == 1:
            sent.append(source)
        if len(sent) == 3:
            tell(None)
            os._exit(0)
        broadcast(gang, source, *others)

    sharing._broadcast = until_death  # type: ignore[assignment]
    store = FolderStore(folder / "store")
    return restored(rank, folder, store, store)


JOBS: dict[str, tuple[Callable[[Path], None], Job]] = {
    "exact": (save_kinds, exact),
    "once": (save_state, once),
    "once-at-another-size": (save_state_by_two, once),
    "other-plans": (save_state, other_plans),
    "other-numbering": (save_state, other_numbering),
    "no-gang": (save_state, no_gang),
    "sharded": (save_model, sharded),
    "one-cannot-read": (save_model, one_cannot_read),
    "one-cannot-read-the-nearest": (save_model, one_cannot_read_the_nearest),
    "one-has-no-index": (save_model, one_has_no_index),
    "one-refuses": (save_model, one_refuses),
    "one-fails-at-length": (save_model, one_fails_at_length),
    "one-dies": (save_model, one_dies),
    "one-dies-while-it-sends": (save_model, one_dies_while_it_sends),
}
"""What is saved first, and what each rank then does."""


# ------------------------------------------------------------------------------------------------------ processes

_answers = -1


def tell(answer: Any) -> None:
    """Hand this rank's answer to the parent."""
    os.write(_answers, json.dumps(answer).encode() + b"\n")


def run(job: Job, folder: Path) -> Any:
    """Fork three ranks; their answers by rank, or what went wrong."""
    ranks = [_fork(job, folder, rank) for rank in range(3)]
    answers, problem = [], ""
    signal.alarm(JOB_SECONDS_MAX)
    for rank, (pid, pipe) in enumerate(ranks):
        try:
            with os.fdopen(pipe, "rb") as answer:
                answers.append(json.loads(answer.readline() or b'"nothing"'))
            if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
                problem = f"rank {rank} failed"
        except TimeoutError:
            problem = f"rank {rank} did not end in time"
            for other, _ in ranks[rank:]:
                os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
            break
    signal.alarm(0)
    return problem or answers


def _fork(job: Job, folder: Path, rank: int) -> tuple[int, int]:
    ours, theirs = os.pipe()

    def act() -> None:
        global _answers  # noqa: PLW0603 (once in each child)
        _answers = theirs
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / f'meeting-{job.__name__}'}",
            rank=rank,
            world_size=3,
            timeout=timedelta(seconds=GROUP_SECONDS),
        )
        dist.barrier()  # a rank that has nothing to do would be gone before the others have met
        tell(job(rank, folder))

    pid = fork(act)
    os.close(theirs)
    return pid, ours


def _too_late(number: int, frame: Any) -> None:
    raise TimeoutError


def main(parent: Path, wanted: Any) -> None:
    """All jobs one after another."""
    signal.signal(signal.SIGALRM, _too_late)
    for name, (prepare, job) in JOBS.items():
        if wanted and name not in wanted:
            continue
        folder = parent / prepare.__name__
        if not folder.exists():
            folder.mkdir()
            prepare(folder)
        print(f"{name}: {json.dumps(run(job, folder))}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
