"""What every op refuses before anything is queued: an address that is not aligned, and a grid that no device takes.

On a device either would be an error of the whole context. One table for all ops; an op that is not in it fails a test.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

import whalez
from whalez.errors import ShapeError
from whalez.ops.conv import cuda as conv
from whalez.ops.device.limits import GRID_YZ_MAX
from whalez.ops.kda import cuda as kda
from whalez.ops.latent import cuda as latent
from whalez.ops.lse import cuda as lse
from whalez.ops.mla import cuda as mla
from whalez.ops.moe import cuda as moe
from whalez.ops.norm import cuda as norm

PLACE = 1 << 20
WIDTH = {"key_dim": 32, "value_dim": 32}
PAGED = {"pages_count": 4, "start": 0, "count": 3, "page_tokens": 16, "width": 576}
DECODED = {"requests": 2, "heads": 3, "pages_row": 1, "page_tokens": 16, "shares": 1, "scale": 0.1}
ATTENDED = {"heads": 2, "dims": (32, 16, 32), "scale": 0.1}

#: op -> bytes that each of its addresses must be aligned to, its other arguments, and the most that one of these may be
OPS: dict[Any, tuple[dict[str, int], dict[str, Any], dict[str, int]]] = {
    kda.kda_gate: ({"f": 4, "a_log": 4, "dt_bias": 4}, {"f_stride": 64, "rows": 3, "heads": 2, "key_dim": 32}, {}),
    kda.kda_beta: ({"b": 4}, {"b_stride": 2, "rows": 3, "heads": 2}, {}),
    kda.kda_prepare: (
        {"q": 2, "k": 2, "v": 2, "g": 4, "beta": 4, "tiles": 16},
        {"q_stride": 64, "k_stride": 64, "v_stride": 64, "g_stride": 64, "beta_stride": 2, "scale": 0.1}
        | {"rows": 3, "heads": 2, **WIDTH},
        {"heads": GRID_YZ_MAX},
    ),
    kda.kda_scan: (
        {"tiles": 16, "state": 4, "out": 2},
        {"out_stride": 64, "rows": 3, "heads": 2, **WIDTH},
        {"heads": GRID_YZ_MAX},
    ),
    kda.kda_package: ({"tiles": 16, "m": 4, "d": 4}, {"rows": 3, "heads": 2, **WIDTH}, {"heads": GRID_YZ_MAX}),
    kda.kda_package_d: ({"tiles": 16, "d": 4}, {"rows": 3, "heads": 2, **WIDTH}, {"heads": GRID_YZ_MAX}),
    kda.kda_compose: ({"m": 16, "d": 4, "state": 16}, {"heads": 2, **WIDTH}, {}),
    kda.kda_decode: (
        {"q": 2, "k": 2, "v": 2, "g": 4, "beta": 4, "states": 4, "slots": 8, "out": 2},
        {"q_stride": 64, "k_stride": 64, "v_stride": 64, "g_stride": 64, "beta_stride": 2, "scale": 0.1}
        | {"out_stride": 64, "rows": 3, "heads": 2, **WIDTH},
        {"heads": GRID_YZ_MAX, "rows": GRID_YZ_MAX},
    ),
    mla.mla_attend: (
        {"q": 4, "kv": 16, "kr": 16, "out": 4, "lse": 4},
        {"queries": 3, "keys": 3, "q_start": 0, "causal": True, **ATTENDED},
        {"heads": GRID_YZ_MAX},
    ),
    mla.mla_attend_context: (
        {"q": 4, "out": 4, "lse": 4, "acc": 4, "part": 4, "part_lse": 4},
        {"read": None, "queries": 3, "start": 4, "window": 8, **ATTENDED},
        {"heads": GRID_YZ_MAX},
    ),
    mla.mla_decode_absorbed: (
        {"q_absorbed": 4, "pool": 16, "pages": 4, "lengths": 8, "out": 4, "scratch": 16},
        DECODED,
        {"requests": GRID_YZ_MAX, "shares": GRID_YZ_MAX},
    ),
    mla.mla_absorb: (
        {"q": 4, "w_kv_b": 4, "q_absorbed": 4},
        {"requests": 2, "heads": 3, "dims": (32, 64, 48)},
        {"requests": GRID_YZ_MAX},
    ),
    mla.mla_project: (
        {"mean": 4, "w_kv_b": 4, "out": 2},
        {"requests": 2, "heads": 3, "dims": (32, 64, 48)},
        {"requests": GRID_YZ_MAX},
    ),
    mla.mla_decode: (
        {"q": 4, "w_kv_b": 4, "pool": 16, "pages": 4, "lengths": 8, "out": 2, "scratch": 16},
        {**DECODED, "dims": (32, 64, 48)},
        {"requests": GRID_YZ_MAX, "shares": GRID_YZ_MAX},
    ),
    lse.lse_merge: (
        {"acc": 4, "acc_lse": 4, "part": 2, "part_lse": 4},
        {"acc_stride": 64, "part_stride": 64, "tokens": 3, "heads": 2, "value_dim": 32, "part_is_bf16": True},
        {"heads": GRID_YZ_MAX * lse.WARPS_MAX},
    ),
    lse.lse_finalise: (
        {"acc": 4, "acc_lse": 4, "out": 2},
        {"acc_stride": 64, "out_stride": 64, "tokens": 3, "heads": 2, "value_dim": 32},
        {"heads": GRID_YZ_MAX * lse.WARPS_MAX},
    ),
    norm.rms_norm: (
        {"x": 2, "weight": 4, "out": 2},
        {"x_stride": 64, "eps": 1e-5, "out_stride": 64, "rows": 3, "width": 64},
        {},
    ),
    norm.gated_rms_norm: (
        {"o": 2, "weight": 4, "gate": 2},
        {"o_stride": 64, "gate_stride": 64, "eps": 1e-5, "rows": 3, "heads": 2, "width": 32},
        {"heads": GRID_YZ_MAX * norm.HEAD_WARPS_MAX},
    ),
    norm.l2_norm: (
        {"x": 2},
        {"x_stride": 64, "rows": 3, "heads": 2, "width": 32},
        {"heads": GRID_YZ_MAX * norm.HEAD_WARPS_MAX},
    ),
    latent.latent_norm: ({"c": 2, "weight": 4}, {"c_stride": 576, "eps": 1e-5, "rows": 3, "rank": 512}, {}),
    latent.latent_append: ({"rows": 2, "pool": 2, "pages": 4}, {"rows_stride": 576, **PAGED}, {}),
    latent.latent_gather: ({"pool": 2, "pages": 4, "out": 2}, {"out_stride": 576, **PAGED}, {}),
    latent.latent_append_decode: (
        {"rows": 2, "pool": 2, "pages": 4, "positions": 8},
        {"rows_stride": 576, "pages_stride": 1, "requests": 3, "page_tokens": 16, "width": 576},
        {},
    ),
    moe.swiglu: (
        {"gate_up": 2, "out": 2},
        {"gate_up_stride": 64, "out_stride": 32, "rows": 3, "width": 32},
        {"width": GRID_YZ_MAX * moe.THREADS},
    ),
    conv.short_conv: (
        {"x": 2, "tail": 2, "next_tail": 2, "weight": 4, "out": 2, "scratch": 16},
        {"x_stride": 64, "out_stride": 64, "rows": 130, "width": 64},
        {"width": GRID_YZ_MAX * conv.THREADS},
    ),
    conv.conv_tail: (
        {"x": 2, "tail": 2, "next_tail": 2},
        {"x_stride": 64, "rows": 3, "width": 64},
        {"width": GRID_YZ_MAX * conv.THREADS},
    ),
    conv.short_conv_decode: (
        {"x": 2, "tails": 2, "slots": 8, "weight": 4, "out": 2},
        {"x_stride": 64, "slot_stride": 192, "out_stride": 64, "rows": 3, "width": 64},
        {"width": GRID_YZ_MAX * conv.THREADS},
    ),
}


class Launches:
    """A stream that only takes what a grid may be."""

    def __init__(self) -> None:
        self.count = 0

    def launch(self, kernel: Any, grid: Any, block: Any, shared_bytes: int, *arguments: Any) -> None:
        x, y, z = (grid, 1, 1) if isinstance(grid, int) else grid
        assert 0 < x < 2**31 and 0 < y <= GRID_YZ_MAX and 0 < z <= GRID_YZ_MAX
        self.count += 1

    def read(self, first: int, count: int) -> mla.Window:
        """What mla_attend_context asks for: work that is queued too."""
        self.count += 1
        return mla.Window(PLACE, PLACE)


def call(op: Any, **changed: Any) -> int:
    """Launches that were made."""
    addresses, others, _ = OPS[op]
    stream = Launches()
    if "read" in others:
        changed["read"] = stream.read
    try:
        op(stream, **(dict.fromkeys(addresses, PLACE) | others | changed))
    except ShapeError:
        assert not stream.count, "refused too late"
        raise
    return stream.count


def test_no_op_is_left_out() -> None:
    """An op is a public function of an ops/*/cuda.py whose first argument is a stream."""
    root = Path(str(whalez.__path__[0]))
    found = set()
    for path in root.glob("ops/*/cuda.py"):
        module = importlib.import_module(f"whalez.ops.{path.parent.name}.cuda")
        for name, each in inspect.getmembers(module, inspect.isfunction):
            if each.__module__ == module.__name__ and name[0] != "_" and "stream" in inspect.signature(each).parameters:
                found.add(each)
    assert found == OPS.keys()


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_an_address_that_is_not_aligned_is_named(op: Any) -> None:
    assert call(op) >= 1
    needed = {name for name, each in inspect.signature(op).parameters.items() if each.default is each.empty}
    assert needed - OPS[op][1].keys() == {"stream", *OPS[op][0]}
    for name, nbytes in OPS[op][0].items():
        with pytest.raises(ShapeError, match=f"^{name}: expected a multiple of {nbytes} as address"):
            call(op, **{name: PLACE + nbytes // 2})


@pytest.mark.parametrize("op", [op for op in OPS if OPS[op][2]], ids=lambda op: op.__name__)
def test_a_grid_that_no_device_takes_is_refused(op: Any) -> None:
    for name, most in OPS[op][2].items():
        assert call(op, **{name: most}) >= 1
        with pytest.raises(ShapeError, match=rf"\b{name}\b.*: expected .*, got .*{most + 1}"):
            call(op, **{name: most + 1})


@pytest.mark.parametrize("op", [mla.mla_absorb, mla.mla_project, mla.mla_decode], ids=lambda op: op.__name__)
@pytest.mark.parametrize("dims", [(33, 64, 48), (32, 64, 49)])
def test_pairs_need_even_widths(op: Any, dims: tuple[int, int, int]) -> None:
    with pytest.raises(ShapeError, match=r"multiple of 2|even"):
        call(op, dims=dims)
