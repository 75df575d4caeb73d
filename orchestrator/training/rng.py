"""The random number generators of one rank: capture, restore, and re-derive after a change of world size.

What it is: the state of python's `random`, numpy's global generator, torch's CPU generator and, if CUDA is
initialised, the generator of each visible CUDA device, split into JSON-able values and uint8 tensors, as
checkpoints store it. A round trip is exact to the bit.

What it is not: it knows no generator objects that a script makes for itself (`numpy.random.default_rng`,
`torch.Generator`); data-loader workers have generators of their own, too. It never initialises CUDA.

Who calls it: `training.session`: captures at a step boundary, restores last on entry (after the sampler was
positioned) and again before the first step is yielded.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from crc32c import crc32c
from torch import Tensor

from orchestrator.errors import StateError

_CUDA_PREFIX = "cuda."
_PYTHON_WORDS = 625  # Mersenne Twister: 624 words and the place in them


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RngState:
    """The state of every generator of one rank at one moment; compare by `digest`."""

    python: str
    """`random.getstate()` as JSON: [version, [625 ints], float or null]."""
    numpy: str
    """`numpy.random.get_state(legacy=False)` as JSON, arrays as lists."""
    torch: Tensor
    """The CPU generator's state: uint8 [bytes], in host memory."""
    cuda: tuple[Tensor, ...]
    """One uint8 [bytes] per visible device, in host memory; empty if CUDA was not initialised."""

    def values(self) -> dict[str, str]:
        """The parts that are no tensors, by name; JSON-able."""
        return {"python": self.python, "numpy": self.numpy}

    def tensors(self) -> dict[str, Tensor]:
        """The parts that are tensors, by name: "torch", "cuda.0", "cuda.1", …; uint8 [bytes] each."""
        return {"torch": self.torch} | {f"{_CUDA_PREFIX}{place}": state for place, state in enumerate(self.cuda)}

    @classmethod
    def from_parts(cls, values: Mapping[str, object], tensors: Mapping[str, Tensor]) -> RngState:
        """The inverse of `values` and `tensors`. Copies the tensors. Raises StateError naming the part."""
        cuda_names = [f"{_CUDA_PREFIX}{place}" for place in range(len(tensors) - 1)]
        for name in tensors:
            if name not in ("torch", *cuda_names):
                raise StateError(f"rng.{name}", "unexpected, or one before it is missing")
        return cls(
            python=_text(values, "python"),
            numpy=_text(values, "numpy"),
            torch=_bytes_tensor(tensors, "torch"),
            cuda=tuple(_bytes_tensor(tensors, name) for name in cuda_names),
        )


def capture() -> RngState:
    """The state of every global generator, as copies. Never initialises CUDA, advances nothing."""
    version, words, gauss = random.getstate()
    return RngState(
        python=json.dumps([version, words, gauss]),
        numpy=json.dumps(np.random.get_state(legacy=False), default=_array_as_list),
        torch=torch.get_rng_state(),
        cuda=tuple(torch.cuda.get_rng_state_all()) if _cuda_is_initialized() else (),
    )


def restore(state: RngState) -> None:
    """Put every generator into the given state. Raises StateError naming the one that cannot take it.

    CUDA states need as many visible devices as there were; they are taken up when CUDA initialises, if it has not.
    """
    if state.cuda and torch.cuda.device_count() != len(state.cuda):
        visible = torch.cuda.device_count()
        raise StateError("rng.cuda", f"saved for {len(state.cuda)} visible devices, but {visible} are visible")
    random.setstate(_python_state(state.python))
    try:
        np.random.set_state(json.loads(state.numpy))
    except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
        raise StateError("rng.numpy", f"numpy's global generator cannot take the saved state: {error}") from error
    try:
        torch.set_rng_state(state.torch)
    except (RuntimeError, TypeError) as error:
        raise StateError("rng.torch", f"torch's CPU generator cannot take the saved state: {error}") from error
    for place, device_state in enumerate(state.cuda):
        try:
            torch.cuda.set_rng_state(device_state, device=place)
        except (RuntimeError, TypeError) as error:
            raise StateError(f"rng.cuda.{place}", f"the device cannot take the saved state: {error}") from error


def derive(generation: int, step: int, rank: int, world_size: int) -> None:
    """Seed every generator for a rank whose state was not saved, as after a change of world size.

    The rule, which must never change: seed = the first 8 bytes, big-endian, of
    sha256("orchestrator-rng/1/{generation}/{step}/{rank}/{world_size}"). `random` and torch (CPU and, at once or
    when it initialises, CUDA) take the seed, numpy its low 32 bits. So a repeated remap of the same checkpoint in
    the same generation repeats itself, and no two ranks share a sequence.
    """
    text = f"orchestrator-rng/1/{generation}/{step}/{rank}/{world_size}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


def digest(state: RngState) -> str:
    """crc32c, 8 hex digits, of every part with its name and size, in the order of `values`, then `tensors`."""
    parts = [(name, text.encode()) for name, text in state.values().items()]
    parts += [(name, tensor.numpy().tobytes()) for name, tensor in state.tensors().items()]
    checksum = 0
    for name, content in parts:
        checksum = crc32c(content, crc32c(f"{name}:{len(content)}:".encode(), checksum))
    return f"{checksum:08x}"


def _cuda_is_initialized() -> bool:
    """Whether this process has a CUDA context already; asking does not make one."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _array_as_list(value: object) -> object:
    """json's fallback: numpy arrays and scalars as lists and numbers."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise StateError("rng.numpy", f"numpy's global generator has a state of type {type(value).__name__}")


def _python_state(text: str) -> tuple[int, tuple[int, ...], float | None]:
    """What `random.setstate` takes, from its JSON. Raises StateError."""
    try:
        version, words, gauss = json.loads(text)
        # The trial on a generator of its own keeps the global one whole if the state is no good.
        random.Random().setstate((version, tuple(words), gauss))
        if len(words) != _PYTHON_WORDS or not (gauss is None or isinstance(gauss, float)):
            raise ValueError("wrong shape")
    except (ValueError, TypeError, OverflowError) as error:
        raise StateError("rng.python", f"python's generator cannot take the saved state: {error}") from error
    return version, tuple(words), gauss


def _text(values: Mapping[str, object], name: str) -> str:
    """The text part of that name. Raises StateError."""
    text = values.get(name)
    if not isinstance(text, str):
        raise StateError(f"rng.{name}", "missing" if text is None else f"must be text, is {type(text).__name__}")
    return text


def _bytes_tensor(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """A copy, in host memory, of the uint8 [bytes] tensor of that name. Raises StateError."""
    if name not in tensors:
        raise StateError(f"rng.{name}", "missing")
    tensor = tensors[name]
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise StateError(f"rng.{name}", f"must be uint8 [bytes], is {tensor.dtype} {list(tensor.shape)}")
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
