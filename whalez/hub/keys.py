"""Who may join the hub: a folder of CURVE keys, and the one place that puts keys on a socket.

    DIR/hub.key           every machine: the hub's public key, by which a rank knows the right hub
    DIR/hub.key_secret    rank 0's machine only
    DIR/rank.key_secret   every machine: what a rank shows the hub, and what its own admin socket is known by
    DIR/ranks/*.key       rank 0's machine: the public keys that may join, one file each
    DIR/admin.key_secret  the operator's machine only
    DIR/admins/*.key      every machine: the public keys whose commands may change anything

The files are certificates as pyzmq writes them. All are read once, at start.
"""

from __future__ import annotations

import os
import stat
import struct
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from whalez.errors import ConfigError, OutputError

NAMES = ("hub", "rank", "admin")
ALLOWED = {"rank": "ranks", "admin": "admins"}  #: whose public key is in which allow-list
DOMAIN = "whalez"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Both keys as Z85 text of 40 bytes."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Keys:
    """What a machine holds of a key folder."""

    folder: Path
    hub_public: bytes
    pairs: Mapping[str, KeyPair]  #: of "hub", "rank", "admin" those whose secret is here
    ranks: frozenset[bytes]  #: public keys that may join the hub
    admins: frozenset[bytes]  #: public keys whose commands may change anything

    def pair(self, name: str) -> KeyPair:
        """Raises ConfigError naming the file if this machine does not hold it."""
        if name not in self.pairs:
            raise ConfigError(f"{_secret_path(self.folder, name)}: not there, and this process is the {name}'s")
        return self.pairs[name]

    @property
    def asking_pair(self) -> KeyPair:
        """What the admin tool shows a rank: an admin's key if here, else a rank's. Raises ConfigError without both."""
        pair = self.pairs.get("admin") or self.pairs.get("rank")
        if pair is None:
            names = " nor ".join(str(_secret_path(self.folder, name)) for name in ("admin", "rank"))
            raise ConfigError(f"keys: neither {names} is there; whoever asks a rank shows one of them")
        return pair

    @property
    def rank_public(self) -> bytes:
        """What a rank's admin socket is known by. Raises ConfigError where neither its pair nor one allowed key is."""
        if "rank" in self.pairs:
            return self.pairs["rank"].public
        if len(self.ranks) != 1:
            raise ConfigError(
                f"{self.folder / 'ranks'}: expected the one public key of the ranks, got {len(self.ranks)}"
            )
        return next(iter(self.ranks))


def make_keys(folder: Path) -> list[Path]:
    """Fill `folder` with new keys for one fleet; return the files. Secret ones have mode 0600.

    Raises: ConfigError naming a file that exists already, or a folder that is there and open to others; OutputError
        for one that cannot be made. No key is written then.
    """
    for place in (folder, *(folder / each for each in ALLOWED.values())):
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(place, error) from None
        _refuse_writable(place)
    files = {f"{name}.key_secret": _secret_path(folder, name) for name in NAMES}
    files |= {f"{name}.key": folder / ALLOWED.get(name, "") / f"{name}.key" for name in NAMES}
    for path in files.values():
        if path.exists():
            raise ConfigError(f"{path}: exists already; new keys go into another folder")
    try:
        with tempfile.TemporaryDirectory(dir=folder) as fresh:  # for our eyes only, before any mode is set
            for name in NAMES:
                zmq.auth.create_certificates(fresh, name)
            for written, path in files.items():
                made = Path(fresh) / written
                made.chmod(0o600 if path.suffix == ".key_secret" else 0o644)
                made.rename(path)
    except OSError as error:
        raise OutputError(folder, error) from None
    return list(files.values())


def load_keys(folder: Path) -> Keys:
    """Raises ConfigError naming the file that is missing, no certificate, or open to others than its owner."""
    if not folder.is_dir():
        raise ConfigError(f"keys: {folder} is no folder; `whalez keys {folder}` makes one")
    public_path = folder / "hub.key"
    if not public_path.exists():
        raise ConfigError(f"{public_path}: not there; `whalez keys` makes one")
    _refuse_writable(folder)
    pairs = {}
    for name in NAMES:
        path = _secret_path(folder, name)
        if path.exists():
            pairs[name] = _load_pair(path)
    hub_public = _load_public(public_path)
    if "hub" in pairs and pairs["hub"].public != hub_public:
        raise ConfigError(f"{public_path}: not the public key of {_secret_path(folder, 'hub')}")
    return Keys(folder, hub_public, pairs, _load_list(folder / "ranks"), _load_list(folder / "admins"))


def secure_server(server: zmq.Socket[bytes], pair: KeyPair, allow: Collection[bytes]) -> ThreadAuthenticator:
    """Let only clients with one of the public keys `allow` in. Before `bind`; one such socket per context.

    Owns: the thread returned, which ZeroMQ asks about every newcomer. Stop it once the socket is closed and before the
    context ends.
    """
    gate = ThreadAuthenticator(server.context)
    gate.configure_curve_callback(DOMAIN, _AllowList(frozenset(allow)))
    gate.start()
    server.set(zmq.ZAP_DOMAIN, DOMAIN.encode())
    server.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without the thread nobody gets in, rather than everybody
    server.set(zmq.CURVE_SERVER, 1)  # no other mechanism is spoken then, so a client without keys is refused
    server.set(zmq.CURVE_SECRETKEY, pair.secret)
    server.set(zmq.CURVE_PUBLICKEY, pair.public)
    return gate


def secure_client(client: zmq.Socket[bytes], pair: KeyPair, server_public: bytes) -> None:
    """Show `pair` to the server and talk to none that does not hold the secret of `server_public`. Before `connect`."""
    client.set(zmq.CURVE_SERVERKEY, server_public)
    client.set(zmq.CURVE_PUBLICKEY, pair.public)
    client.set(zmq.CURVE_SECRETKEY, pair.secret)


def sender_key(frame: zmq.Frame) -> bytes | None:
    """The public key of the client that sent this frame (received with `copy=False`) to a `secure_server`."""
    try:
        return str(frame.get("User-Id")).encode()
    except zmq.ZMQError:
        return None  # it came over a connection that needs no key


class _AllowList:
    def __init__(self, allow: frozenset[bytes]) -> None:
        self._allow = allow

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._allow


def _secret_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.key_secret"


def _load_list(folder: Path) -> frozenset[bytes]:
    """Empty where there is no such folder: nobody may."""
    if not folder.is_dir():
        return frozenset()
    _refuse_writable(folder)
    return frozenset(_load_public(path) for path in sorted(folder.glob("*.key")))


def _load_public(path: Path) -> bytes:
    _refuse_writable(path)
    return _load(path)[0]


def _load_pair(path: Path) -> KeyPair:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(f"{path}: mode {mode:04o} lets others at a secret key; chmod 600 {path}")
    public, secret = _load(path)
    if secret is None:
        raise ConfigError(f"{path}: no secret key in it")
    if zmq.curve_public(secret) != public:
        raise ConfigError(f"{path}: its public and its secret key do not belong together")
    return KeyPair(public, secret)


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no certificate: {error}") from None
    for key in (public, secret):
        if key is not None and not _is_key(key):
            raise ConfigError(f"{path}: no certificate: a key is 40 characters of Z85")
    return public, secret


def _is_key(text: bytes) -> bool:
    try:
        return len(text) == 40 and len(z85.decode(text)) == 32
    except (KeyError, struct.error):  # no character of Z85; beyond 32 bits
        return False


def _refuse_writable(path: Path) -> None:
    """Whoever may write an allow-list decides who joins."""
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o022:
        raise ConfigError(f"{path}: mode {mode:04o} lets others put keys there; chmod go-w {path}")
