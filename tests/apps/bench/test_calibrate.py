"""`bench --calibrate`: the profile that it writes of this machine."""

from __future__ import annotations

import subprocess

import pytest
import torch

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


def test_links_that_hang_are_not_measured(monkeypatch, capsys):
    def hang(*command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(calibrate.host, "cores", lambda: 2)
    monkeypatch.setattr(calibrate.subprocess, "run", hang)
    assert calibrate.measure_links(torch.device("cpu")) == {}
    assert "the links were not measured: no answer in 60 s" in capsys.readouterr().out


def test_a_full_disk_keeps_no_file(tmp_path, monkeypatch):
    def fail(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(calibrate, "DISK_BYTES", 1 << 20)
    monkeypatch.setattr(calibrate.os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        calibrate.disk_per_second(tmp_path)
    assert not list(tmp_path.iterdir())
