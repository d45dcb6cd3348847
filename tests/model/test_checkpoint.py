"""Folders on disk: what was written comes back, split over any world, and a damaged folder is named, never loaded."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import shutil
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from whalez.errors import CheckpointError, ConfigError, WeightMismatch
from whalez.model.checkpoint import expert_bounds, load_weights, model_hash, read_tensors, write_checkpoint
from whalez.model.config import KimiLinearConfig
from whalez.model.presets import make_checkpoint
from whalez.model.weights import KdaWeights, MoeWeights, weight_plan


def load(directory: Path, rank: int = 0, world: int = 1):
    return load_weights(directory, KimiLinearConfig.from_dir(directory), rank, world)


def arrays_of(value):
    """Every parameter array of a Weights tree."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(map(arrays_of, value))
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from arrays_of(getattr(value, field.name))


@pytest.fixture
def folder(small, tmp_path):
    """A fresh folder with the small model in one f32 file."""
    keys, tensors = small
    write_checkpoint(tmp_path, keys, tensors)
    return tmp_path


def rewrite(directory: Path, change) -> None:
    """Let `change` edit the tensors of the one file."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


# --- what was written comes back


def test_every_parameter_is_where_the_forward_pass_expects_it(folder, small):
    _, tensors = small
    weights = load(folder)
    assert np.array_equal(weights.embed, tensors["model.embed_tokens.weight"])
    assert np.array_equal(weights.lm_head, tensors["lm_head.weight"])
    kda, prefix = weights.layers[0].attn, "model.layers.0.self_attn."
    assert isinstance(kda, KdaWeights)
    for i, x in enumerate("qkv"):
        assert np.array_equal(kda.qkv[12 * i : 12 * (i + 1)], tensors[f"{prefix}{x}_proj.weight"])
        assert np.array_equal(kda.conv[12 * i : 12 * (i + 1)], tensors[f"{prefix}{x}_conv1d.weight"][:, 0])
    for array, name in [(kda.f_a, "f_a_proj"), (kda.g_a, "g_a_proj"), (kda.b, "b_proj"), (kda.f_b, "f_b_proj")]:
        assert np.array_equal(array, tensors[f"{prefix}{name}.weight"])
        assert array.flags.c_contiguous
    assert np.array_equal(kda.a_log, tensors[prefix + "A_log"][0, 0, :, 0])
    assert np.array_equal(kda.dt_bias.ravel(), tensors[prefix + "dt_bias"])
    moe, prefix = weights.layers[1].mlp, "model.layers.1.block_sparse_moe."
    assert isinstance(moe, MoeWeights)
    for expert in range(5):
        assert np.array_equal(moe.w13[expert, :3], tensors[f"{prefix}experts.{expert}.w1.weight"])
        assert np.array_equal(moe.w13[expert, 3:], tensors[f"{prefix}experts.{expert}.w3.weight"])
        assert np.array_equal(moe.w2[expert], tensors[f"{prefix}experts.{expert}.w2.weight"])
    assert np.array_equal(moe.shared.gate_up[:6], tensors[prefix + "shared_experts.gate_proj.weight"])
    assert np.array_equal(weights.layers[0].mlp.gate_up[7:], tensors["model.layers.0.mlp.up_proj.weight"])


def test_arrays_are_f32_and_contiguous(folder):
    for array in arrays_of(load(folder, 1, 2)):
        assert array.dtype == np.float32
        assert array.flags.c_contiguous
        assert array.flags.writeable


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (2, 3), (4, 5)])
def test_slots_fill_every_parameter_exactly_once(small, rank, world):
    config = KimiLinearConfig.from_json(small[0])
    first, last = expert_bounds(config.num_experts, world)[rank : rank + 2]
    weights, slots = weight_plan(config, first, last, lambda shape: np.zeros(shape, np.float32))
    for slot in slots:
        if slot.rows is not None:
            slot.rows[...] += 1
    assert all((array == 1).all() for array in arrays_of(weights))
    assert sorted(slot.name for slot in slots) == sorted(small[1])


@pytest.mark.parametrize("max_shard_bytes", [None, 1, 3000, 10**9])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_round_trip(small, tmp_path, max_shard_bytes, dtype):
    keys, tensors = small
    if dtype == "bf16":
        tensors = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    write_checkpoint(tmp_path, keys, tensors, max_shard_bytes=max_shard_bytes)
    back = read_tensors(tmp_path)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert np.array_equal(back[name], tensor.astype(np.float32)), name
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    if max_shard_bytes in (None, 10**9):
        assert shards == ["model.safetensors"]
        return
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    assert len(shards) == (len(tensors) if max_shard_bytes == 1 else len(shards)) > 3
    if max_shard_bytes == 3000:
        sizes = [[t.nbytes for t in load_file(tmp_path / name).values()] for name in shards]
        assert all(sum(of_shard) <= 3000 or len(of_shard) == 1 for of_shard in sizes)
    load(tmp_path, 1, 2)


def test_bf16_special_values(folder):
    values = np.array([0.0, -0.0, np.inf, -np.inf, 1e-40, 3.3895314e38], np.float32).astype(ml_dtypes.bfloat16)
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": values}))
    assert load(folder).norm.tobytes() == values.astype(np.float32).tobytes()


def test_flat_a_log_is_accepted(folder, small):
    name = "model.layers.0.self_attn.A_log"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].ravel()}))
    assert np.array_equal(load(folder).layers[0].attn.a_log, small[1][name].ravel())


# --- experts over the world


@pytest.mark.parametrize("experts", [1, 5, 8, 16, 257])
def test_expert_blocks_cover_exactly(experts):
    for world in range(1, experts + 1):
        bounds = expert_bounds(experts, world)
        sizes = np.diff(bounds)
        assert (bounds[0], bounds[-1], len(bounds)) == (0, experts, world + 1)
        assert sizes.min() >= 1
        assert sizes.max() - sizes.min() <= 1


def test_ranks_of_any_world_hold_each_expert_once(tiny_dir):
    whole = load(tiny_dir).layers[2].mlp
    for world in range(1, 9):
        parts = [load(tiny_dir, rank, world).layers[2].mlp for rank in range(world)]
        assert [part.first_expert for part in parts[1:]] == [part.last_expert for part in parts[:-1]]
        assert np.array_equal(np.concatenate([part.w13 for part in parts]), whole.w13)
        assert np.array_equal(np.concatenate([part.w2 for part in parts]), whole.w2)
        assert all(np.array_equal(part.router, whole.router) for part in parts)


@pytest.mark.parametrize(("rank", "world"), [(0, 9), (2, 2), (-1, 2)])
def test_world_that_does_not_fit(tiny_dir, rank, world):
    with pytest.raises(ConfigError, match="world"):
        load(tiny_dir, rank, world)


def test_rank_reads_only_its_own_experts(tiny_dir):
    def read_count() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    config = KimiLinearConfig.from_dir(tiny_dir)
    own = {slot.name for slot in weight_plan(config, 7, 8, np.empty)[1] if slot.rows is not None}
    own_bytes = sum(tensor.nbytes for name, tensor in read_tensors(tiny_dir).items() if name in own)
    file_bytes = (tiny_dir / "model.safetensors").stat().st_size
    before = read_count()
    load_weights(tiny_dir, config, 7, 8)
    assert own_bytes < 0.7 * file_bytes
    assert own_bytes <= read_count() - before <= own_bytes + 64 * 1024


# --- damaged folders. Every one is refused within a second, by CheckpointError, with file and tensor.


def refused(directory: Path, *says: str) -> CheckpointError:
    start = time.process_time()  # of the CPU: other processes on the machine are not our delay
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    assert time.process_time() - start < 1
    for text in says:
        assert text in str(caught.value)
    return caught.value


def test_truncated_file_names_the_tensor(folder):
    path = folder / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 1)
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"][1])
    refused(folder, str(path), f"truncated at tensor {last}")


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, 5000])
def test_file_cut_in_its_header(folder, keep):
    os.truncate(folder / "model.safetensors", keep)
    refused(folder, str(folder / "model.safetensors"), "header")


@pytest.mark.parametrize("start", [b"\xff" * 8, b"\0" * 8, b"PK\3\4" * 4, b"\2\0\0\0\0\0\0\0[]"], ids=range(4))
def test_bad_header(folder, start):
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(start + raw[len(start) :])
    refused(folder, str(path))


def test_damaged_bytes_are_refused_or_load_but_never_surprise(folder):
    """Whatever single byte of the header changes: CheckpointError, or a checkpoint like any other."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    header_end = 8 + int.from_bytes(raw[:8], "little")
    choose = random.Random(7)
    refused_count = 0
    for _ in range(150):
        damaged = bytearray(raw)
        damaged[choose.randrange(header_end)] ^= 1 << choose.randrange(8)
        path.write_bytes(damaged)
        try:
            load(folder)
        except CheckpointError:
            refused_count += 1
    assert refused_count > 100


def test_file_missing(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, str(folder / "model.safetensors"))


def test_unsupported_dtype(folder):
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": np.ones(6, np.float16)}))
    refused(folder, "model.safetensors", "tensor model.norm.weight", "F16")


def test_missing_unused_and_wrong_shape_are_all_listed(folder):
    def change(tensors):
        del tensors["model.layers.1.self_attn.kv_b_proj.weight"]
        tensors["model.layers.9.extra"] = np.ones(3, np.float32)
        tensors["lm_head.weight"] = np.ones((6, 260), np.float32)

    rewrite(folder, change)
    error = refused(folder, str(folder), "model.safetensors")
    assert isinstance(error, WeightMismatch)
    assert error.missing == ("model.layers.1.self_attn.kv_b_proj.weight",)
    assert error.unused == ("model.layers.9.extra in model.safetensors",)
    assert error.wrong_shape == ("lm_head.weight in model.safetensors (expected [260, 6], got [6, 260])",)


def test_one_unused_tensor_is_enough(folder):
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.g_proj.weight": np.ones(3, np.float32)}))
    error = refused(folder, "layers.0.self_attn.g_proj.weight in model.safetensors")
    assert isinstance(error, WeightMismatch)
    assert (error.missing, error.wrong_shape) == ((), ())


def test_one_missing_tensor_is_enough(folder):
    rewrite(folder, lambda tensors: tensors.pop("model.layers.2.self_attn.dt_bias"))
    error = refused(folder, "missing: model.layers.2.self_attn.dt_bias")
    assert isinstance(error, WeightMismatch)
    assert (error.unused, error.wrong_shape) == ((), ())


def test_expert_of_another_rank_is_checked_too(folder):
    name = "model.layers.2.block_sparse_moe.experts.4.w2.weight"
    rewrite(folder, lambda tensors: tensors.update({name: np.ones((3, 6), np.float32)}))
    with pytest.raises(WeightMismatch, match=r"experts\.4\.w2"):
        load(folder, 0, 5)


@pytest.mark.parametrize(
    ("key", "value", "tensor"),
    [
        ("hidden_size", 7, "model.embed_tokens.weight"),
        ("hidden_size", 1 << 24, "model.embed_tokens.weight"),
        ("num_experts", 6, "experts.5.w1.weight"),
        ("num_experts", 65536, "experts.65535.w1.weight"),
        ("num_experts", 4, "experts.4.w1.weight"),
        ("first_k_dense_replace", 2, "layers.1.mlp.gate_proj.weight"),
        ("num_shared_experts", 1, "shared_experts.gate_proj.weight"),
        ("kv_lora_rank", 5, "layers.1.self_attn.kv_b_proj.weight"),
    ],
)
def test_config_that_contradicts_the_tensors(folder, small, key, value, tensor):
    (folder / "config.json").write_text(json.dumps(small[0] | {key: value}))
    error = refused(folder, str(folder), "config.json")
    assert isinstance(error, WeightMismatch)
    assert any(tensor in item for item in (*error.missing, *error.unused, *error.wrong_shape))


# --- shards


@pytest.fixture
def sharded(small, tmp_path):
    write_checkpoint(tmp_path, small[0], small[1], max_shard_bytes=4000)
    return tmp_path


def edit_index(directory: Path, change) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_shard_missing(sharded):
    path = sharded / "model-00002-of-00005.safetensors"
    assert len(list(sharded.glob("*.safetensors"))) == 5
    path.unlink()
    refused(sharded, str(path))


def test_shard_truncated(sharded):
    path = sharded / "model-00002-of-00005.safetensors"
    os.truncate(path, path.stat().st_size - 10)
    refused(sharded, str(path), "truncated at tensor model.")


@pytest.mark.parametrize("file_name", ["../model.safetensors", "/etc/passwd", "model.bin", 3, None])
def test_index_may_only_name_files_of_the_folder(sharded, file_name):
    edit_index(sharded, lambda weight_map: weight_map.update({"lm_head.weight": file_name}))
    refused(sharded, "model.safetensors.index.json", "lm_head.weight")


def test_index_that_disagrees_with_its_shards(sharded):
    def swap(weight_map):
        del weight_map["model.norm.weight"]
        weight_map["lm_head.weight"] = "model-00001-of-00005.safetensors"
        weight_map["ghost"] = "model-00001-of-00005.safetensors"

    last = "model-00005-of-00005.safetensors"
    edit_index(sharded, swap)
    # The last shard may drop out of the index altogether; keep it in.
    edit_index(sharded, lambda weight_map: weight_map.setdefault("other", last))
    error = refused(sharded, "model.safetensors.index.json")
    assert any("ghost" in item for item in error.missing)
    assert any("lm_head.weight" in item for item in error.missing)
    assert any("model.norm.weight" in item for item in error.unused)


def test_tensor_in_two_shards(sharded):
    path = sharded / "model-00002-of-00005.safetensors"
    save_file(load_file(path) | {"model.embed_tokens.weight": np.zeros((260, 6), np.float32)}, path)
    refused(sharded, str(path), "model.embed_tokens.weight is also in model-00001")


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "nonsense"])
def test_bad_index(sharded, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    refused(sharded, "model.safetensors.index.json")


# --- writing


def test_a_checkpoint_is_never_overwritten(folder, small):
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"config\.json: exists"):
        write_checkpoint(folder, *small)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: exists"):
        write_checkpoint(folder, *small)
    assert (folder / "model.safetensors").read_bytes() == before


def test_leftovers_of_a_killed_write_do_not_matter(tmp_path, small):
    (tmp_path / "model.safetensors.partial").write_text("half")
    write_checkpoint(tmp_path, *small)
    load(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_a_write_cut_short_at_any_file_leaves_no_checkpoint(tmp_path, monkeypatch):
    """A folder with a config.json is complete, settings included."""
    replace, written = Path.replace, []

    def cut(path, target):
        if len(written) == stop:
            raise KeyboardInterrupt
        written.append(Path(target).name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", cut)
    for stop in range(3):
        written.clear()
        with pytest.raises(KeyboardInterrupt):
            make_checkpoint(tmp_path / str(stop), "kimi-linear", "tiny", 0)
        assert len(written) == stop
        assert not (tmp_path / str(stop) / "config.json").exists()
    stop = 9
    make_checkpoint(tmp_path / "whole", "kimi-linear", "tiny", 0)
    assert {path.name for path in (tmp_path / "whole").iterdir()} == {*written} == {
        "config.json", "model.safetensors", "whalez.json"
    }  # fmt: skip


def test_folder_that_cannot_be_written(tmp_path, small):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_checkpoint(tmp_path / "file", *small)


# --- the fingerprint


def test_equal_copies_have_equal_fingerprints(folder, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copy") / "elsewhere"
    shutil.copytree(folder, copy)
    assert model_hash(copy) == model_hash(folder)
    # Key order and white space are not the model.
    keys = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(dict(reversed(keys.items()))))
    assert model_hash(copy) == model_hash(folder)


def test_fingerprint_sees_config_values_and_names(folder, small):
    seen = {model_hash(folder)}
    (folder / "config.json").write_text(json.dumps(small[0] | {"routed_scaling_factor": 2.0}))
    seen.add(model_hash(folder))
    rewrite(folder, lambda tensors: tensors["model.norm.weight"].__iadd__(1))
    seen.add(model_hash(folder))
    rewrite(folder, lambda tensors: tensors.update({"model.morn.weight": tensors.pop("model.norm.weight")}))
    seen.add(model_hash(folder))
    assert len(seen) == 4


def test_fingerprint_of_a_damaged_folder_names_it(folder):
    os.truncate(folder / "model.safetensors", 5000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        model_hash(folder)
