"""Which hub addresses can work, decided before any socket is opened.

The fault this prevents: a machine's own name often maps to 127.0.1.1 in /etc/hosts. A hub bound by name then listens
on loopback and the peers are refused for as long as they care to retry. So a name is looked up here, and refused if
others could not reach what it stands for.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading

from whalez.errors import HubError

IPC_PATH_BYTES_MAX = 107  # sockaddr_un.sun_path less its final zero
_RESOLVE_S = 0.5
_KEYS_HINT = "give --keys DIR (`whalez keys DIR` makes them) or, on a network you trust, --insecure"
_FORMS = "tcp://HOST:PORT, tcp://[IPV6]:PORT or ipc:///path"


def bind_address(address: str, *, peers_elsewhere: bool, may_be_reached: bool) -> str:
    """Where rank 0 listens for `address`: the same, with an IP for a name. Refused within a second if that cannot work.

    Args:
        peers_elsewhere: ranks are on other machines
        may_be_reached:  by other machines: keys are given, or the user does without in so many words

    Raises: HubError with the reason and what to give instead.
    """
    parts = _split(address)
    if parts is None:
        _check_ipc(address, peers_elsewhere)
        return address
    host, port = parts
    if _literal(host) is None:
        found = resolve(host)
        if not found:
            raise HubError(f"{address}: {host!r} is a name that does not resolve here; {_own_hint()}")
        reached = [each for each in found if not _is_loopback(each)]
        if peers_elsewhere and not reached:
            raise HubError(
                f"{address}: {host!r} is a name that resolves to {', '.join(found)} here, which no other machine can "
                f"reach; {_own_hint()}"
            )
        host = min(reached or found, key=lambda each: ":" in each)  # members look for IPv4 first
    if peers_elsewhere and _is_loopback(host):
        raise HubError(f"{address}: {host} is loopback, but ranks on other machines must reach it; {_own_hint()}")
    if not _is_loopback(host) and not may_be_reached:
        raise HubError(f"{address}: other machines can reach it, and none of them would need a key; {_KEYS_HINT}")
    return f"tcp://{bracketed(host)}:{port}"


def check_connect(address: str, *, peers_elsewhere: bool, may_be_reached: bool) -> None:
    """Refuse an address that can not lead a member to rank 0, within a second. Names are allowed if they can work.

    `peers_elsewhere`: rank 0 may be on another machine. `may_be_reached`: as in `bind_address`, so that a rank without
    keys says so at once and sends no prompt to whoever listens there.
    A name that does not resolve yet is let through: it may appear while the connection is retried.
    """
    parts = _split(address)
    if parts is None:
        _check_ipc(address, peers_elsewhere)
        return
    host, _ = parts
    if host in ("*", "0.0.0.0", "::"):
        raise HubError(f"{address}: {host} is where to listen, not where to connect; give rank 0's IP")
    found = (host,) if _literal(host) is not None else resolve(host)
    if peers_elsewhere and found and all(_is_loopback(each) for each in found):
        via = "" if found == (host,) else f" (it resolves to {', '.join(found)})"
        raise HubError(f"{address}: {host}{via} is loopback, but rank 0 may be on another machine; give its IP")
    if not may_be_reached and not (found and all(_is_loopback(each) for each in found)):
        raise HubError(f"{address}: it is reached over the network, and nobody would need a key; {_KEYS_HINT}")


def resolve(host: str, timeout_s: float = _RESOLVE_S) -> tuple[str, ...]:
    """The IPs of a name, empty if there are none or the resolver takes longer than `timeout_s`."""
    found: list[str] = []

    def look_up() -> None:
        try:
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return
        found.extend(dict.fromkeys(str(info[4][0]) for info in infos))

    thread = threading.Thread(target=look_up, name="resolve", daemon=True)  # a dead name server must not hold us
    thread.start()
    thread.join(timeout_s)
    return tuple(found)


def host_identity() -> str:
    """Equal for two processes exactly if one can see the other's pid: machine, boot and pid namespace.

    Goes into `SlabEntry.host`. A host name alone is shared by containers that can not see each other's processes.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()[:8]
    except OSError:
        boot = "-"
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return f"{socket.gethostname()}/{boot}/{namespace:x}"


def is_of_this_machine(address: str) -> bool:
    """True if nothing outside this machine can reach what listens at `address`. Raises HubError for a malformed one."""
    parts = _split(address)
    return parts is None or _is_loopback(parts[0])


def ipc_path(address: str) -> str | None:
    """The file of an ipc address, None for any other."""
    return address[len("ipc://") :] if address.startswith("ipc://") else None


def bracketed(host: str) -> str:
    """A host as it stands before `:PORT`."""
    return f"[{host}]" if ":" in host else host


def is_ipv6(address: str) -> bool:
    return address.startswith("tcp://[")


def _split(address: str) -> tuple[str, int] | None:
    """Host and port of a tcp address, None for ipc. Raises HubError for anything else."""
    if address.startswith("ipc://"):
        return None
    if not address.startswith("tcp://"):
        raise HubError(f"{address!r}: not a hub address; expected {_FORMS}")
    host, colon, port = address[len("tcp://") :].rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise HubError(f"{address!r}: no host and port in it; expected {_FORMS}")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise HubError(f"{address!r}: an IPv6 address goes into brackets; expected {_FORMS}")
    return host, int(port)


def _check_ipc(address: str, peers_elsewhere: bool) -> None:
    path = ipc_path(address) or ""
    if not path:
        raise HubError(f"{address!r}: no path in it; expected {_FORMS}")
    if peers_elsewhere:
        raise HubError(f"{address}: ipc reaches only this machine, but ranks run on others; {_own_hint()}")
    if path.startswith("@"):
        raise HubError(f"{address}: an abstract socket has no file whose mode keeps others out; give ipc:///path")
    if len(os.fsencode(path)) > IPC_PATH_BYTES_MAX:
        raise HubError(f"{address}: path of {len(os.fsencode(path))} bytes, a socket's may have {IPC_PATH_BYTES_MAX}")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise HubError(f"{address}: the folder {folder} does not exist")


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def _is_loopback(text: str) -> bool:
    ip = _literal(text)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return ip is not None and ip.is_loopback


def _own_hint() -> str:
    ip = _outward_ip()
    return f"this machine's outward address is {ip}" if ip else "give the IP that the other machines reach"


def _outward_ip() -> str | None:
    """The source address of a packet to the outside; connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            ip = str(probe.getsockname()[0])
        except OSError:
            return None
    return None if _is_loopback(ip) else ip
