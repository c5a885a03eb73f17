"""Who is calling: API keys, service class, salt.

Without configured tenants everybody is the one open tenant, no key needed. The salt of a tenant is
made once and kept in the state folder, so that its stored KV survives a restart and stays its own.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from millpond.config.gateway_params import TenantParams
from millpond.core.errors import ConfigError, Forbidden, InvalidRequest, Unauthorized
from millpond.core.request import SloClass

SALT_BYTES = 32
SALT_FILE = "tenant_salts.json"
OPEN_TENANT = "open"

_RANK = {SloClass.GOLD: 0, SloClass.SILVER: 1, SloClass.BRONZE: 2}
_TIERS = {"priority": SloClass.GOLD, "flex": SloClass.BRONZE} | {slo.value: slo for slo in SloClass}


@dataclass(frozen=True, slots=True)
class Tenant:
    """One caller."""

    params: TenantParams
    salt: bytes
    is_open: bool = False

    @property
    def name(self) -> str:
        """Name in metrics and logs."""
        return self.params.name

    @property
    def number(self) -> int:
        """Number of the tenant in the pool, u32: what it stores is charged to it.

        Two tenants may have one number by chance; their KV is told apart by their salts all the same.
        """
        return int.from_bytes(hashlib.sha256(self.salt).digest()[:4], "little")

    def pick_slo(self, service_tier: str | None) -> SloClass:
        """Class of a request: the tenant's own unless it asks for a lower one.

        Raises:
            InvalidRequest: Unknown tier.
            Forbidden: A better class than the tenant's.
        """
        if service_tier in (None, "auto", "default"):
            return self.params.slo
        slo = _TIERS.get(service_tier)
        if slo is None:
            known = ", ".join(["auto", "default", *_TIERS])
            raise InvalidRequest(
                f"`service_tier` is {json.dumps(service_tier)[:80]}: give one of {known}",
                code="invalid_value",
                param="service_tier",
            )
        if not self.is_open and _RANK[slo] < _RANK[self.params.slo]:
            raise Forbidden(
                f"`service_tier` {service_tier}: this key's class is {self.params.slo}",
                code="service_tier_not_allowed",
                param="service_tier",
            )
        return slo

    def check_priority(self, priority: int) -> None:
        """Refuse a priority that would overtake other tenants.

        Raises:
            Forbidden: Negative, from a keyed tenant.
        """
        if priority < 0 and not self.is_open:
            raise Forbidden(
                f"`priority` is {priority}: a key may only lower its requests; give 0 or more",
                code="priority_not_allowed",
                param="priority",
            )


class Tenants:
    """All tenants, found by key.

    Args:
        params: From the config; empty for the one open tenant.
        salts: Salt by tenant name, see `load_salts`.

    Raises:
        ConfigError: Two tenants share a name or a key, or a hash is not one.
    """

    def __init__(self, params: Iterable[TenantParams], salts: Mapping[str, bytes]) -> None:
        self._by_hash: dict[str, Tenant] = {}
        self._open: Tenant | None = None
        names: set[str] = set()
        for each in params:
            if each.name in names:
                raise ConfigError(f"two tenants are named {each.name}: rename one", param="tenant.name")
            names.add(each.name)
            tenant = Tenant(each, salts[each.name])
            for key_hash in each.key_hashes:
                digest = key_hash.lower()
                if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
                    raise ConfigError(
                        f"a key hash of tenant {each.name} is not a SHA-256 in hex", param="tenant.key_hashes"
                    )
                if digest in self._by_hash:
                    raise ConfigError(
                        f"tenant {each.name} and {self._by_hash[digest].name} share a key",
                        param="tenant.key_hashes",
                    )
                self._by_hash[digest] = tenant
        if not names:
            self._open = Tenant(TenantParams(OPEN_TENANT, ()), salts[OPEN_TENANT], is_open=True)

    @property
    def is_open(self) -> bool:
        """Anybody may call, without a key."""
        return self._open is not None

    def authenticate(self, authorization: str | None) -> Tenant:
        """Find the caller.

        Args:
            authorization: Value of the Authorization header.

        Raises:
            Unauthorized: No key, or an unknown one.
            Forbidden: The tenant is switched off.
        """
        if self._open is not None:
            return self._open
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized("no API key: send it as `Authorization: Bearer KEY`", code="missing_api_key")
        digest = hashlib.sha256(key.strip().encode()).hexdigest()
        found: Tenant | None = None
        for known, tenant in self._by_hash.items():
            # No early exit: the time must not tell how far a guess got.
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise Unauthorized("the API key is not known here", code="invalid_api_key")
        if not found.params.is_enabled:
            raise Forbidden("this API key is switched off", code="api_key_disabled")
        return found


def load_salts(state_dir: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Read the salts of all tenants; make and keep the missing ones.

    Args:
        state_dir: Folder that outlives the service; made with mode 700 if missing.
        names: Tenants that need a salt.

    Raises:
        ConfigError: The file is damaged. A new salt would silently orphan what is stored.
    """
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = state_dir / SALT_FILE
    salts: dict[str, bytes] = {}
    if path.exists():
        try:
            salts = {str(name): bytes.fromhex(text) for name, text in json.loads(path.read_text()).items()}
        except (ValueError, AttributeError, TypeError) as error:
            raise ConfigError(f"{path} is damaged: {error}; restore or remove it") from error
    missing = [name for name in names if name not in salts]
    if missing:
        salts |= {name: secrets.token_bytes(SALT_BYTES) for name in missing}
        draft = path.with_suffix(".new")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump({name: salt.hex() for name, salt in salts.items()}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    return salts
