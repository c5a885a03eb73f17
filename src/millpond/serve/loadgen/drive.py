"""Sends a list of requests in an open or a closed loop and collects their records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from millpond.serve.loadgen.client import RequestRecord, StreamClient
from millpond.serve.loadgen.inputs import LoadRequest

OnDone = Callable[[RequestRecord], None]


async def run_closed_loop(
    client: StreamClient, requests: Sequence[LoadRequest], concurrency: int, on_done: OnDone
) -> list[RequestRecord]:
    """Keep `concurrency` requests running until all were sent; returns the records by index."""
    pending = iter(enumerate(requests))
    records: list[RequestRecord] = []

    async def user() -> None:
        for index, request in pending:
            record = await client.send(index, request)
            records.append(record)
            on_done(record)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(user())
    return sorted(records, key=lambda record: record.index)


async def run_open_loop(
    client: StreamClient, requests: Sequence[LoadRequest], times_ns: Sequence[int], on_done: OnDone
) -> list[RequestRecord]:
    """Send request i at `times_ns[i]`, whatever happened to the others; returns the records by index."""
    records: list[RequestRecord] = []

    async def send_at(index: int, request: LoadRequest, at_ns: int) -> None:
        await asyncio.sleep(max(0, at_ns - client.now_ns()) / 1e9)
        record = await client.send(index, request)
        records.append(record)
        on_done(record)

    async with asyncio.TaskGroup() as group:
        for index, (request, at_ns) in enumerate(zip(requests, times_ns, strict=True)):
            group.create_task(send_at(index, request, at_ns))
    return sorted(records, key=lambda record: record.index)
