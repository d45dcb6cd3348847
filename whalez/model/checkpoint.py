"""A Hugging Face folder on disk: config.json and safetensors, whole or in shards, to and from arrays.

Rule 1: every tensor is used exactly once and every parameter filled exactly once; headers are compared with the config
before a byte of data is read, so a wrong checkpoint fails within a second.   Rule 2: a rank reads the bytes of its own
experts only. Files are read with pread and not mapped, so a file cut short while we read is an error and not SIGBUS.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from whalez.config import SETTINGS_FILE
from whalez.errors import CheckpointError, ConfigError, WeightMismatch
from whalez.model.config import CONFIG_FILE, KimiLinearConfig, read_json
from whalez.model.weights import F32, Shape, TensorSlot, Weights, expert_bounds, weight_plan

__all__ = ["expert_bounds", "load_weights", "model_hash", "read_tensors", "tensors_digest", "write_checkpoint"]

WHOLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = ("F32", "BF16")

# The fingerprint looks at this many tensors of a file at most, and at this many bytes in the middle of each.
_SAMPLED_TENSORS = 4096
_SAMPLE_BYTES = 64


def load_weights(directory: str | Path, config: KimiLinearConfig, rank: int, world: int) -> Weights:
    """The parameters of `rank`: its block of the experts, and all the rest.

    Returns: f32, C-contiguous arrays owned by the caller.
    Raises:  ConfigError if world is larger than the number of experts; WeightMismatch listing what is missing, unused
             or of the wrong shape; CheckpointError naming file and tensor for files that cannot be used.
    """
    if not 0 <= rank < world <= config.num_experts:
        raise ConfigError(f"world: expected rank {rank} < world <= {config.num_experts} (the experts), got {world}")
    first, last = expert_bounds(config.num_experts, world)[rank : rank + 2]
    with _open(Path(directory)) as folder:
        folder.check_experts_count(config)
        # First without memory: a config that contradicts the tensors may ask for any amount of it.
        folder.check(weight_plan(config, first, last, _no_memory)[1])
        weights, slots = weight_plan(config, first, last, _allocate)
        for slot in slots:
            if slot.rows is not None:
                folder.read_into(slot.name, slot.rows)
    return weights


def read_tensors(directory: str | Path) -> dict[str, F32]:
    """Every tensor of a checkpoint under its published name, as f32 in its published shape."""
    tensors = {}
    with _open(Path(directory)) as folder:
        for name, entry in folder.entries.items():
            tensors[name] = np.empty(entry.shape, np.float32)
            folder.read_into(name, tensors[name])
    return tensors


def tensors_digest(tensors: Mapping[str, NDArray[Any]]) -> str:
    """SHA-256 of all names, shapes and values, whatever the folder they came from looks like."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = np.ascontiguousarray(tensors[name])
        digest.update(f"{name} {tensor.dtype} {tensor.shape} ".encode())
        digest.update(tensor.tobytes())
    return digest.hexdigest()


def model_hash(directory: str | Path) -> str:
    """A fingerprint of the folder: config, headers, sizes, and bytes from the middle of up to 4096 tensors per file.

    Equal for equal copies wherever they lie; cheap, as it reads a small part of the data.
    """
    directory = Path(directory)
    digest = hashlib.sha256()
    digest.update(json.dumps(read_json(directory / CONFIG_FILE), sort_keys=True).encode())
    with _open(directory) as folder:
        paths = sorted({entry.path for entry in folder.entries.values()})
    for path in paths:
        with _reading(path), path.open("rb") as file:
            raw, header = _read_header(path)
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {size} {len(raw)} ".encode() + raw)
            spans = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
            for start, end in spans[:: -(-len(spans) // _SAMPLED_TENSORS) or 1]:
                middle = start + max(0, end - start - _SAMPLE_BYTES) // 2
                digest.update(os.pread(file.fileno(), min(_SAMPLE_BYTES, end - middle), 8 + len(raw) + middle))
    return digest.hexdigest()


def write_checkpoint(
    directory: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, NDArray[Any]],
    *,
    max_shard_bytes: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint in the order of `tensors`; with `max_shard_bytes`, in shards of at most so much data each.

    settings: of the fleets that serve it, into whalez.json

    A shard holds at least one tensor, however large. Files get their names when all are written, config.json last, so
    a folder with a config.json is complete.

    Raises: CheckpointError if the folder already holds a checkpoint or part of one, or cannot be written.
    """
    directory = Path(directory)
    with _writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for path in (directory / CONFIG_FILE, *directory.glob("*.safetensors")):
            if path.exists():
                raise CheckpointError(f"{path}: exists; a checkpoint is only written into a folder that has none")
        shards = _cut_into_shards(tensors, max_shard_bytes)
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        if len(shards) == 1:
            names = [WHOLE_FILE]
        for file_name, shard in zip(names, shards, strict=True):
            _write_shard(directory / f"{file_name}.partial", {name: tensors[name] for name in shard})
        for file_name in names:
            (directory / f"{file_name}.partial").replace(directory / file_name)
        if len(shards) > 1:
            files = {name: file_name for file_name, shard in zip(names, shards, strict=True) for name in shard}
            total = sum(tensor.nbytes for tensor in tensors.values())
            _write_json(directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": files})
        if settings is not None:
            _write_json(directory / SETTINGS_FILE, settings)
        _write_json(directory / CONFIG_FILE, config)


def _cut_into_shards(tensors: Mapping[str, NDArray[Any]], max_shard_bytes: int | None) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, tensor in tensors.items():
        if room is not None and max_shard_bytes is not None:
            if tensor.nbytes > room and shards[-1]:
                shards.append([])
                room = max_shard_bytes
            room -= tensor.nbytes
        shards[-1].append(name)
    return shards


def _write_shard(path: Path, tensors: dict[str, NDArray[Any]]) -> None:
    # The library takes the memory as it lies, so a transposed view would be written wrongly without a word.
    assert all(tensor.flags.c_contiguous for tensor in tensors.values())
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library leaves it readable by its owner only


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(data, indent=2) + "\n")
    partial.replace(path)


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory}: cannot be written: {error}") from error


@contextmanager
def _reading(path: Path, tensor: str | None = None) -> Iterator[None]:
    """What goes wrong inside is the fault of `path`, and of `tensor` in it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {f'tensor {tensor}: ' if tensor else ''}cannot be read: {error}") from error


def _allocate(shape: Shape) -> F32:
    return np.empty(shape, np.float32)


def _no_memory(shape: Shape) -> F32:
    return np.broadcast_to(np.float32(0), shape)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where one tensor lies."""

    path: Path
    shape: Shape
    dtype: str  # as safetensors writes it


class _Folder:
    """The open files of a checkpoint. Owns: their handles. Closed by: the `_open` that made it."""

    def __init__(self, directory: Path, entries: dict[str, _Entry], files: dict[Path, Any]) -> None:
        self._directory = directory
        self.entries = entries
        self._files = files

    def check_experts_count(self, config: KimiLinearConfig) -> None:
        """Refuse a config with several times the experts of the files, without a plan of them all.

        Raises: WeightMismatch that names the last expert of each layer.
        """
        if 3 * config.num_experts * len(config.moe_layers) > 4 * len(self.entries) + 1000:
            last = config.num_experts - 1
            missing = [f"model.layers.{n}.block_sparse_moe.experts.{last}.w1.weight" for n in config.moe_layers]
            raise self._mismatch(missing)

    def _mismatch(
        self, missing: Sequence[str], unused: Sequence[str] = (), wrong_shape: Sequence[str] = ()
    ) -> WeightMismatch:
        return WeightMismatch(f"{self._directory}: config.json against the headers", missing, unused, wrong_shape)

    def check(self, slots: list[TensorSlot]) -> None:
        """Compare names and shapes of all tensors, own and other ranks', with the headers.

        Raises: WeightMismatch if a slot has no tensor, a tensor no slot, or a shape differs.
        """
        wanted = {slot.name: slot for slot in slots}
        wrong_shape = []
        for name, entry in self.entries.items():
            slot = wanted.get(name)
            if slot is not None and entry.shape not in (slot.shape, slot.other_shape):
                shapes = f"expected {list(slot.shape)}, got {list(entry.shape)}"
                wrong_shape.append(f"{name} in {entry.path.name} ({shapes})")
        missing = [name for name in wanted if name not in self.entries]
        unused = [f"{name} in {entry.path.name}" for name, entry in self.entries.items() if name not in wanted]
        if missing or unused or wrong_shape:
            raise self._mismatch(missing, unused, wrong_shape)

    def read_into(self, name: str, rows: F32) -> None:
        """Fill `rows` with the tensor, converted to f32 and laid out as `rows` is."""
        entry = self.entries[name]
        with _reading(entry.path, name):
            tensor = self._files[entry.path].get_tensor(name).reshape(rows.shape)
        if tensor.dtype == ml_dtypes.bfloat16:
            # bf16 is the upper half of an f32; shifting is several times as fast as the cast of ml_dtypes.
            np.left_shift(tensor.view(np.uint16), 16, out=rows.view(np.uint32), dtype=np.uint32)
        else:
            rows[...] = tensor


@contextmanager
def _open(directory: Path) -> Iterator[_Folder]:
    """Open the safetensors of a folder and read their headers."""
    index_path = directory / INDEX_FILE
    mapped: dict[str, str] | None = None
    # A whole file wins over an index, as in the libraries that wrote such folders.
    if not (directory / WHOLE_FILE).exists() and index_path.exists():
        mapped = _weight_map(index_path)
    paths = [directory / WHOLE_FILE] if mapped is None else [directory / name for name in sorted(set(mapped.values()))]
    entries: dict[str, _Entry] = {}
    files: dict[Path, Any] = {}
    with ExitStack() as stack:
        for path in paths:
            files[path] = file = stack.enter_context(_open_file(path))
            with _reading(path):
                for name in file.keys():  # noqa: SIM118 - a handle of the library, not a dict
                    header = file.get_slice(name)
                    entry = _Entry(path, tuple(header.get_shape()), str(header.get_dtype()))
                    _admit(name, entry, entries)
                    entries[name] = entry
        if mapped is not None:
            _check_index(index_path, mapped, entries)
        yield _Folder(directory, entries, files)


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="np", backend="pread")
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {_what_is_wrong(path) or error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def _admit(name: str, entry: _Entry, entries: Mapping[str, _Entry]) -> None:
    if name in entries:
        raise CheckpointError(f"{entry.path}: tensor {name} is also in {entries[name].path.name}")
    if entry.dtype not in _DTYPES:
        raise CheckpointError(f"{entry.path}: tensor {name}: expected dtype F32 or BF16, got {entry.dtype}")


def _weight_map(path: Path) -> dict[str, str]:
    mapped = read_json(path).get("weight_map")
    if not isinstance(mapped, dict) or not mapped:
        raise CheckpointError(f"{path}: weight_map: expected an object of tensor names and files")
    for name, file_name in mapped.items():
        if (
            not isinstance(file_name, str)
            or not file_name.endswith(".safetensors")
            or Path(file_name).name != file_name
        ):
            raise CheckpointError(f"{path}: tensor {name}: expected a safetensors file of this folder")
    return mapped


def _check_index(path: Path, mapped: Mapping[str, str], entries: Mapping[str, _Entry]) -> None:
    """An index that disagrees with the files tells of a shard of another checkpoint."""
    lies_in = {name: entry.path.name for name, entry in entries.items()}
    missing = [f"{name} in {file}" for name, file in mapped.items() if lies_in.get(name) != file]
    unused = [f"{name} in {entry.path.name}" for name, entry in entries.items() if name not in mapped]
    if missing or unused:
        raise WeightMismatch(str(path), missing, unused)


def _read_header(path: Path) -> tuple[bytes, dict[str, Any]]:
    """The header as it is written and parsed; OSError or ValueError if it is neither whole nor JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size - 8:
            raise ValueError(f"expected a header of {length} bytes, the file has {path.stat().st_size} in all")
        raw = file.read(length)
    header = json.loads(raw)
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    return raw, header


def _what_is_wrong(path: Path) -> str | None:
    """Which tensor a cut file lost, since the library only says that the file is not covered; None if it is not cut."""
    try:
        raw, header = _read_header(path)
        ends = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
        have = path.stat().st_size - 8 - len(raw)
        lost = sorted((end, name) for name, end in ends.items() if end > have)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        return f"bad header: {error}" if isinstance(error, ValueError) else None
    if not lost:
        return None
    return f"truncated at tensor {lost[0][1]}: {have} bytes of data, {lost[-1][0]} expected ({len(lost)} tensors lost)"
