# SPDX-License-Identifier: Apache-2.0
"""What a launch plan is: pure data that says how a layout is brought up, the same on every machine.

Everything that differs between machines is a placeholder in argv and environment, filled at a session's start:

=====================  ==========================================================================
`{serving_python}`     interpreter of the serving environment (has vllm)
`{workflow_python}`    interpreter that runs the workflow (has splitbench)
`{repository}`         folder that holds the `splitbench` package
`{model}`              folder or hub name of the model
`{session}`            folder of the session: the plan's files are written there before anything starts
`{runtime}`            a folder with a short path, for sockets; there as long as the session is
`{node0}`, `{node1}`   addresses of the allocation's nodes, where a layout is spread over several; 0 is this one
=====================  ==========================================================================
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from splitbench.files import digest

Role = Literal["aggregated", "prefill", "decode"]
Kind = Literal["aggregated", "replicas", "pd"]
Connector = Literal["nixl", "lmcache", "lmcache-mp"]
FirstToken = Literal["prefiller", "decoder"]
Router = Literal["builtin", "vllm-router"]

LOOPBACK = "127.0.0.1"
MAX_NODES = 8
NODES = tuple(f"node{number}" for number in range(MAX_NODES))
PLACEHOLDERS = ("serving_python", "workflow_python", "repository", "model", "session", "runtime", *NODES)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Budget(_Frozen):
    """The accelerators (or, without any, CPU cores) that a layout occupies; arms are compared within one.

    `share` says how engines share a GPU where they do ("mps 50+50", "time-sliced"); the budget is the GPU all the same.
    """

    kind: Literal["cores", "gpus"]
    count: int = Field(ge=1)
    share: str | None = None

    def __str__(self) -> str:
        noun = {"cores": "core", "gpus": "GPU"}[self.kind]
        return f"{self.count} {noun}" + ("s" if self.count != 1 else "")


class ServicePlan(_Frozen):
    """A process that engines need and that is no engine: started before them, ended with the session.

    It is ready when its `health_port` answers `health_path` with 200, or when `ready_file` is there.
    """

    name: str
    host: str = "127.0.0.1"
    ports: tuple[int, ...] = ()
    argv: tuple[str, ...]
    env: dict[str, str] = Field(default_factory=dict)
    health_port: int | None = None
    health_path: str = "/health"
    ready_file: str | None = None
    startup_limit_s: float = Field(default=300.0, gt=0)


class EnginePlan(_Frozen):
    """One vLLM server process group: what to start, where, and how to know that it is ready.

    `node` counts the allocation's nodes; on another one than 0 `argv` starts it there and stands for it here.
    `port` serves HTTP on `host`; the engine binds `other_ports` too (NIXL side channel, LMCache init and
    alloc) and must be free before the start and after the stop.
    """

    name: str
    role: Role
    node: int = 0
    devices: tuple[int, ...]
    host: str = "127.0.0.1"
    port: int
    other_ports: tuple[int, ...] = ()
    argv: tuple[str, ...]
    env: dict[str, str] = Field(default_factory=dict)
    startup_limit_s: float = Field(default=900.0, gt=0)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Node and index of every device."""
        return [(self.node, device) for device in self.devices]

    @model_serializer(mode="wrap")
    def _without_the_only_node(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A plan on one node is written as it was before there were others.
        content: dict[str, Any] = handler(self)
        if not content.get("node"):
            content.pop("node", None)
        return content


class ProxyPlan(_Frozen):
    """The layout's front door where there is more than one engine."""

    host: str = "127.0.0.1"
    port: int
    other_ports: tuple[int, ...] = ()
    argv: tuple[str, ...]
    env: dict[str, str] = Field(default_factory=dict)
    startup_limit_s: float = Field(default=60.0, gt=0)


class Plan(_Frozen):
    """The deterministic launch plan of a layout."""

    layout: str
    kind: Kind
    connector: Connector | None = None
    first_token: FirstToken | None = None
    budget: Budget
    served_model: str
    services: tuple[ServicePlan, ...] = ()
    engines: tuple[EnginePlan, ...] = Field(min_length=1)
    proxy: ProxyPlan | None = None
    files: dict[str, str] = Field(default_factory=dict)
    shutdown_grace_s: float = Field(default=20.0, gt=0)

    @property
    def front_host(self) -> str:
        """Host that clients send requests to."""
        return (self.proxy or self.engines[0]).host

    @property
    def front_port(self) -> int:
        """Port that clients send requests to."""
        return (self.proxy or self.engines[0]).port

    @property
    def nodes(self) -> int:
        """How many nodes it wants."""
        return 1 + max(engine.node for engine in self.engines)

    @property
    def ports(self) -> tuple[int, ...]:
        """Every port that the session binds, in the order of the plan."""
        parts: list[EnginePlan | ProxyPlan] = [*self.engines, *([self.proxy] if self.proxy else [])]
        of_services = (port for service in self.services for port in service.ports)
        return (*of_services, *(port for part in parts for port in (part.port, *part.other_ports)))

    @property
    def digest(self) -> str:
        """sha256 over all that is started; the layout's name is a label and limits only end a wait: neither counts."""
        labels: dict[str, Any] = {
            "layout": True,
            "shutdown_grace_s": True,
            "services": {"__all__": {"startup_limit_s"}},
            "engines": {"__all__": {"startup_limit_s"}},
            "proxy": {"startup_limit_s"},
        }
        content = self.model_dump(mode="json", exclude=labels)
        # Fields that came later stay out where they say nothing: a plan without them is what it was before.
        if not self.services:
            del content["services"]
        if self.budget.share is None:
            del content["budget"]["share"]
        # Says at which level UCX logs, once per connection: it changes what is known of a result, not the result.
        for engine in content["engines"]:
            engine["env"].pop("UCX_LOG_LEVEL", None)
        return digest(content)


def fill(text: str, values: dict[str, str]) -> str:
    """Replace the known placeholders and nothing else (JSON in an argument keeps its braces).

    Raises:
        KeyError: a placeholder has no value.
    """
    for name in PLACEHOLDERS:
        marker = "{" + name + "}"
        if marker in text:
            text = text.replace(marker, values[name])
    return text


def filled(plan: Plan, values: dict[str, str]) -> dict[str, Any]:
    """The plan with every placeholder replaced, as plain data for the supervisor."""

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return fill(value, values)
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item) for item in value]
        return value

    return dict(walk(plan.model_dump(mode="json")))
