"""The control plane: how ranks, the sequencer and clients speak to each other. The only package that knows ZeroMQ.

what they say       wire.py            bytes <-> messages (pure)
                    requests.py        clients and a rank          request_limits.py  what a request may ask for
                    admin.py           an operator and a rank
ranks               interface.py       what the loop sees          conductor.py       what the centre does with a frame
                    zmq_hub.py         a rank's end, one thread    zmq_router.py      the centre's end, in rank 0
                    local.py           the hub inside one process  inbox.py           what waits for the loop
                    liveness.py        who is silent too long      processes.py       pidfds and wakes
clients, operators  zmq_link.py        clients <-> one rank        zmq_admin.py       an operator <-> every rank
every socket        sockets.py         every option                address.py         what can be reached
                    keys.py            who may join, and order     connections.py     who was not let in, and why
"""
