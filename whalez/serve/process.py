"""How a front is started and where it listens; light, so that whoever starts one need not import it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Sequence

from whalez.errors import ConfigError, HubError

PR_SET_PDEATHSIG = 1
#: What a front gets when its parent is gone. Not SIGKILL: clients of a rank that was killed still have to hear of it.
#: Not SIGTERM: a dying process hands its children from thread to thread and the kernel signals each time, and a second
#: SIGTERM means "at once".
PARENT_GONE = signal.SIGHUP
#: What a rank gets from its supervisor when the world stops: leave without a grace. Not SIGTERM, with which one rank is
#: sent away by hand: a second one means "at once", and to the others that is a death.
STOP = signal.SIGHUP
FRONT_GRACE_S = 2.0  #: a front that leaves has at most this long to answer what it has taken


def front_command(
    links: Sequence[str],
    listen: str,
    model_name: str,
    *,
    model_dir: str | None = None,
    parent: int | None = None,
    grace_s: float = FRONT_GRACE_S,
    away: str | None = None,
) -> list[str]:
    """The command line that starts a front. While a file `away` exists, it refuses with what is written there."""
    command = [sys.executable, "-P", "-m", "whalez.serve.front", "--listen", listen, "--model-name", model_name]
    for link in links:
        command += ["--link", link]
    if model_dir is not None:
        command += ["--model", model_dir]
    if parent is not None:
        command += ["--parent", str(parent)]
    if away is not None:
        command += ["--away", away]
    return [*command, "--grace", str(grace_s)]


def held_line(pid: int) -> str:
    """What is said of a process that is kept after its failure."""
    return f"held for a debugger until SIGTERM: pid {pid}; attach with `gdb -p {pid}` or `py-spy dump --pid {pid}`"


def parse_listen(text: str) -> tuple[str, int]:
    """`H:P`, `[H6]:P`. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"listen: expected HOST:PORT, got {text!r}")
    return host.strip("[]"), int(port)


def bind(listen: str) -> socket.socket:
    """A bound socket, so that a taken port or an unknown host is an error before anything starts. Raises HubError."""
    host, port = parse_listen(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (socket.gaierror, UnicodeError) as error:  # numbers of the resolver are no errno
        sock.close()
        why = error.strerror if isinstance(error, OSError) else error
        raise HubError(f"cannot listen on {listen}: host {host!r}: {why}") from None
    except OSError as error:
        sock.close()
        raise HubError(f"cannot listen on {listen}: {error.strerror or error}") from None
    return sock


def die_with_parent(parent: int) -> None:
    """This process gets PARENT_GONE, once or more, when the thread of `parent` that started it is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, PARENT_GONE, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)
