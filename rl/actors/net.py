"""The address at which other nodes reach this one, and the network interface that it belongs to."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

import ray.util

SIOCGIFADDR = 0x8915  # ioctl: address of an interface (linux/sockios.h)


def node_address() -> str:
    return ray.util.get_node_ip_address()


def interface_of(address: str) -> str:
    """Name of the interface with this IPv4 address. Raises ValueError listing the interfaces if there is
    none."""
    if ipaddress.ip_address(
        address
    ).is_loopback:  # all of 127.0.0.0/8, though the interface shows one of them
        address = "127.0.0.1"
    found = {name: _address_of(name) for _, name in socket.if_nameindex()}
    for name, its_address in found.items():
        if its_address == address:
            return name
    raise ValueError(f"interface_of: no interface has address {address}; there are {found}")


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            reply = fcntl.ioctl(s.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # an interface without an IPv4 address
            return None
    return socket.inet_ntoa(reply[20:24])
