"""What a launch costs and what a fleet admits: the numbers every rank must hold equal.

A cost is counted in **units**; one unit is one row through all the non-expert work of one KDA layer. For the member
at place i (from 0) of a gang of width W, whose segment starts at token s and has n rows:

    kda(i, n) = kda_row * n  +  package * i  +  package_row * share(i) * n      share = 1/2 first, 1 middle, 0 last
    mla(s, n) = mla_row * n  +  mla_pair * (s * n + n * (n + 1) / 2)  +  mla_expand * s
    moe(n)    = moe_row * n / world                                             the same on every rank

The first member makes only D of the package (M, D), the last none, and member i folds i packages. `mla_row` contains
the expansion of the row itself; `mla_expand` is paid once per row of context in front of the segment.

Rule 1: costs are plain data in the fleet's fingerprint. Nothing here measures.
Rule 2: floats meet only + - * / and comparisons, never a platform's math library and never the built-in sum(), whose
rounding differs between Python versions: a member that computes other bounds than the sequencer refuses the whale.
"""

from __future__ import annotations

from typing import Self

import msgspec

from whalez.errors import ConfigError

#: Rows of one launch of the reference, pegainfer's K3 engine; per-row work runs at the smallest covering one.
K3_BUCKETS = (256, 528, 1056, 2112, 4224, 8448, 16896)
#: Rows the conv of a segment reads from its predecessor. A shorter segment would need rows of two predecessors.
HALO_ROWS = 3
#: Arithmetic speed of the attention-like kernels (online softmax, triangular KDA chunks) over that of a plain GEMM.
ATTENTION_SPEED = 0.6
#: Tokens of one KDA chunk.
KDA_CHUNK = 64


class CostModel(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients of the formulas above. Only their ratios decide a split; unit_s and launch_s decide a lane."""

    kda_layers: int
    mla_layers: int
    moe_layers: int
    kda_row: float = 1.0  #: one row, one KDA layer with the non-expert rest of that layer
    mla_row: float  #: one row, one MLA layer with the non-expert rest of that layer, own expansion included
    mla_pair: float  #: one (query, key) pair of one MLA layer, all heads
    mla_expand: float = 0.0  #: one row of context expanded to keys and values, one MLA layer; at most mla_row
    moe_row: float = 0.0  #: all routed experts of one token, one MoE layer
    package: float = 0.0  #: one upstream package folded into the state, one KDA layer
    package_row: float = 0.0  #: one row of the fused (M, D) pass, one KDA layer
    unit_s: float = 1e-6  #: seconds of one unit on one rank
    launch_s: float = 0.0  #: seconds of a launch that carries no rows

    def __post_init__(self) -> None:
        for field in ("kda_layers", "mla_layers", "moe_layers"):
            _require(getattr(self, field) >= 0, field, "0 or more layers", getattr(self, field))
        _require(self.kda_layers + self.mla_layers > 0, "kda_layers", "at least one layer", self.kda_layers)
        for field in ("kda_row", "mla_row", "unit_s"):
            _require(0 < getattr(self, field) < 1e30, field, "a finite cost above 0", getattr(self, field))
        for field in ("mla_pair", "mla_expand", "moe_row", "package", "package_row", "launch_s"):
            _require(0 <= getattr(self, field) < 1e30, field, "a finite cost of 0 or more", getattr(self, field))
        # A later start with the same end is then never dearer, which is what lets the split be found greedily.
        _require(self.mla_expand <= self.mla_row, "mla_expand", f"at most mla_row ({self.mla_row})", self.mla_expand)

    @classmethod
    def k3(cls) -> Self:
        """Kimi K3 as the reference (pegainfer on GB300) measured it.

        Its leveling weight is t ~ n + Q * (s + n / 2) * n over a whole member, Q = 2.7e-6 per token: with 69 KDA and
        24 MLA layers and equal rows, mla_pair = Q * 93 / 24. Expansion and the package pass are inside that fit, so
        they are 0. From the anatomy of its 128k superstep (8 ranks, 16,000 rows each): row-wise work, 30 % of 6.23 s,
        is 93 * 16,000 units, experts are another 20 %. A package of 12.6 MB takes 14 us at 900 GB/s, and a launch
        without rows tens of milliseconds.
        """
        return cls(
            kda_layers=69,
            mla_layers=24,
            moe_layers=92,
            mla_row=1.0,
            mla_pair=2.7e-6 * 93 / 24,
            moe_row=0.65,
            package=11.0,
            unit_s=1.26e-6,
            launch_s=0.03,
        )

    @classmethod
    def from_shapes(
        cls,
        *,
        hidden: int,
        kda_layers: int,
        mla_layers: int,
        moe_layers: int,
        kda_heads: int,
        kda_head_dim: int,
        mla_heads: int,
        qk_nope: int,
        qk_rope: int,
        v_head: int,
        kv_lora_rank: int,
        dense_intermediate: int,
        dense_layers: int,
        moe_intermediate: int,
        experts_per_token: int,
        shared_experts: int,
        vocab: int,
        flops_per_s: float = 5e10,
        launch_s: float = 2e-3,
    ) -> Self:
        """Estimate by arithmetic: multiply-adds count 2, attention-like kernels run at ATTENTION_SPEED of a GEMM.

        Norms, convolutions and copies are left out. `flops_per_s` is the GEMM speed of one rank and `launch_s` the time
        of an empty launch (default: one CPU core); they scale the predicted seconds and leave every split as it is.
        """
        inner = kda_heads * kda_head_dim
        dim = kda_head_dim
        # Dense and shared-expert MLPs are spread over all layers: which layer has which hardly moves a split.
        mlp = 6.0 * hidden * (dense_layers * dense_intermediate + moe_layers * shared_experts * moe_intermediate)
        mlp = mlp / (kda_layers + mla_layers)
        projections = 2.0 * hidden * (4 * inner + 2 * dim + kda_heads) + 2.0 * dim * 2 * inner
        chunk = kda_heads * (10.0 * KDA_CHUNK * dim + 6.0 * dim * dim) / ATTENTION_SPEED
        kda = projections + chunk + mlp
        expand = 2.0 * kv_lora_rank * mla_heads * (qk_nope + v_head)
        mla = 2.0 * hidden * (mla_heads * (qk_nope + qk_rope + v_head) + kv_lora_rank + qk_rope) + expand + mlp
        unit = kda if kda_layers else mla
        return cls(
            kda_layers=kda_layers,
            mla_layers=mla_layers,
            moe_layers=moe_layers,
            mla_row=mla / unit if mla_layers else 1.0,
            mla_pair=2.0 * mla_heads * (qk_nope + qk_rope + v_head) / ATTENTION_SPEED / unit if mla_layers else 0.0,
            mla_expand=expand / unit if mla_layers else 0.0,
            moe_row=6.0 * hidden * moe_intermediate * experts_per_token / unit if moe_layers else 0.0,
            package=2.0 * kda_heads * dim * dim * dim / ATTENTION_SPEED / unit if kda_layers else 0.0,
            package_row=8.0 * kda_heads * dim * dim / ATTENTION_SPEED / unit if kda_layers else 0.0,
            unit_s=unit / flops_per_s,
            launch_s=launch_s + 2.0 * hidden * vocab / flops_per_s,
        )

    def kda_row_of(self, place: int, width: int) -> float:
        """Cost of one row of one KDA layer for the member at `place`, its part of the package pass included."""
        if place == width - 1:
            return self.kda_row
        return self.kda_row + self.package_row * (0.5 if place == 0 else 1.0)

    def kda_cost(self, place: int, width: int, rows: int) -> float:
        """Cost of one KDA layer for the member at `place` of a gang of `width`."""
        return self.kda_row_of(place, width) * rows + self.package * place

    def mla_cost(self, start: int, rows: int) -> float:
        """Cost of one MLA layer for rows start..start+rows that see all tokens before them."""
        return self.mla_row * rows + self.mla_pair * (start * rows + rows * (rows + 1) / 2) + self.mla_expand * start


class PlanPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What a fleet admits as a whale and where it places it. Equal on all ranks."""

    world: int
    node_ranks: int = 4  #: ranks of one machine (the reference's tray); gangs keep to its boundaries
    segment_floor: int = 2048  #: fewest rows of a segment: below it KDA does not fill the device
    whale_min: int = 4096  #: shortest prompt that is a whale, at least 2 * segment_floor
    buckets: tuple[int, ...] = K3_BUCKETS  #: row counts per-row work is padded to, ascending; the last bounds a segment
    cost: CostModel = msgspec.field(default_factory=CostModel.k3)

    def __post_init__(self) -> None:
        _require(self.world >= 1, "world", "at least 1 rank", self.world)
        _require(self.node_ranks >= 1, "node_ranks", "at least 1 rank per node", self.node_ranks)
        _require(
            self.segment_floor > HALO_ROWS,
            "segment_floor",
            f"more than the {HALO_ROWS} rows a convolution reads from the segment before",
            self.segment_floor,
        )
        _require(
            self.whale_min >= 2 * self.segment_floor,
            "whale_min",
            f"at least 2 * segment_floor = {2 * self.segment_floor}",
            self.whale_min,
        )
        rises = all(low < high for low, high in zip(self.buckets, self.buckets[1:], strict=False))
        _require(bool(self.buckets) and rises and self.buckets[0] > 0, "buckets", "rising row counts", self.buckets)
        _require(
            self.buckets[-1] >= self.segment_floor,
            "buckets",
            f"a largest bucket of at least segment_floor = {self.segment_floor}",
            self.buckets[-1],
        )


def _require(ok: bool, field: str, expected: str, got: object) -> None:
    if not ok:
        raise ConfigError(f"{field}: expected {expected}, got {got}")
