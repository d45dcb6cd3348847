"""The control plane: how ranks, the sequencer and clients speak to each other. The only package that knows ZeroMQ.

interface.py  what the loop sees                     wire.py       bytes <-> messages (pure)
local.py      the hub inside one process             conductor.py  what the centre does with a frame
zmq_hub.py    a rank's end, one thread               zmq_router.py the centre's end, a thread of rank 0
zmq_link.py   clients <-> one rank                   sockets.py    every socket option
address.py    what can be reached                    processes.py  pidfds and wakes
liveness.py   who is silent for too long (pure)      inbox.py      what waits for the loop
"""
