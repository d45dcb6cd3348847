"""The bytes by which a peer maps a slab in device memory, and who may use them. Pure but for one file of /proc.

Rule 1: a ticket comes from a peer: every length and field is checked here before a driver call is made with it.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from typing import Final

import msgspec

from whalez.fabric.header import rejected
from whalez.rendezvous.messages import SlabEntry

MAGIC: Final = b"whalezT1"
HANDLE_BYTES: Final = 64
_FORM: Final = struct.Struct("<8s16s16sQ64s")
TICKET_BYTES: Final = _FORM.size


class Ticket(msgspec.Struct, frozen=True):
    """What one rank hands to all."""

    provider: str
    machine: bytes  #: 16 bytes, equal for two processes of one booted machine
    nbytes: int  #: of the allocation: the slab's, rounded up to the granularity
    handle: bytes  #: 64 bytes, the provider's own

    def encode(self) -> bytes:
        assert len(self.handle) <= HANDLE_BYTES and len(self.machine) == 16, self
        return _FORM.pack(MAGIC, self.provider.encode(), self.machine, self.nbytes, self.handle)


@functools.cache
def this_machine() -> bytes:
    """16 bytes that differ between machines, whatever they are called, and are equal for all containers of one."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return hashlib.blake2b(file.read().strip(), digest_size=16).digest()


def decode(entry: SlabEntry, provider: str, nbytes: int) -> Ticket:
    """The ticket of a table row; it must be of this provider and size. Raises FabricError by field."""
    if len(entry.ticket) != TICKET_BYTES:
        raise rejected(entry, "ticket", f"{TICKET_BYTES} bytes", f"{len(entry.ticket)}")
    magic, name, machine, size, handle = _FORM.unpack(entry.ticket)
    if magic != MAGIC:
        raise rejected(entry, "ticket", MAGIC, magic)
    if name.rstrip(b"\0") != provider.encode():
        raise rejected(entry, "provider", provider, name.rstrip(b"\0").decode(errors="replace"))
    if size != nbytes:
        raise rejected(entry, "size of the ticket", nbytes, size)
    return Ticket(provider, machine, size, handle)
