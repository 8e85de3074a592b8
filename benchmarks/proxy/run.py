# SPDX-License-Identifier: Apache-2.0
"""Compare the proxy with a direct connection, vllm-router and a FastAPI + httpx relay, in one run.

    python benchmarks/proxy/run.py --peers .splitbench/benchmarks

Repeats are interleaved: every round measures every candidate once. See README.md for what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from client import Load, run_load

HERE = Path(__file__).parent
ENGINE = HERE.parents[1] / "splitbench" / "measuring" / "paced_engine.py"
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A process that serves on a port, and its processor time (children included)."""

    def __init__(self, command: list[str], port: int, environment: dict[str, str] | None = None) -> None:
        self.port = port
        self.process = subprocess.Popen(command, env=os.environ | (environment or {}), **QUIET)
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise SystemExit(f"did not start: {' '.join(command)}")
            time.sleep(0.1)

    def cpu_s(self) -> float:
        top = psutil.Process(self.process.pid)
        total = 0.0
        for process in [top, *top.children(recursive=True)]:
            times = process.cpu_times()
            total += times.user + times.system
        return total

    def rss_mib(self) -> float:
        top = psutil.Process(self.process.pid)
        return sum(p.memory_info().rss for p in [top, *top.children(recursive=True)]) / 2**20

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def engine(*more: str) -> Server:
    port = free_port()
    return Server([sys.executable, str(ENGINE), "--port", str(port), *more], port)


def proxy(mode: str, *more: str, port: int | None = None) -> Server:
    port = port or free_port()
    return Server(
        [sys.executable, "-m", "splitbench.proxy", "--mode", mode, "--port", str(port), *more], port
    )


def candidates(peers: Path | None, stack: ExitStack, tokens: int) -> dict[str, Server]:
    """Start all candidates, each in front of an engine (and prefill) of its own kind."""

    def up(server: Server) -> Server:
        stack.callback(server.stop)
        return server

    notify = free_port()
    settings = ("--tokens", str(tokens), "--notify", f"127.0.0.1:{notify}")
    decode, prefill = up(engine(*settings)), up(engine(*settings))
    engines = ("--prefiller-port", str(prefill.port), "--decoder-port", str(decode.port))
    found = {
        "direct": decode,
        "splitbench round-robin": up(proxy("round-robin", "--decoder-port", str(decode.port))),
        "splitbench nixl": up(proxy("nixl", *engines)),
        "splitbench lmcache": up(proxy("lmcache", *engines, "--proxy-port", str(notify))),
    }
    port = free_port()
    bare = [sys.executable, str(HERE / "byte_relay.py"), "--port", str(port), "--engine", str(decode.port)]
    found["bytes alone"] = up(Server(bare, port))
    if peers is not None:
        binaries = peers / "bin"
        port = free_port()
        router = [str(binaries / "vllm-router"), "--host", "127.0.0.1", "--log-level", "error"]
        router += ["--max-concurrent-requests", "4096", "--policy", "round_robin"]
        urls = [f"http://127.0.0.1:{decode.port}", f"http://127.0.0.1:{prefill.port}"]
        found["vllm-router round-robin"] = up(
            Server(
                [
                    *router,
                    "--port",
                    str(port),
                    "--prometheus-port",
                    str(free_port()),
                    "--worker-urls",
                    urls[0],
                ],
                port,
            )
        )
        port = free_port()
        pd = ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--prefill", urls[1], "--decode", urls[0]]
        found["vllm-router nixl"] = up(
            Server([*router, "--port", str(port), "--prometheus-port", str(free_port()), *pd], port)
        )
        port = free_port()
        relay = [
            str(binaries / "python"),
            "-m",
            "uvicorn",
            "fastapi_relay:app",
            "--port",
            str(port),
            "--no-access-log",
        ]
        found["fastapi + httpx"] = up(
            Server([*relay, "--app-dir", str(HERE), "--log-level", "error"], port, {"ENGINE": urls[0]})
        )
    return found


def body(tokens: int) -> bytes:
    value: dict[str, Any] = {
        "model": "mock",
        "prompt": "one two three four",
        "max_tokens": tokens,
        "stream": True,
    }
    value |= {"ignore_eos": True, "temperature": 0, "stream_options": {"include_usage": True}}
    return json.dumps(value).encode()


def measure(name: str, server: Server, streams: int, tokens: int, limit_s: float) -> dict[str, Any]:
    # With the first token from the prefiller, the engine writes one less, and the client is to get the rest.
    expected = tokens - 1 if name == "splitbench lmcache" else tokens
    before = server.cpu_s()
    load: Load = run_load(server.port, streams, body(tokens), expected, limit_s)
    cpu_s = server.cpu_s() - before
    row: dict[str, Any] = {
        "candidate": name,
        "streams": streams,
        "complete": load.complete,
        "tokens": load.tokens,
    }
    row |= {"cpu_s": round(cpu_s, 3), "chunks_per_cpu_s": round(load.tokens / cpu_s) if cpu_s else None}
    row |= {"rss_mib": round(server.rss_mib(), 1), "error": load.error}
    return row | load.quantiles()


def waiting_cpu(streams: int, seconds: float) -> dict[str, Any]:
    """Share of a core that the proxy uses while requests wait for KV that does not come."""
    notify = free_port()
    with ExitStack() as stack:
        lossy = engine("--lose-kv", "--notify", f"127.0.0.1:{notify}")
        stack.callback(lossy.stop)
        ports = (
            "--prefiller-port",
            str(lossy.port),
            "--decoder-port",
            str(lossy.port),
            "--proxy-port",
            str(notify),
        )
        server = proxy("lmcache", "--first-token", "decoder", *ports)
        stack.callback(server.stop)
        sockets = []
        for _ in range(streams):
            client = socket.create_connection(("127.0.0.1", server.port))
            data = body(10)
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)
            )
            sockets.append(client)
        time.sleep(1)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5) as answer:
            waits = [
                line
                for line in answer.read().decode().splitlines()
                if "kv_waiting " in line and "#" not in line
            ]
        before, start = server.cpu_s(), time.monotonic()
        time.sleep(seconds)
        share = (server.cpu_s() - before) / (time.monotonic() - start)
        for client in sockets:
            client.close()
    return {"waiting": int(float(waits[0].split()[1])), "seconds": seconds, "cpu_share": round(share, 4)}


def median(rows: list[dict[str, Any]], name: str, streams: int, key: str) -> float:
    values = [row[key] for row in rows if row["candidate"] == name and row["streams"] == streams]
    return statistics.median(value for value in values if value is not None) if values else float("nan")


def summary(rows: list[dict[str, Any]], streams: list[int], waiting: dict[str, Any]) -> dict[str, Any]:
    """Ratios within the run: the figures that the proxy is held to."""
    found: dict[str, Any] = {}
    for count in streams:
        for mode in ("round-robin", "nixl"):
            ours = median(rows, f"splitbench {mode}", count, "chunks_per_cpu_s")
            router = median(rows, f"vllm-router {mode}", count, "chunks_per_cpu_s")
            found[f"{mode}, {count} streams: chunks per CPU-s / vllm-router's"] = round(ours / router, 2)
            if mode == "round-robin":
                bare = median(rows, "bytes alone", count, "chunks_per_cpu_s")
                found[f"{count} streams: chunks per CPU-s of bytes alone / vllm-router's"] = round(
                    bare / router, 2
                )
                found[f"{mode}, {count} streams: chunks per CPU-s / bytes alone's"] = round(ours / bare, 2)
                relay = median(rows, "fastapi + httpx", count, "chunks_per_cpu_s")
                found[f"{mode}, {count} streams: chunks per CPU-s / FastAPI + httpx's"] = round(
                    ours / relay, 2
                )
    least = min(streams)
    for candidate in ("splitbench round-robin", "vllm-router round-robin", "fastapi + httpx"):
        for key, what in (("stretch_ms_p99", "P99 of what a gap gains"), ("ttft_ms_p50", "median TTFT")):
            added = median(rows, candidate, least, key) - median(rows, "direct", least, key)
            found[f"{candidate}, {least} streams: {what}, less direct's (ms)"] = round(added, 3)
    found["CPU share while requests wait for KV"] = waiting
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peers", type=Path, help="environment made from envs/benchmarks.in; without it, no peers"
    )
    parser.add_argument("--streams", default="32,256", help="comma list")
    parser.add_argument(
        "--most-streams", type=int, default=512, help="direct and ours only: does anything stall?"
    )
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=30, help="longest wait for one load")
    parser.add_argument("--only", default="", help="comma list: candidates whose name contains one of these")
    parser.add_argument("--json", type=Path, help="write all rows here")
    given = parser.parse_args()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    streams = [int(count) for count in given.streams.split(",")]
    only = given.only.split(",")
    rows: list[dict[str, Any]] = []
    load_before = os.getloadavg()[0]
    with ExitStack() as stack:
        servers = candidates(given.peers, stack, given.tokens)
        plan = [(count, name) for count in streams for name in servers if any(part in name for part in only)]
        plan += [
            (given.most_streams, name)
            for name in servers
            if given.most_streams
            and any(part in name for part in only)
            and ("direct" in name or "splitbench" in name)
        ]
        for _ in range(given.rounds):
            for count, name in plan:
                row = measure(name, servers[name], count, given.tokens, given.limit_s)
                rows.append(row)
                print(
                    f"{count:4} {name:24} {row['complete']:4}/{count} {row['cpu_s']:7.2f} CPU-s"
                    f" {row['chunks_per_cpu_s'] or 0:8} chunks/CPU-s"
                    f"  TTFT {row['ttft_ms_p50']:7.2f}/{row['ttft_ms_p99']:7.2f}"
                    f"  gap gains {row['stretch_ms_p50']:6.3f}/{row['stretch_ms_p99']:7.3f}"
                    f"  way {row['latency_ms_p50']:6.3f}/{row['latency_ms_p99']:7.3f} ms"
                    f"  max gap {row['gap_ms_max']:7.1f}  {row['error']}",
                    flush=True,
                )
    result = {
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "load_before": load_before},
        "summary": summary(rows, streams, waiting_cpu(32, 10)),
        "rows": rows,
    }
    print(json.dumps(result["summary"], indent=2))
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
