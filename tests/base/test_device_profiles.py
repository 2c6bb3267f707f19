"""Profiles of devices: files, names and mistakes."""

from __future__ import annotations

import pytest

from meshwright.base.device_profiles import (
    load_profile,
    profile_names,
    profile_of,
)
from meshwright.base.errors import UserError


@pytest.mark.parametrize("name", profile_names())
def test_every_file_is_a_profile_with_sources(name):
    profile = load_profile(name)
    assert profile.sources and profile.memory_bytes > 4 << 30 and profile.bandwidth > 1e9
    assert all(0 < share <= 1 for share in profile.reached.values())
    assert (
        profile.links.gpus_per_node >= 1
        and profile.links.within.bandwidth >= profile.links.between.bandwidth
    )
    assert profile.kind != "cuda" or profile.flops("float16") < profile.peaks["float16"]


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("Tesla V100S-PCIE-32GB", "v100"),
        ("NVIDIA GB200", "b200"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Ascend910B4", "ascend-910b"),
    ],
)
def test_torchs_names_find_the_profile(title, name):
    profile = profile_of(title)
    assert profile is not None and profile.name == name


@pytest.mark.parametrize(
    "title", ["cpu, 2 threads", "NVIDIA A10G", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA T400"]
)
def test_other_devices_have_no_profile(title):
    assert profile_of(title) is None


@pytest.mark.parametrize(
    ("name", "gib", "gigabytes_per_second", "half"),
    [
        ("rtx-4090", 24, 1008, 165.2),  # with float32 sums, as trainings multiply
        ("rtx-3090", 24, 936, 71.0),
        ("a10", 24, 600, 125.0),
        ("l4", 24, 300, 121.0),
        ("l40s", 48, 864, 362.0),
        ("t4", 16, 320, 65.0),
    ],
)
def test_the_cards_of_workstations_have_the_figures_of_their_sheets(
    name, gib, gigabytes_per_second, half
):
    """Dense, not with the sparsity that doubles them; torch gives less memory than they say."""
    profile = load_profile(name)
    assert (
        0.9 * gib < profile.memory_bytes / 2**30 < gib
        and profile.bandwidth == gigabytes_per_second * 1e9
    )
    assert profile.peaks["float16"] == half * 1e12 and not profile.measured
    assert ("bfloat16" in profile.peaks) == (name != "t4")


def test_mistakes_in_names_and_files_are_answered(tmp_path):
    with pytest.raises(
        UserError,
        match="no profile of a device, and no file of .*, is named h20; did you mean h200",
    ):
        load_profile("h20")
    with pytest.raises(UserError, match="cannot be read: No such file"):
        load_profile(str(tmp_path / "none.toml"))
    (tmp_path / "half.toml").write_text('title = "half"\nkind = "cuda"\n[measured]\nspeed = 1\n')
    with pytest.raises(UserError, match="no profile of a device: unknown speed"):
        load_profile(str(tmp_path / "half.toml"))
    with pytest.raises(UserError, match="V100.*has no products of fp8; choose one of"):
        load_profile("v100").flops("fp8")
