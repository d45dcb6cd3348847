import os
import subprocess
import sys

import pytest

from whalez.hub.interface import OVERSLEPT_NS, SILENCE_LIMIT_NS, STARVED_LIMIT_NS
from whalez.hub.liveness import Liveness
from whalez.hub.processes import PeerWatch, is_alive_and_running

STEP = 250_000_000


def run(liveness, start, end, **kwargs):
    """Look every STEP from start to end, as a thread that runs freely does; the first time somebody is silent."""
    for now in range(start, end, STEP):
        silent = liveness.silent(now, **kwargs)
        if silent:
            return now, silent
    return None


def test_a_silent_peer_is_named_after_its_limit_and_not_before():
    liveness = Liveness()
    liveness.heard("a", 0)
    assert run(liveness, 0, SILENCE_LIMIT_NS + 1) is None
    now, silent = run(liveness, SILENCE_LIMIT_NS + STEP, 10 * SILENCE_LIMIT_NS)
    assert silent == [("a", now)]


def test_a_sign_of_life_restarts_the_clock():
    liveness = Liveness()
    liveness.heard("a", 0)
    assert run(liveness, 0, SILENCE_LIMIT_NS) is None
    liveness.heard("a", SILENCE_LIMIT_NS)
    assert run(liveness, SILENCE_LIMIT_NS, 2 * SILENCE_LIMIT_NS) is None


def test_a_watcher_that_overslept_accuses_nobody():
    liveness = Liveness()
    liveness.heard("a", 0)
    assert liveness.silent(0) == []
    late = 10 * SILENCE_LIMIT_NS
    assert late > OVERSLEPT_NS
    assert liveness.silent(late) == []
    assert run(liveness, late, late + SILENCE_LIMIT_NS + 1) is None
    assert run(liveness, late + SILENCE_LIMIT_NS + 1, late + 2 * SILENCE_LIMIT_NS) is not None


def test_a_starved_process_gets_longer_but_not_for_ever():
    liveness = Liveness()
    liveness.heard("a", 0)
    now, _ = run(liveness, 0, 10 * STARVED_LIMIT_NS, is_starved=lambda peer: True)
    assert STARVED_LIMIT_NS < now < 5_000_000_000 - 2 * STEP


def test_forgotten_peers_are_not_missed():
    liveness = Liveness()
    liveness.heard("a", 0)
    liveness.forget("a")
    assert run(liveness, 0, 10 * SILENCE_LIMIT_NS) is None


@pytest.mark.multiprocess
def test_process_states():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watch = PeerWatch()
    try:
        assert is_alive_and_running(child.pid)
        fd = watch.add("i", child.pid)
        assert fd is not None
        assert watch.add("i", child.pid) is None
        assert watch.is_starved("i")
        os.kill(child.pid, 19)  # SIGSTOP
        os.waitpid(child.pid, os.WUNTRACED)
        assert not is_alive_and_running(child.pid)
        child.kill()
        child.wait(10)
        assert watch.take(fd) == "i"
        assert not watch.is_starved("i")
        with pytest.raises(ProcessLookupError):
            watch.add("i", child.pid)
    finally:
        watch.close()
        child.kill()
        child.wait(10)
        child.stdin.close()
