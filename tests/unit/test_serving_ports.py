# SPDX-License-Identifier: Apache-2.0
"""Ports: free on every address or not free, and whose they are."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from splitbench.serving.ports import busy, holder, is_free, listened_by


def listener(address: str) -> socket.socket:
    """A listening socket on a port that the kernel chooses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found = socket.socket(family)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
    found.bind((address, 0))
    found.listen()
    return found


def test_a_port_is_taken_whatever_address_it_is_held_on() -> None:
    for address in ("0.0.0.0", "127.0.0.1", "127.0.0.2", "::", "::1"):
        with listener(address) as held:
            port = held.getsockname()[1]
            assert not is_free(port), address
            assert busy([port]) == [port]
        assert is_free(port), address


def test_a_port_with_lingering_connections_is_free() -> None:
    with listener("127.0.0.1") as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # the server closes first: its side lingers in TIME_WAIT
            assert client.recv(1) == b""
    assert is_free(port)


def test_the_holder_is_named() -> None:
    with listener("0.0.0.0") as held:
        said = holder(held.getsockname()[1])
    assert said.startswith(f"pid {os.getpid()} (")


def test_a_socket_is_ours_only_if_one_of_our_processes_holds_it() -> None:
    with listener("127.0.0.1") as held:
        port = held.getsockname()[1]
        assert listened_by(port, [os.getpid()]) is True
        assert listened_by(port, [1, 2**22 + 1]) is False
    assert listened_by(port, [os.getpid()]) is None


def test_two_listeners_on_one_port_must_both_be_ours() -> None:
    code = (
        "import socket, sys\n"
        "s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n"
        "s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen(); print('up', flush=True); sys.stdin.read()\n"
    )
    with socket.socket() as mine:
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        mine.bind(("127.0.0.1", 0))
        mine.listen()
        port = mine.getsockname()[1]
        with subprocess.Popen(
            [sys.executable, "-c", code, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"up\n"
            assert listened_by(port, [os.getpid()]) is False
            assert listened_by(port, [os.getpid(), other.pid]) is True
            other.communicate(b"")
