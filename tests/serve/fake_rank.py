"""A rank process without an engine: it takes the real rank's command line and speaks over the real link.

With --listen it has a real front, too.

Its behaviour is the folder's `behave.json` {rank: word}, so that a test chooses it without a flag of the real command:
  (none)    serves: answers every prompt with its tokens plus one, one token each 1 ms; leaves on STOP
  dies      prints a reason and exits 3 before it serves
  mute      never serves
  stops     is stopped before it says a word
  stubborn  ignores STOP, and has a child that does so too
  later     has a front that comes a second later
  barred    has a front that cannot start
  closes    closes its link at the first request, and lives on
  tells     exits 1 naming the peer that died, as soon as a peer's pid in peers.json is gone or stopped
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from array import array
from pathlib import Path

import numpy as np

from whalez.hub.requests import CancelRequest, Done, Failed, Report, Status, Submit, TokenOut
from whalez.hub.zmq_link import LinkServer
from whalez.serve.links import link_address
from whalez.serve.process import STOP, front_command


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in ("--rank", "--world"):
        parser.add_argument(flag, type=int, required=True)
    for flag in ("--model", "--run", "--fleet-id"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--capture", action="store_true")
    parser.add_argument("--listen")
    args, _ = parser.parse_known_args()
    run_dir = Path(args.run)
    words = json.loads((Path(args.model) / "behave.json").read_text())
    behaviour = words.get(str(args.rank), "")
    if behaviour == "dies":
        (run_dir / f"post-mortem-{args.rank}.json").write_text("{}")
        print(f"whalez: rank {args.rank}: model.safetensors: tensor lm_head is cut short", file=sys.stderr)
        return 3
    if behaviour == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    name = f"/dev/shm/whalez-{args.fleet_id}-fake-{args.rank}"  # as if killed before the barrier
    if behaviour == "stubborn":
        Path(name).touch()
        signal.signal(STOP, signal.SIG_IGN)
        subprocess.Popen(["sleep", "100"])
    leaving = threading.Event()
    if behaviour != "stubborn":
        signal.signal(STOP, lambda *_: leaving.set())
    cancelled: set[str] = set()

    def on_request(client: bytes, request: Submit | CancelRequest) -> None:
        if isinstance(request, CancelRequest):
            cancelled.add(request.request_id)
        elif behaviour == "closes":
            threading.Thread(target=server.close, daemon=True).start()
        else:
            threading.Thread(target=generate, args=(client, request), daemon=True).start()

    def generate(client: bytes, submit: Submit) -> None:
        prompt = array("i", submit.tokens)
        out: list[int] = []
        while len(out) < submit.max_tokens:
            if submit.request_id in cancelled:
                server.reply(client, Failed(request_id=submit.request_id, kind="cancelled", reason="cancelled"))
                return
            token = (prompt[len(out) % len(prompt)] + 1) % 256
            server.reply(client, TokenOut(request_id=submit.request_id, index=len(out), token=token))
            out.append(token)
            time.sleep(0.001)
        report = Report(lane="whale", why="fake", poster=args.rank, gang=tuple(range(args.world)))
        if args.capture:
            folder = run_dir / "capture" / submit.request_id
            folder.mkdir(parents=True)
            for rank in range(args.world):
                arrays = {"start": np.int64(10 * rank), "hidden": np.full((2, 3), rank, np.float32)}
                if rank == args.rank:
                    arrays["logits"] = np.zeros((1 + len(out), 4), np.float32)
                np.savez(folder / f"rank-{rank}.npz", **arrays)
        server.reply(
            client,
            Done(
                request_id=submit.request_id,
                finish_reason="length",
                tokens=tuple(out),
                prompt_tokens=len(prompt),
                report=report,
            ),
        )

    def status() -> Status:
        return Status(
            query_id="",
            rank=args.rank,
            world=args.world,
            incarnation="i",
            pid=os.getpid(),
            state="starting" if behaviour == "mute" else "serving",
            launch=0,
            launch_age_s=0.0,
            healthy=True,
            trouble="",
            running=0,
            waiting=0,
            cache_used=0,
            cache_total=1,
            max_ctx=100_000,
            vocab_size=256,
            model="fake",
        )

    address = link_address(run_dir, args.rank)
    print(f"rank {args.rank} up, argv {sys.argv[1:]}", flush=True)
    server = LinkServer(address, on_request, status)
    front = None
    if args.listen is not None:
        listen = "192.0.2.7:1" if behaviour == "barred" else args.listen  # of no machine at all
        command = front_command([address], listen, "fake", parent=os.getpid())
        if behaviour == "later":
            command = ["sh", "-c", f"sleep 1; exec {shlex.join(command)}"]
        front = subprocess.Popen(command)
    while not leaving.wait(0.02):
        if behaviour == "tells":
            with contextlib.suppress(FileNotFoundError, ValueError):
                for rank, pid in json.loads((run_dir / "peers.json").read_text()).items():
                    if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZT":
                        print(f"whalez: rank {args.rank}: rank {rank} died: noticed by rank {args.rank}", flush=True)
                        return 1
    server.close()
    if front is not None:
        front.terminate()
        front.wait()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
