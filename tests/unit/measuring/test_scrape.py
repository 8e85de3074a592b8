# SPDX-License-Identifier: Apache-2.0
"""What servers are asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from splitbench.measuring.scrape import GAUGES, metrics_of
from splitbench.serving.session import Server

PAGE = {"vllm:num_requests_running": 3.0, "vllm:prompt_tokens_total": 9.0, "python_gc_objects": 1.0}


@pytest.fixture
def engine() -> Iterator[Server]:
    """As a Prometheus client's page: asked by name, it renders nothing else."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            names = parse_qs(urlsplit(self.path).query).get("name[]", list(PAGE))
            body = "".join(f"{name} {PAGE[name]}\n" for name in PAGE if name in names).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Server("prefill-0", "prefill", f"http://127.0.0.1:{server.server_port}", 1, Path("log"))
    server.shutdown()
    server.server_close()


def test_counters_before_and_after_are_the_whole_page(engine: Server) -> None:
    assert metrics_of(engine) == {"vllm:num_requests_running": 3.0, "vllm:prompt_tokens_total": 9.0}


def test_while_a_cell_runs_only_gauges_are_rendered(engine: Server) -> None:
    assert metrics_of(engine, GAUGES) == {"vllm:num_requests_running": 3.0}
