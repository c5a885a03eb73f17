"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file; `millpond config show` prints a full one.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "-s", help="Override one value, e.g. gateway.port=9000 or group.p0.ranks=2. Repeatable."
    ),
]
ServerUrl = Annotated[str, typer.Option("--url", help="Address of the service.")]
ApiKey = Annotated[str | None, typer.Option("--api-key", help="Key of a tenant, sent as a bearer token.")]
ModelName = Annotated[
    str | None, typer.Option("--model", "-m", help="Model name; default: the first one served.")
]

DEFAULT_URL = "http://127.0.0.1:8000"


def auth_headers(api_key: str | None) -> dict[str, str]:
    """Headers that carry a tenant's key."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}
