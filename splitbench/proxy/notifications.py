# SPDX-License-Identifier: Apache-2.0
"""LMCache's word that KV has arrived: prefill ranks push it to a ZMQ socket; requests wait for it without
polling.
"""

from __future__ import annotations

import asyncio
import logging
import socket as sockets
import time
from collections import Counter
from typing import Any

import msgspec
import zmq as untyped_zmq

from splitbench.errors import UserError
from splitbench.proxy.wire import EngineError

zmq: Any = untyped_zmq  # its stubs lean on names that the type checker does not follow
log = logging.getLogger("splitbench.proxy")

# A sender that could not move the KV says so by this ending of the request id.
ERROR_ENDING = "::error"


class Notification(msgspec.Struct):
    """What is read of a notification (msgpack map, LMCache's ProxyNotif)."""

    req_id: str


class KvWait:
    """One request's wait: done when as many ranks as expected have reported.

    `waited` says that a limit has been reached before.
    """

    __slots__ = ("arrived", "arrived_s", "done", "ranks", "waited")

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.arrived = 0
        self.arrived_s = 0.0
        self.waited = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def arrive(self) -> None:
        """One rank has reported."""
        self.arrived += 1
        self.arrived_s = time.monotonic()
        if self.arrived >= self.ranks and not self.done.done():
            self.done.set_result(None)

    def break_off(self) -> None:
        """A rank could not send its KV."""
        if not self.done.done():
            self.done.set_exception(EngineError(502, "the prefill engine could not send the KV"))
            self.done.exception()  # looked at: whether anybody awaits it or not

    async def within(self, limit_s: float) -> None:
        """Wait until all ranks have reported.

        Raises:
            EngineError: not within `limit_s`, or the sender gave up.
        """
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.shield(self.done)
        except TimeoutError:
            self.waited = True
            raise EngineError(
                504, f"KV not complete after {limit_s:g} s: {self.arrived} of {self.ranks} ranks reported"
            ) from None


class KvNotifications:
    """The socket that LMCache's senders push to (their `pd_proxy_host` and `pd_proxy_port`)."""

    def __init__(self, host: str, port: int, counts: Counter[str]) -> None:
        self.host = host
        self.port = port
        self.counts = counts
        self._waits: dict[str, KvWait] = {}
        self._context: Any = None
        self._socket: Any = None

    def start(self) -> None:
        """Bind, and have the event loop wake us for messages.

        Raises:
            UserError: the address is taken or is none of this machine.
        """
        try:
            address = sockets.gethostbyname(self.host)
            self._context = zmq.Context()
            self._socket = self._context.socket(zmq.PULL)
            self._socket.linger = 0
            # The sender blocks when its queue is full, and with it the prefill: take everything.
            self._socket.rcvhwm = 0
            self._socket.bind(f"tcp://{address}:{self.port or '*'}")
        except (OSError, zmq.ZMQError) as error:
            self.stop()
            raise UserError(
                f"cannot listen on {self.host}:{self.port}: {error.strerror}",
                where="--proxy-host, --proxy-port",
                mend="choose a free port of this machine, and name it in the prefillers' LMCache config",
            ) from None
        self.port = int(self._socket.last_endpoint.rsplit(b":", 1)[1])
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._drain)
        self._drain()

    def stop(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            if not self._socket.closed and self._socket.last_endpoint:
                asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
        if self._context is not None:
            self._context.term()
            self._context = None

    def expect(self, request_id: str, ranks: int) -> KvWait:
        """Announce a request before its prefill is sent: a notification may overtake the prefill's answer."""
        wait = self._waits[request_id] = KvWait(ranks)
        return wait

    def forget(self, request_id: str) -> None:
        """Nobody waits any more."""
        self._waits.pop(request_id, None)

    def _drain(self) -> None:
        """Take all messages: the descriptor signals once for many."""
        assert self._socket is not None
        while True:
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                request_id = msgspec.msgpack.decode(message, type=Notification).req_id
            except msgspec.MsgspecError:
                self.counts["unreadable"] += 1
                continue
            wait = self._waits.get(request_id)
            if wait is not None:
                self.counts["awaited"] += 1
                wait.arrive()
            elif request_id.endswith(ERROR_ENDING):
                self.counts["failed"] += 1
                wait = self._waits.get(request_id.removesuffix(ERROR_ENDING))
                if wait is not None:
                    wait.break_off()
            else:
                self.counts["unknown"] += 1
