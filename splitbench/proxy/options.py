# SPDX-License-Identifier: Apache-2.0
"""Command line of the proxy: which engines it fronts, how they hand over KV, and what it will wait for.

Host and port lists pair up by one rule everywhere: one host and one port with a count above 1 mean port,
port+1, ...; one of either is shared by all of the other; equal lengths pair one to one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from splitbench.errors import UserError

MODES = ("lmcache", "nixl", "lmcache-mp", "round-robin")
FIRST_TOKENS = ("prefiller", "decoder")
POLICIES = ("round-robin", "least-loaded")


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where one engine listens; a decoder of mode `lmcache` also has one init and one alloc port per rank."""

    host: str
    port: int
    init_ports: tuple[int, ...] = ()
    alloc_ports: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """`host:port`, as in traces and messages."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Limits:
    """Longest waits in seconds and largest request body in bytes; reaching one is an error, never a hang."""

    connect_s: float = 10.0
    prefill_s: float = 600.0
    kv_s: float = 60.0
    answer_s: float = 1800.0
    stall_s: float = 120.0
    body_bytes: int = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Options:
    """Everything the proxy is told; `decoders` are the replicas in mode `round-robin`."""

    mode: str
    host: str = "127.0.0.1"
    port: int = 9100
    prefillers: tuple[EngineAddress, ...] = ()
    decoders: tuple[EngineAddress, ...] = ()
    notify_host: str = "127.0.0.1"
    notify_port: int = 7500
    first_token: str = "decoder"
    policy: str = "round-robin"
    limits: Limits = Limits()
    trace_file: Path | None = None


def pair(hosts: Sequence[str], ports: Sequence[int], count: int | None, what: str) -> list[tuple[str, int]]:
    """Pair hosts with ports by the rule of the module.

    Raises:
        UserError: lists that cannot pair, or a count that contradicts them; `what` is prefiller or decoder.
    """
    if len(hosts) == 1 and len(ports) == 1:
        pairs = [(hosts[0], ports[0] + step) for step in range(count or 1)]
    elif len(hosts) == 1:
        pairs = [(hosts[0], port) for port in ports]
    elif len(ports) == 1:
        pairs = [(host, ports[0]) for host in hosts]
    elif len(hosts) == len(ports):
        pairs = list(zip(hosts, ports, strict=True))
    else:
        raise UserError(
            f"{len(hosts)} hosts do not pair with {len(ports)} ports",
            where=f"--{what}-host, --{what}-port",
            mend="give one host, one port, or as many hosts as ports",
        )
    if count is not None and count != len(pairs):
        raise UserError(
            f"{count} asked, but hosts and ports name {len(pairs)}",
            where=f"--num-{what}s",
            mend=f"drop --num-{what}s or make the lists match it",
        )
    if len(set(pairs)) != len(pairs):
        raise UserError("the same address twice", where=f"--{what}-port", mend="name every engine once")
    for _, port in pairs:
        if not 0 < port < 65536:
            raise UserError(
                f"{port} is not a port", where=f"--{what}-port", mend="give ports from 1 to 65535"
            )
    return pairs


def rank_ports(
    text: str, addresses: Sequence[tuple[str, int]], stepped: bool, where: str
) -> list[tuple[int, ...]]:
    """Port lists, one entry per decoder rank, for every decoder.

    `;` separates lists given per decoder. A single list steps with decoders that are stepped themselves (one
    host, one port, a count). Else it serves every decoder where each has a host of its own, and where decoders
    share a host it is dealt out: first all ranks of the first decoder, then those of the next.

    Raises:
        UserError: a list count that is not the decoder count, or two decoders of one host on one port.
    """
    groups = [tuple(_integers(group, where)) for group in text.split(";")]
    count = len(addresses)
    if len(groups) == 1 and stepped:
        groups = [tuple(port + step for port in groups[0]) for step in range(count)]
    elif len(groups) == 1 and len({host for host, _ in addresses}) == count:
        groups *= count
    elif len(groups) == 1 and len(groups[0]) % count == 0:
        ranks = len(groups[0]) // count
        groups = [groups[0][start : start + ranks] for start in range(0, len(groups[0]), ranks)]
    if len(groups) != count:
        raise UserError(
            f"these ports do not serve {count} decoders",
            where=where,
            mend="give as many ports for each decoder as it has ranks",
        )
    seen: set[tuple[str, int]] = set()
    for (host, _), ports in zip(addresses, groups, strict=True):
        for port in ports:
            if (host, port) in seen or not 0 < port < 65536:
                raise UserError(
                    f"{host}:{port} is used by two ranks or is no port",
                    where=where,
                    mend="separate the decoders' lists by ';', e.g. 7300,7301;7302,7303",
                )
            seen.add((host, port))
    return groups


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """Read the command line.

    Raises:
        UserError: a contradiction between parameters, naming the parameter and its mend.
        SystemExit: `--help`, or text that argparse cannot read.
    """
    given = _parser().parse_args(argv)
    mode: str = given.mode
    if mode == "round-robin":
        for name in ("prefiller_host", "prefiller_port", "num_prefillers"):
            if getattr(given, name) is not None:
                raise UserError(
                    "replicas have no prefillers",
                    where=f"--{name.replace('_', '-')}",
                    mend="name the replicas by --decoder-host and --decoder-port",
                )
    first_token = given.first_token or ("prefiller" if mode == "lmcache" else "decoder")
    if first_token == "prefiller" and mode in ("nixl", "round-robin"):
        raise UserError(
            f"mode {mode} has every token from the decoder",
            where="--first-token",
            mend="use --first-token decoder",
        )
    prefillers: tuple[EngineAddress, ...] = ()
    if mode != "round-robin":
        prefillers = tuple(
            EngineAddress(host, port)
            for host, port in pair(
                _strings(given.prefiller_host or "localhost"),
                _integers(given.prefiller_port or "8100", "--prefiller-port"),
                given.num_prefillers,
                "prefiller",
            )
        )
    hosts = _strings(given.decoder_host or "localhost")
    ports = _integers(given.decoder_port or "8200", "--decoder-port")
    pairs = pair(hosts, ports, given.num_decoders, "decoder")
    if mode == "lmcache":
        stepped = len(hosts) == 1 and len(ports) == 1
        init = rank_ports(given.decoder_init_port or "8300", pairs, stepped, "--decoder-init-port")
        alloc = rank_ports(given.decoder_alloc_port or "8400", pairs, stepped, "--decoder-alloc-port")
        for (host, _), inits, allocs in zip(pairs, init, alloc, strict=True):
            if len(inits) != len(allocs):
                raise UserError(
                    f"decoder on {host} has {len(inits)} init and {len(allocs)} alloc ports",
                    where="--decoder-alloc-port",
                    mend="give one init and one alloc port per tensor-parallel rank",
                )
        decoders = tuple(
            EngineAddress(host, port, inits, allocs)
            for (host, port), inits, allocs in zip(pairs, init, alloc, strict=True)
        )
    else:
        for name in ("decoder_init_port", "decoder_alloc_port"):
            if getattr(given, name) is not None:
                raise UserError(
                    f"mode {mode} has no such port",
                    where=f"--{name.replace('_', '-')}",
                    mend="drop it, or use --mode lmcache",
                )
        decoders = tuple(EngineAddress(host, port) for host, port in pairs)
    for name in ("connect", "prefill", "kv", "answer", "stall"):
        if not getattr(given, f"{name}_timeout_s") > 0:
            raise UserError(
                "a limit must be above 0", where=f"--{name}-timeout-s", mend="give seconds, e.g. 60"
            )
    return Options(
        mode=mode,
        host=given.host,
        port=given.port,
        prefillers=prefillers,
        decoders=decoders,
        notify_host=given.proxy_host,
        notify_port=given.proxy_port,
        first_token=first_token,
        policy=given.policy,
        limits=Limits(
            connect_s=given.connect_timeout_s,
            prefill_s=given.prefill_timeout_s,
            kv_s=given.kv_timeout_s,
            answer_s=given.answer_timeout_s,
            stall_s=given.stall_timeout_s,
            body_bytes=given.max_body_mib * 2**20,
        ),
        trace_file=given.trace_file,
    )


def _strings(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _integers(text: str, where: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(
            f"'{text}' is not a comma list of ports", where=where, mend="e.g. 7300,7301"
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m splitbench.proxy",
        description="Front door of a layout: prefill-decode hand-over (LMCache or NIXL) or plain replicas.",
        epilog="Hosts and ports are comma lists; one of each and a count above 1 mean port, port+1, ...",
    )
    limits = Limits()
    add = parser.add_argument
    add(
        "--mode",
        choices=MODES,
        required=True,
        help="how KV moves; round-robin: the decoders are whole replicas",
    )
    add("--host", default="127.0.0.1", help="address to serve on (default 127.0.0.1)")
    add("--port", type=int, default=9100, help="port to serve on; 0 picks a free one (default 9100)")
    add("--prefiller-host", help="default localhost")
    add("--prefiller-port", help="default 8100")
    add("--num-prefillers", type=int, help="default: as many as the lists name")
    add("--decoder-host", help="default localhost")
    add("--decoder-port", help="default 8200; in mode round-robin the replicas")
    add("--num-decoders", type=int, help="default: as many as the lists name")
    add("--decoder-init-port", help="lmcache: one port per decoder rank (default 8300); ';' between decoders")
    add(
        "--decoder-alloc-port", help="lmcache: one port per decoder rank (default 8400); ';' between decoders"
    )
    add(
        "--proxy-host",
        default="127.0.0.1",
        help="lmcache: address of the KV notifications (default 127.0.0.1)",
    )
    add("--proxy-port", type=int, default=7500, help="lmcache: port of the KV notifications (default 7500)")
    add(
        "--first-token",
        choices=FIRST_TOKENS,
        help="who makes it; default: prefiller in mode lmcache, else decoder",
    )
    add(
        "--policy", choices=POLICIES, default="round-robin", help="choice among engines (default round-robin)"
    )
    add(
        "--connect-timeout-s", type=float, default=limits.connect_s, help="to open a connection (%(default)s)"
    )
    add(
        "--prefill-timeout-s",
        type=float,
        default=limits.prefill_s,
        help="for the prefill answer (%(default)s)",
    )
    add("--kv-timeout-s", type=float, default=limits.kv_s, help="prefill answer to KV complete (%(default)s)")
    add(
        "--answer-timeout-s",
        type=float,
        default=limits.answer_s,
        help="for the answer's first byte (%(default)s)",
    )
    add(
        "--stall-timeout-s", type=float, default=limits.stall_s, help="silence within an answer (%(default)s)"
    )
    add(
        "--max-body-mib",
        type=int,
        default=limits.body_bytes // 2**20,
        help="largest request body (%(default)s)",
    )
    add(
        "--trace-file",
        type=Path,
        help="append one JSON line per request: when each stage happened, and where",
    )
    return parser
