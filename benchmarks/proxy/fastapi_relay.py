# SPDX-License-Identifier: Apache-2.0
"""A relay in the shape of the public example proxies (FastAPI in front, httpx behind), to compare with.

ENGINE=http://127.0.0.1:9001 uvicorn fastapi_relay:app --port 9002
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=os.environ["ENGINE"], timeout=None, limits=limits) as client:
        app.state.client = client
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@app.post("/v1/completions")
async def completions(request: Request) -> StreamingResponse:
    body = await request.json()

    async def stream() -> AsyncIterator[bytes]:
        async with app.state.client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for chunk in response.aiter_bytes():
                yield chunk

    return StreamingResponse(stream(), media_type="text/event-stream")
