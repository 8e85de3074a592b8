# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` of the stub: an OpenAI completions server with vLLM's endpoints, and its process tree."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import mmap
import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from vllm import __version__
from vllm.behaviour import Behaviour, behaviour
from vllm.stub_engine import Engine, Request


def log(text: str, level: str = "INFO", who: str = "APIServer") -> None:
    """One line in the form of vLLM's log."""
    stamp = time.strftime("%m-%d %H:%M:%S")
    sys.stderr.write(f"({who} pid={os.getpid()}) {level} {stamp} [stub.py:1] {text}\n")
    sys.stderr.flush()


def journal(wanted: Behaviour, event: str, port: int) -> None:
    """Append to the journal, one write per line so that engines do not mix theirs."""
    if wanted.journal:
        line = json.dumps({"event": event, "port": port, "pid": os.getpid(), "time": time.time()}) + "\n"
        descriptor = os.open(wanted.journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(descriptor, line.encode())
        os.close(descriptor)


# -- process tree --------------------------------------------------------------------------------------------
def _sleep_forever() -> None:
    while True:
        time.sleep(3600)


def fork_detached(wanted: Behaviour, count: int) -> None:
    """Children that have left the session and the family of the server: double-forked after setsid."""
    for _ in range(count):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                if wanted.ignore_term:
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                _sleep_forever()
            os._exit(0)
        os.wait()


def fork_port_taker(port: int) -> None:
    """A child that listens on a port of its own and never answers."""
    if os.fork() == 0:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("0.0.0.0", port))
        listener.listen()
        _sleep_forever()


def fork_core(wanted: Behaviour) -> int:
    """A child in the place of vLLM's EngineCore; returns its pid."""
    child = os.fork()
    if child == 0:
        if wanted.ignore_term:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _sleep_forever()
    return child


def leave_litter() -> None:
    """What vLLM has on the machine while it runs, never cleared away: as if it were always killed."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{os.environ.get('VLLM_RPC_BASE_PATH', tempfile.gettempdir())}/{uuid.uuid4()}")
    listener.listen()
    _kept.append(listener)
    Path(tempfile.gettempdir(), f"vllm_dist_{uuid.uuid4().hex}").touch()
    handle = os.open(f"/dev/shm/psm_stub_{uuid.uuid4().hex[:8]}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(handle, 65536)
    _kept.append(mmap.mmap(handle, 65536))
    os.close(handle)


_kept: list[object] = []  # open and mapped as long as the process lives


# -- HTTP ----------------------------------------------------------------------------------------------------
class BadRequestError(Exception):
    """Answered with 400 and its text."""


class Server:
    """Routes, on plain asyncio streams with keep-alive."""

    def __init__(self, engine: Engine, wanted: Behaviour, model: str, names: list[str], port: int) -> None:
        self.engine, self.wanted, self.model, self.names, self.port = engine, wanted, model, names, port
        self.completions = 0

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve requests on one connection until the peer closes it."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            while head := await reader.readline():
                method, target, _ = head.decode().split(" ", 2)
                headers: dict[str, str] = {}
                while (line := await reader.readline()) not in (b"\r\n", b""):
                    name, _, value = line.decode("latin-1").partition(":")
                    headers[name.strip().lower()] = value.strip()
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self.route(method, target.partition("?")[0], headers, body, writer)
                await writer.drain()
                if headers.get("connection", "").lower() == "close":
                    break
        writer.close()

    @staticmethod
    def reply(
        writer: asyncio.StreamWriter, status: int, payload: Any, kind: str = "application/json"
    ) -> None:
        """A complete answer."""
        body = payload.encode() if isinstance(payload, str) else json.dumps(payload).encode()
        head = (
            f"HTTP/1.1 {status} {'OK' if status < 400 else 'Error'}\r\ncontent-type: {kind}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)

    async def route(
        self, method: str, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        """One request."""
        sick = self.wanted.fail_health or (
            bool(self.wanted.fail_health_file) and Path(self.wanted.fail_health_file).exists()
        )
        if path == "/health":
            self.reply(writer, 503 if sick else 200, "", "text/plain")
        elif path == "/version":
            self.reply(writer, 200, {"version": __version__})
        elif path == "/v1/models":
            cards = [{"id": n, "object": "model", "owned_by": "vllm", "root": self.model} for n in self.names]
            self.reply(writer, 200, {"object": "list", "data": cards})
        elif path == "/metrics":
            self.reply(writer, 200, self.engine.metrics(self.names[0]), "text/plain; version=0.0.4")
        elif path == "/server_info":
            facts = {
                "vllm_config": {
                    "model_config": {"model": self.model, "dtype": "torch.bfloat16", "enforce_eager": True},
                    "cache_config": {
                        "block_size": self.wanted.block_size,
                        "enable_prefix_caching": self.engine.prefix_caching,
                    },
                }
            }
            self.reply(writer, 200, facts)
        elif path == "/reset_prefix_cache" and method == "POST":
            self.engine.cache.clear()
            self.reply(writer, 200, "", "text/plain")
        elif path == "/v1/completions" and method == "POST":
            try:
                await self.complete(headers, json.loads(body), writer)
            except (BadRequestError, ValueError) as bad:
                error = {"message": str(bad), "type": "BadRequestError", "code": 400}
                self.reply(writer, 400, {"error": error})
        else:
            self.reply(writer, 404, {"detail": "Not Found"})

    async def complete(
        self, headers: dict[str, str], ask: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        """POST /v1/completions, streaming or not."""
        if ask.get("model") not in (None, *self.names):
            raise BadRequestError(f"The model `{ask.get('model')}` does not exist.")
        prompt = ask.get("prompt")
        if isinstance(prompt, str):
            prompt = prompt.split() or [""]
        if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], list):
            raise BadRequestError("the stub takes one prompt, as text or as token ids")
        if int(ask.get("n") or 1) != 1:
            raise BadRequestError("the stub makes one answer per request")
        self.completions += 1
        if 0 <= self.wanted.die_after_requests < self.completions:
            log("EngineCore encountered a fatal error.", "ERROR", "EngineCore")
            os.kill(os.getpid(), signal.SIGKILL)
        if self.wanted.fail_requests:
            self.reply(writer, 500, {"error": {"message": "EngineDeadError", "code": 500}})
            return
        request = Request(prompt, max(1, int(ask.get("max_tokens") or 16)), ask.get("kv_transfer_params"))
        identity = "cmpl-" + (headers.get("x-request-id") or uuid.uuid4().hex)
        frame = {
            "id": identity,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.names[0],
        }
        if not ask.get("stream"):
            words = [word async for word in self.engine.generate(request)]
            whole = {
                **frame,
                "choices": [
                    {"index": 0, "text": "".join(words), "logprobs": None, "finish_reason": "length"}
                ],
                "usage": self.usage(request),
                "kv_transfer_params": request.reply_transfer,
            }
            self.reply(writer, 200, whole)
            return
        options = ask.get("stream_options") or {}
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        async for word in self.engine.generate(request):
            last = request.made >= request.max_tokens
            piece: dict[str, Any] = {
                **frame,
                "choices": [
                    {"index": 0, "text": word, "logprobs": None, "finish_reason": "length" if last else None}
                ],
            }
            if options.get("continuous_usage_stats"):
                piece["usage"] = self.usage(request)
            self.event(writer, json.dumps(piece))
            await writer.drain()
        if options.get("include_usage"):
            self.event(writer, json.dumps({**frame, "choices": [], "usage": self.usage(request)}))
        self.event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")

    @staticmethod
    def usage(request: Request) -> dict[str, int]:
        """Token counts so far."""
        prompt, made = len(request.prompt), request.made
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}

    @staticmethod
    def event(writer: asyncio.StreamWriter, text: str) -> None:
        """One server-sent event in one chunk."""
        data = f"data: {text}\n\n".encode()
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


# -- start ---------------------------------------------------------------------------------------------------
async def _serve(options: argparse.Namespace, wanted: Behaviour, core: int | None) -> int:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[int] = loop.create_future()

    def end(code: int) -> None:
        if not done.done():
            done.set_result(code)

    if not wanted.ignore_term:
        loop.add_signal_handler(signal.SIGTERM, end, 0)
    loop.add_signal_handler(signal.SIGINT, end, 0)
    if core is not None:
        watched = core

        def child_ended() -> None:
            pid, _ = os.waitpid(watched, os.WNOHANG)
            if pid == watched:
                log("EngineCore died unexpectedly, shutting down.", "ERROR")
                end(1)

        loop.add_signal_handler(signal.SIGCHLD, child_ended)
        child_ended()
    model = options.model_tag or options.model
    transfer = json.loads(options.kv_transfer_config) if options.kv_transfer_config else {}
    nixl = "nixl" in str(transfer.get("kv_connector", "")).lower()
    side_host = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    side_port = int(os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")) if nixl else 0
    engine = Engine(wanted, options.enable_prefix_caching, side_host, side_port)
    log(f"vLLM API server version {__version__}")
    log(f"Initializing a V1 LLM engine (v{__version__}) with config: model='{model}'", who="EngineCore")
    await asyncio.wait([done], timeout=wanted.startup_s)
    if wanted.die_early:
        log(wanted.die_early, "ERROR", "EngineCore")
        end(1)
    if wanted.hang_start:
        await done
    try:
        if not done.done():
            if nixl:
                await engine.serve_side_channel()
            names = [wanted.served_name] if wanted.served_name else options.served_model_name or [model]
            server = Server(engine, wanted, model, names, options.port)
            listener = await asyncio.start_server(server.connection, options.host or "0.0.0.0", options.port)
            work = asyncio.ensure_future(engine.run())
            log("GPU KV cache size: 65,536 tokens", who="EngineCore")
            log("Application startup complete.")
            journal(wanted, "serving", options.port)
            while wanted.log_forever and not done.done():
                log("x" * 4000)
                await asyncio.sleep(0.001)
            await done
            work.cancel()
            listener.close()
    except OSError as error:
        log(f"{error}", "ERROR")
        end(1)
    return done.result()


def main(arguments: list[str]) -> int:
    """Run the server until SIGTERM, or until it misbehaves as told."""
    parser = argparse.ArgumentParser(prog="vllm serve")
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--model", default="model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--kv-transfer-config")
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    options, _ = parser.parse_known_args(arguments)
    wanted = behaviour(options.port)
    journal(wanted, "start", options.port)
    if wanted.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if wanted.litter:
        leave_litter()
    core = fork_core(wanted) if wanted.core else None
    fork_detached(wanted, wanted.children)
    if wanted.take_port:
        fork_port_taker(wanted.take_port)
    for number in range(wanted.log_lines):
        log(f"  frame {number}", "ERROR")
    if wanted.log_line_kib:
        log("x" * (wanted.log_line_kib * 1024))
    for _ in range(wanted.log_mib * 256):
        log("x" * 4000)
    code = asyncio.run(_serve(options, wanted, core))
    if core is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(core, signal.SIGTERM)
    journal(wanted, "end", options.port)
    return code
