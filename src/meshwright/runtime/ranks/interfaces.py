"""Network interfaces of this machine: which one leads to rank 0, and which ones the user chose.

gloo and NCCL are told names, by variables, and each takes the first address of an interface.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import sys

from meshwright.base.errors import UserError

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
# Linux's request for all addresses, and the form of its answers: a name, and an IPv4 address
SIOCGIFCONF = 0x8912
ANSWER = struct.Struct("16s 4x 4s 16x")
MOST_ADDRESSES = 1024


def choose_interface(address: str, port: int, backend: str) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that leads to rank 0, unless the user chose one.

    gloo itself takes that of the machine's name, often 127.0.1.1 or of another network. A name that
    the user gave and this machine lacks is refused: torch's own error does not say which.
    """
    known = list_addresses()
    with_address = set(known)
    others = {name for _, name in socket.if_nameindex()}
    names = sorted(with_address | others)
    has = f"names no network interface of this machine, which has {', '.join(names)}"

    # gloo's names are a list.
    of_gloo = os.environ.get(GLOO)
    if of_gloo:
        unknown = sorted(set(of_gloo.split(",")).difference(names))
        if unknown:
            raise UserError(f"{GLOO}={of_gloo}: {', '.join(unknown)} {has}")
    elif name := _holder(own_address(address, port), known):
        os.environ[GLOO] = name

    # NCCL's are beginnings, of which one may fit.
    of_nccl = os.environ.get(NCCL)
    if of_nccl and "nccl" in backend and not nccl_names(of_nccl, names):
        raise UserError(f"{NCCL}={of_nccl} {has}")


def describe_interfaces(address: str, port: int, backend: str) -> str:
    """Return what to look at where this machine reached rank 0, but not every other rank."""
    known = list_addresses()
    own = own_address(address, port)
    leads = _holder(own, known)
    wrong = []
    for variable in [GLOO, *[NCCL] * ("nccl" in backend)]:
        chosen = os.environ.get(variable, "")
        names = nccl_names(chosen, [*known]) if variable == NCCL else chosen.split(",")
        if not chosen or not leads:
            continue
        addresses = [known.get(name, ["no address"])[0] for name in names]
        if own not in addresses:
            wrong.append(f"{variable}={chosen} stands for {', '.join(addresses)}")
    if wrong:
        return (
            f"{' and '.join(wrong)}, but the way to rank 0 begins at {own} of {leads}: see whether all nodes "
            "reach each other's ports by the interface that is named, or name another on each"
        )
    offered = f"{own} of {leads} on this one" if leads else "an interface"
    return (
        f"open all ports between the nodes, and see whether they reach each other by {offered}: "
        f"{GLOO} on each node chooses another"
    )


def nccl_names(chosen: str, names: list[str]) -> list[str]:
    """Return the interfaces that NCCL takes: names that begin so; = means exact ones, ^ others."""
    words = chosen.lstrip("^").removeprefix("=").split(",")
    is_exact = chosen.lstrip("^").startswith("=")
    is_named = [
        name in words if is_exact else name.startswith(tuple(filter(None, words))) for name in names
    ]
    is_excluding = chosen.startswith("^")
    return [name for name, named in zip(names, is_named, strict=True) if named is not is_excluding]


def own_address(address: str, port: int) -> str:
    """Return the address of this machine at which the route to another begins, or nothing."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((socket.gethostbyname(address), port))  # sends nothing; it looks up the route
        return str(s.getsockname()[0])
    return ""


def list_addresses() -> dict[str, list[str]]:
    """Return the IPv4 addresses of each interface, of which it may have several."""
    if not sys.platform.startswith("linux"):
        return {}
    import fcntl

    found: dict[str, list[str]] = {}
    answers = array.array("B", bytes(ANSWER.size * MOST_ADDRESSES))
    place, size = answers.buffer_info()
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        request = struct.pack("iL", size, place)
        (size,) = struct.unpack_from("i", fcntl.ioctl(s.fileno(), SIOCGIFCONF, request))
        for name, address in ANSWER.iter_unpack(answers.tobytes()[:size]):
            label = name.rstrip(b"\0").decode(errors="replace")
            found.setdefault(label, []).append(socket.inet_ntoa(address))
    return found


def _holder(address: str, known: dict[str, list[str]]) -> str:
    """Return the interface that has an address."""
    return next((name for name, addresses in known.items() if address in addresses), "")
