"""The layout over all specs: regions apart, aligned, inside; views of the right shape."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from fabric_world import make_layout
from hypothesis import given
from hypothesis import strategies as st

from whalez.errors import ConfigError
from whalez.fabric.layout import BELL_KINDS, HEADER, LINE_BYTES, REGION_BYTES, SlabLayout, SlabSpec

widths = st.integers(0, 300)
specs = st.builds(
    SlabSpec,
    world=st.integers(1, 64),
    rows_max=st.integers(1, 20_000),
    hidden=st.integers(1, 8000),
    top_k=st.integers(0, 16),
    segment_rows_max=st.integers(0, 20_000),
    halo_values=widths,
    package_heads=widths,
    key_dim=widths,
    value_dim=widths,
    latent_width=widths,
)


@given(specs)
def test_regions_do_not_overlap(spec: SlabSpec) -> None:
    layout = SlabLayout.from_spec(spec)
    end = 0
    for name, region in layout.regions.items():
        assert region.offset >= end, name
        assert region.offset % LINE_BYTES == 0, name
        end = region.end
    assert end <= layout.nbytes < end + REGION_BYTES
    assert layout.nbytes % REGION_BYTES == 0


@given(specs)
def test_data_regions_start_on_pages_and_control_words_have_lines_of_their_own(spec: SlabSpec) -> None:
    regions = SlabLayout.from_spec(spec).regions
    for name in regions:
        if name.startswith(("bells", "dispatch", "combine", "halo", "package", "latent", "header")):
            assert regions[name].offset % REGION_BYTES == 0, name
    words = ("progress", "launch_count", "wake_counter", "sleeper_mark", "put_count", "status", "words")
    lines = [regions[name].offset // LINE_BYTES for name in words]
    assert len(set(lines)) == len(lines)
    assert all(regions[name].nbytes <= LINE_BYTES for name in words)


@given(specs)
def test_every_bell_has_a_line_of_its_own(spec: SlabSpec) -> None:
    layout = SlabLayout.from_spec(spec)
    offsets = [layout.bell_offset(kind, sender) for kind in range(len(BELL_KINDS)) for sender in range(spec.world)]
    region = layout.regions["bells"]
    assert offsets == list(range(region.offset, region.end, LINE_BYTES))


@given(specs)
def test_sizes_are_those_of_the_spec(spec: SlabSpec) -> None:
    regions = SlabLayout.from_spec(spec).regions
    rows = spec.rows_max if spec.top_k else 0
    assert regions["dispatch_rows"].nbytes == rows * spec.hidden * 4
    assert regions["combine_rows"].nbytes == spec.world * rows * spec.hidden * 4
    assert regions["latent"].nbytes == spec.segment_rows_max * spec.latent_width * 4
    assert regions["package_m"].nbytes == spec.package_heads * spec.key_dim**2 * 4
    assert regions["combine_offsets"].shape == (spec.world + 1,)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(SlabSpec)])
@pytest.mark.parametrize("value", [-1, 1.5, True, None])
def test_a_wrong_number_is_refused_by_field(field: str, value: object) -> None:
    good = dataclasses.asdict(make_layout(2).spec)
    with pytest.raises(ConfigError, match=field):
        SlabSpec(**{**good, field: value})


def test_a_slab_beyond_all_memory_is_refused() -> None:
    good = dataclasses.asdict(make_layout(2).spec)
    with pytest.raises(ConfigError, match=r"2\^62"):
        SlabLayout.from_spec(SlabSpec(**{**good, "rows_max": 2**40, "hidden": 2**30}))


def test_header_is_packed() -> None:
    assert HEADER.itemsize == 64
    assert np.dtype(HEADER.descr) == HEADER
