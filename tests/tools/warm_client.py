"""Stands in for Python: `python -SE warm_client.py SOCKET SHIM [-u] FILE|-m MODULE|-c CODE ARGUMENTS...`.

warm_server.py forks the process; this one has its streams, forwards its signals and ends with its status.
"""

import json
import os
import signal
import socket
import sys


def answer(connection: socket.socket) -> int:
    """The next number that the server tells."""
    told = connection.recv(8)
    if not told:
        sys.exit("warm_server.py has ended")
    return int.from_bytes(told, "little", signed=True)


def main() -> None:
    """Ask for a process and wait for it."""
    path, python, *arguments = sys.argv[1:]
    arguments = arguments[arguments[:1] == ["-u"] :]
    if arguments[0] not in ("-c", "-m"):
        arguments.insert(0, "file")
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ), "python": python}
    data = json.dumps(request).encode()
    socket.send_fds(connection, [len(data).to_bytes(8, "little")], [0, 1, 2])
    connection.sendall(data)
    process = answer(connection)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.killpg(process, number))
    status = answer(connection)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


main()
