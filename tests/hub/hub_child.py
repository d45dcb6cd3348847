"""A rank process that imports nothing but the hub: `python hub_child.py RANK WORLD ADDRESS [DELAY_S] [NAME=VALUE...]`.

NAME=VALUE are settings of the fingerprint, except `keys` (a key folder) and `start_s`.

Prints one JSON line per fact. Reads commands from stdin, one per line, after the world has started:
`bye` (send Bye, wait for all others', exit 0), `exit` (leave without a word).
"""

import json
import os
import secrets
import selectors
import sys
import time
from pathlib import Path

from whalez.errors import WhalezError
from whalez.hub.address import host_identity
from whalez.hub.keys import load_keys
from whalez.hub.zmq_hub import ZmqHub
from whalez.rendezvous.effects import Broadcast, SendTo
from whalez.rendezvous.events import PeerGone, Received
from whalez.rendezvous.messages import Bye, Died, Hello, Ready, SlabEntry


class EchoSequencer:
    """Sends every Ready on to rank `seq % world`: enough to see order and loss. Leaving and dying as the real one."""

    def __init__(self, world):
        self.world = world

    def step(self, event, now_ns, launch):
        match event:
            case Received(message=Ready() as ready):
                return [SendTo(ready.seq % self.world, ready)]
            case Received(message=Bye() as bye):
                return [Broadcast(bye)]
            case PeerGone(rank=rank, how=how):
                return [Broadcast(Died(rank=rank, how=how))]
        return []


def say(**facts):
    print(json.dumps(facts), flush=True)


def main():
    rank, world, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    delay_s = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
    settings = dict(each.split("=") for each in sys.argv[5:])
    key_folder, start_s = settings.pop("keys", None), float(settings.pop("start_s", 60.0))
    time.sleep(delay_s)
    incarnation = secrets.token_hex(8)
    entry = SlabEntry(rank=rank, incarnation=incarnation, host=host_identity(), pid=os.getpid(), ticket=b"t%d" % rank)
    say(incarnation=incarnation, pid=os.getpid())
    try:
        keys = load_keys(Path(key_folder)) if key_folder else None
        hub = ZmqHub(rank, world, address, sequencer=EchoSequencer(world) if rank == 0 else None, keys=keys)
        table = hub.start(Hello(entry=entry, world=world, fingerprint={"dtype": "f32", **settings}), start_s)
        say(table=[each.incarnation for each in table])
        hub.mapped(60.0)
        say(started=True, heavy=[name for name in ("numpy", "numba") if name in sys.modules])
    except WhalezError as error:
        say(error=type(error).__name__, field=getattr(error, "field", None), text=str(error))
        sys.exit(3)
    waiting = set(range(world)) - {rank}
    is_leaving = False
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    news = os.eventfd(0, os.EFD_NONBLOCK)
    selector.register(news, selectors.EVENT_READ)
    hub.set_waker(lambda: os.eventfd_write(news, 1))
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                command = sys.stdin.readline().strip()
                if command == "bye":
                    is_leaving = True
                    hub.send(Bye(rank=rank))
                else:  # "exit", or the test is gone
                    os._exit(4)
            else:
                os.eventfd_read(news)
        try:
            for message in hub.drain():
                if isinstance(message, Bye):
                    waiting.discard(message.rank)
        except WhalezError as error:
            say(error=type(error).__name__, rank=getattr(error, "rank", None), text=str(error), at=time.monotonic())
            hub.close()
            sys.exit(5)
        if is_leaving and not waiting:
            hub.close()
            say(left=True)
            return


if __name__ == "__main__":
    main()
