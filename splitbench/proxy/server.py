# SPDX-License-Identifier: Apache-2.0
"""The proxy as a server: endpoints, identity of requests, and its life from start to stop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import orjson

from splitbench import __version__
from splitbench.errors import UserError
from splitbench.proxy.call import Background, Call
from splitbench.proxy.client import ClientConnection, Request
from splitbench.proxy.engines import Engine, EngineRequest, Fetch, content_type, fetch
from splitbench.proxy.flows import Flow, PrefillDecodeFlow, ReplicaFlow
from splitbench.proxy.handoff import Handoff, LMCacheHandoff, NixlHandoff, SharedCacheHandoff
from splitbench.proxy.notifications import KvNotifications
from splitbench.proxy.observe import Metrics, RequestRecord, TraceFile
from splitbench.proxy.options import Options
from splitbench.proxy.policy import Rotation
from splitbench.proxy.wire import EngineError, RefusalError, error_object

log = logging.getLogger("splitbench.proxy")

JSON = b"application/json"
HEALTH_LIMIT_S = 5.0
CONTROL_LIMIT_S = 60.0
CLIENT_ID = re.compile(r"[!-~]{1,200}")


class Proxy:
    """The server. `start`, then `stop`; `port` and `notify_port` are the bound ones."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.port = options.port
        self.metrics = Metrics()
        self.prefillers = [Engine(address, "prefill") for address in options.prefillers]
        role = "aggregated" if options.mode == "round-robin" else "decode"
        self.decoders = [Engine(address, role) for address in options.decoders]
        self.background = Background()
        self._notifications: KvNotifications | None = None
        self.flow = self._make_flow()
        self.notify_port = options.notify_port
        self._trace: TraceFile | None = None
        self._server: asyncio.Server | None = None
        self._connections: set[ClientConnection] = set()
        # Random per start: ids must not meet those of an earlier run that an engine still remembers.
        self._id_prefix = os.urandom(6).hex()
        self._id_count = itertools.count(1)
        self._routes: dict[bytes, tuple[bytes, Callable[[ClientConnection, Request], Awaitable[None]]]] = {
            b"/v1/completions": (b"POST", self._complete),
            b"/v1/chat/completions": (b"POST", self._complete),
            b"/v1/models": (b"GET", self._models),
            b"/health": (b"GET", self._health),
            b"/metrics": (b"GET", self._metrics),
            b"/reset_prefix_cache": (b"POST", self._reset_prefix_cache),
            b"/server_info": (b"GET", self._server_info),
        }

    @property
    def engines(self) -> list[Engine]:
        """All engines, prefill first."""
        return [*self.prefillers, *self.decoders]

    def _make_flow(self) -> Flow:
        decoders = Rotation(self.decoders, self.options.policy)
        if self.options.mode == "round-robin":
            return ReplicaFlow(decoders)
        prefillers = Rotation(self.prefillers, self.options.policy)
        head = self.options.first_token == "prefiller"
        return PrefillDecodeFlow(prefillers, self._make_handoff(decoders, head), head)

    def _make_handoff(self, decoders: Rotation, head: bool) -> Handoff:
        if self.options.mode == "nixl":
            return NixlHandoff(decoders, self.background)
        if self.options.mode == "lmcache-mp":
            return SharedCacheHandoff(decoders, self.background)
        self._notifications = KvNotifications(
            self.options.notify_host, self.options.notify_port, self.metrics.notifications
        )
        return LMCacheHandoff(decoders, self.background, self._notifications, head)

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            UserError: the address is taken or is none of this machine.
        """
        loop = asyncio.get_running_loop()
        if self.options.trace_file is not None:
            self._trace = TraceFile(self.options.trace_file)
        await self.flow.start()
        if self._notifications is not None:
            self.notify_port = self._notifications.port
        try:
            self._server = await loop.create_server(
                lambda: ClientConnection(self._handle, self._connections, self.options.limits.body_bytes),
                self.options.host,
                self.options.port,
                backlog=4096,
            )
        except OSError as error:
            await self.flow.stop()
            raise UserError(
                f"cannot serve on {self.options.host}:{self.options.port}: {error.strerror}",
                where="--port",
                mend="choose a free port",
            ) from None
        self.port = self._server.sockets[0].getsockname()[1]
        log.info("mode %s, serving on %s:%d", self.options.mode, self.options.host, self.port)

    async def stop(self) -> None:
        """Close the door, drop what is in work, free KV where that is quick."""
        if self._server is not None:
            self._server.close()
        tasks = [connection.task for connection in self._connections if connection.task is not None]
        for connection in list(self._connections):
            connection.transport.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.background.stop()
        await self.flow.stop()
        for engine in self.engines:
            engine.close()
        if self._trace is not None:
            self._trace.close()
            self._trace = None

    # requests

    async def _handle(self, client: ClientConnection, request: Request) -> None:
        method, route = self._routes.get(request.path, (b"", None))
        if route is None:
            self._error(client, request, 404, f"no such endpoint: {request.path.decode('ascii', 'replace')}")
        elif request.method != method:
            self._error(client, request, 405, f"use {method.decode()}")
        else:
            await route(client, request)

    def _error(
        self,
        client: ClientConnection,
        request: Request,
        status: int,
        message: str,
        param: str | None = None,
        request_id: str | None = None,
    ) -> None:
        body = orjson.dumps(error_object(status, message, param))
        client.answer(status, body, JSON, request, request_id)

    async def _complete(self, client: ClientConnection, request: Request) -> None:
        unique = f"{self._id_prefix}-{next(self._id_count)}"
        given = request.client_id if request.client_id and CLIENT_ID.fullmatch(request.client_id) else None
        endpoint = request.path.decode()
        record = RequestRecord(f"{given}-{unique}" if given else unique, given, endpoint, time.monotonic())
        call = Call(client, request, record, self.options.limits, self.metrics)
        self.metrics.in_flight += 1
        try:
            if request.http_1_0:
                raise RefusalError(505, "completions are streamed in HTTP/1.1")
            await self.flow.serve(call)
        except (RefusalError, EngineError) as error:
            record.status, record.error = error.status, str(error)
            param = error.param if isinstance(error, RefusalError) else None
            if isinstance(error, EngineError):
                log.warning("request %s: %s", record.id, error)
            self._error(client, request, error.status, str(error), param, record.id)
        except asyncio.CancelledError:
            record.status, record.error = 499, "the client left"
            self.metrics.cancelled += 1
            raise
        except Exception as error:
            log.exception("request %s", record.id)
            record.status, record.error = 500, f"defect in the proxy: {type(error).__name__}"
            if client.started:
                client.cut()
            else:
                self._error(client, request, 500, record.error, None, record.id)
        finally:
            self.metrics.in_flight -= 1
            self.metrics.count(record)
            if self._trace is not None:
                for one in (record, *call.part_records):
                    self._trace.write(one)

    # the other endpoints

    async def _ask(self, engine: Engine, request: Request, limit_s: float) -> Fetch:
        asked = EngineRequest(request.method, request.target, None, request.forwarded)
        return await fetch(engine, asked, min(limit_s, self.options.limits.connect_s), limit_s)

    async def _ask_all(self, request: Request, limit_s: float) -> dict[Engine, Fetch | EngineError]:
        async def ask(engine: Engine) -> Fetch | EngineError:
            try:
                return await self._ask(engine, request, limit_s)
            except EngineError as failure:
                return failure

        engines = self.engines
        return dict(zip(engines, await asyncio.gather(*map(ask, engines)), strict=True))

    async def _health(self, client: ClientConnection, request: Request) -> None:
        answers = await self._ask_all(request, HEALTH_LIMIT_S)
        states = {engine.name: _state(answer) for engine, answer in answers.items()}
        if all(state == "ok" for state in states.values()):
            client.answer(200, b"", JSON, request, None)
        else:
            client.answer(503, orjson.dumps({"status": "not ready", "engines": states}), JSON, request, None)

    async def _models(self, client: ClientConnection, request: Request) -> None:
        """The decoders' answer: they are who the client hears."""
        failure: EngineError | None = None
        for engine in self.decoders:
            try:
                reply = await self._ask(engine, request, CONTROL_LIMIT_S)
            except EngineError as error:
                failure = error
                continue
            client.answer(reply.status, reply.body, content_type(reply.headers) or JSON, request, None)
            return
        assert failure is not None
        self._error(client, request, failure.status, str(failure))

    async def _metrics(self, client: ClientConnection, request: Request) -> None:
        engines = [(e.role, e.name, e.in_flight, e.requests, e.failures) for e in self.engines]
        text = self.metrics.text(self.options.mode, engines)
        client.answer(200, text.encode(), b"text/plain; version=0.0.4; charset=utf-8", request, None)

    async def _reset_prefix_cache(self, client: ClientConnection, request: Request) -> None:
        answers = await self._ask_all(request, CONTROL_LIMIT_S)
        states = {engine.name: _state(answer) for engine, answer in answers.items()}
        status = 200 if all(state == "ok" for state in states.values()) else 502
        client.answer(status, orjson.dumps({"engines": states}), JSON, request, None)

    async def _server_info(self, client: ClientConnection, request: Request) -> None:
        answers = await self._ask_all(request, CONTROL_LIMIT_S)
        engines: list[dict[str, Any]] = []
        for engine, answer in answers.items():
            entry: dict[str, Any] = {"engine": engine.name, "role": engine.role, "state": _state(answer)}
            if isinstance(answer, Fetch) and answer.status == 200:
                entry["server_info"] = _parsed(answer.body)
            engines.append(entry)
        options = asdict(self.options) | {"trace_file": self._trace is not None, "port": self.port}
        body = {
            "proxy": {"name": "splitbench", "version": __version__, "options": options},
            "engines": engines,
        }
        client.answer(200, orjson.dumps(body), JSON, request, None)


def _state(answer: Fetch | EngineError) -> str:
    if isinstance(answer, EngineError):
        return str(answer)
    return "ok" if answer.status == 200 else f"status {answer.status}"


def _parsed(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace")
