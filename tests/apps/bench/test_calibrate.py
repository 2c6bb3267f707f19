"""`bench --calibrate`: the profile that it writes of this machine."""

from __future__ import annotations

import pytest

from meshwright.__main__ import main
from meshwright.apps.bench import calibrate
from meshwright.base.device_profiles import load_profile


def test_calibration_writes_a_profile_that_loads(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "FIGURE_SECONDS", 0.001)
    monkeypatch.setattr(calibrate, "SMALL", calibrate.Sizes(16, (16,), 128, 1 << 12))
    monkeypatch.setattr(calibrate, "DISK_BYTES", 1 << 20)
    monkeypatch.setattr(
        calibrate,
        "measure_links",
        lambda device: {"collectives": 4e9, "copies": 0.0, "latency": 1e-5},
    )
    assert main(["bench", "--calibrate", "--device", "cpu", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.toml")
    assert str(path) in capsys.readouterr().out
    profile = load_profile(str(path))
    assert {"products", "attention_64", "passes", "update", "launch"} <= profile.measured
    assert profile.flops("float32") == pytest.approx(profile.peaks["float32"])
    assert profile.links.within.bandwidth * profile.links.within.collectives == pytest.approx(
        4e9, rel=1e-3
    )
    assert profile.storage["disk"] > 0
