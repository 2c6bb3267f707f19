"""Two machines: two network namespaces of this one, joined by a cable that can be cut.

The machine's name leads to neither address (it is on both, and usually 127.0.0.1), so gloo must be
given the interface.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

ADDRESSES = ("192.168.0.1", "192.168.0.2")


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """Make two namespaces and return their names; the ends of the cable are cable-a and cable-b."""
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("only root makes network namespaces, with the command ip of iproute2")
    names = (f"meshwright-{os.getpid()}-a", f"meshwright-{os.getpid()}-b")
    try:
        try:
            for name in names:
                ip(f"netns add {name}")
            ip(f"link add cable-a netns {names[0]} type veth peer name cable-b netns {names[1]}")
        except subprocess.CalledProcessError as error:
            pytest.skip(
                f"this system does not let network namespaces be made: {error.stderr.strip()}"
            )
        for name, address, cable in zip(names, ADDRESSES, ("cable-a", "cable-b"), strict=True):
            ip(f"-n {name} addr add {address}/24 dev {cable}")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} link set {cable} up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
