# SPDX-License-Identifier: Apache-2.0
"""The front door of a layout with several engines: our proxy in its modes, or the vLLM project's router."""

from __future__ import annotations

from collections.abc import Sequence

from splitbench.serving.plan import LOOPBACK, Connector, EnginePlan, FirstToken, ProxyPlan

TRACE_FILE = "proxy-trace.jsonl"


def round_robin(port: int, engines: Sequence[EnginePlan], *, trace: bool) -> ProxyPlan:
    """Replicas in turns."""
    return _proxy("round-robin", port, _side("decoder", engines), trace=trace)


def pd_proxy(
    connector: Connector,
    first_token: FirstToken,
    port: int,
    notify: int | None,
    engines: Sequence[EnginePlan],
    *,
    trace: bool,
) -> ProxyPlan:
    """Prefill, then decode, by the connector's protocol.

    Args:
        port: where clients come.
        notify: where LMCache's senders report, for connector lmcache.
        engines: prefill and decode engines; a decoder of LMCache has its init ports, then its alloc ports, as other
            ports.
    """
    prefill = [engine for engine in engines if engine.role == "prefill"]
    decode = [engine for engine in engines if engine.role == "decode"]
    arguments = _side("prefiller", prefill) + _side("decoder", decode)
    if connector == "nixl":
        return _proxy("nixl", port, arguments, trace=trace)
    if connector == "lmcache-mp":
        return _proxy("lmcache-mp", port, [*arguments, "--first-token", first_token], trace=trace)
    # The lists are flat, in the decoders' order: first all ranks of decoder 0, then those of decoder 1.
    inits = [number for engine in decode for number in engine.other_ports[: len(engine.other_ports) // 2]]
    allocs = [number for engine in decode for number in engine.other_ports[len(engine.other_ports) // 2 :]]
    arguments += [
        *("--decoder-init-port", ",".join(map(str, inits))),
        *("--decoder-alloc-port", ",".join(map(str, allocs))),
        *(
            "--proxy-host",
            LOOPBACK if engines[0].host == LOOPBACK else "{node0}",
            "--proxy-port",
            str(notify),
        ),
        *("--first-token", first_token),
    ]
    # The proxy's ear for senders; on loopback unless one is on another node.
    others = (notify,) if notify is not None else ()
    return _proxy("lmcache", port, arguments, other_ports=others, trace=trace)


def vllm_router(port: int, metrics_port: int, engines: Sequence[EnginePlan]) -> ProxyPlan:
    """The router of the vLLM project, from PyPI; benchmarks/proxy compares it with ours."""
    urls = [f"http://{engine.host}:{engine.port}" for engine in engines]
    if all(engine.role == "aggregated" for engine in engines):
        arguments = ["--worker-urls", *urls]
    else:
        arguments = ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        for engine, url in zip(engines, urls, strict=True):
            arguments += [f"--{engine.role}", url]
    return ProxyPlan(
        host=LOOPBACK,
        port=port,
        other_ports=(metrics_port,),
        argv=(
            *("{serving_python}", "-m", "vllm_router.launch_router", "--host", LOOPBACK, "--port", str(port)),
            *("--prometheus-host", LOOPBACK, "--prometheus-port", str(metrics_port)),
            # Its default refuses requests above a number in flight.
            *("--policy", "round_robin", "--max-concurrent-requests", "65536", "--log-level", "warning"),
            *arguments,
        ),
    )


def _side(flag: str, engines: Sequence[EnginePlan]) -> list[str]:
    return [
        *(f"--{flag}-host", ",".join(engine.host for engine in engines)),
        *(f"--{flag}-port", ",".join(str(engine.port) for engine in engines)),
        *(f"--num-{flag}s", str(len(engines))),
    ]


def _proxy(
    mode: str, port: int, arguments: list[str], other_ports: tuple[int, ...] = (), *, trace: bool
) -> ProxyPlan:
    traced = ("--trace-file", "{session}/" + TRACE_FILE) if trace else ()
    return ProxyPlan(
        host=LOOPBACK,
        port=port,
        other_ports=other_ports,
        argv=(
            *("{workflow_python}", "-m", "splitbench.proxy", "--mode", mode),
            *("--host", LOOPBACK, "--port", str(port), *arguments, *traced),
        ),
        env={"PYTHONPATH": "{repository}"},
    )
