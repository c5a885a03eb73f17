"""`QuotaBook`: what each tenant has in the pool and may still write (kvstore 2.11).

Bytes are counted in KiB of stored data, parity included, when a put lease is given; a shared extent is
charged to its writer. A tenant over its cap loses its own oldest extents, never another's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond.core.errors import QuotaExceeded
from millpond.core.extents import TenantId
from millpond.core.units import KIB, SECOND_NS, ceil_div


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """Limits of one tenant; 0: none."""

    max_mib: int = 0
    """Stored bytes, parity included."""
    write_mib_s: float = 0.0
    """Write rate; bursts of ten seconds of it pass."""
    max_pinned_mib: int = 0
    """Bytes that pins may hold."""


BURST_S = 10
_KIB_PER_MIB = 1024


@dataclass(slots=True)
class _Account:
    quota: TenantQuota
    used_kib: int = 0
    reserved_kib: int = 0
    credit_kib: float = 0.0
    credited_ns: int = 0


@dataclass
class QuotaBook:
    """See module."""

    default: TenantQuota = field(default_factory=TenantQuota)
    _accounts: dict[TenantId, _Account] = field(default_factory=dict)

    def set_quota(self, tenant: TenantId, quota: TenantQuota) -> None:
        """Change a tenant's limits; what it has stays until it expires or makes room."""
        self._account(tenant).quota = quota

    def quota(self, tenant: TenantId) -> TenantQuota:
        """Limits of a tenant."""
        return self._account(tenant).quota

    def used_kib(self, tenant: TenantId) -> int:
        """Charged for extents that exist."""
        return self._account(tenant).used_kib

    def reserved_kib(self, tenant: TenantId) -> int:
        """Charged for put leases."""
        return self._account(tenant).reserved_kib

    def missing_kib(self, tenant: TenantId, num_kib: int) -> int:
        """How much the tenant is short of storing so much more."""
        account = self._account(tenant)
        if not account.quota.max_mib:
            return 0
        free = account.quota.max_mib * _KIB_PER_MIB - account.used_kib - account.reserved_kib
        return max(0, num_kib - free)

    def reserve(self, tenant: TenantId, num_kib: int, now_ns: int) -> None:
        """Charge a put lease.

        Raises:
            QuotaExceeded: Too many bytes, or too many per second.
        """
        account = self._account(tenant)
        if self.missing_kib(tenant, num_kib):
            raise QuotaExceeded(
                f"tenant {tenant} has {account.used_kib + account.reserved_kib} of "
                f"{account.quota.max_mib * _KIB_PER_MIB} KiB and asks for {num_kib} more",
                code="quota",
            )
        rate = account.quota.write_mib_s * _KIB_PER_MIB
        if rate:
            grown = account.credit_kib + rate * (now_ns - account.credited_ns) / SECOND_NS
            account.credit_kib, account.credited_ns = min(grown, rate * BURST_S), now_ns
            if account.credit_kib < num_kib:
                raise QuotaExceeded(
                    f"tenant {tenant} writes more than {account.quota.write_mib_s} MiB/s", code="quota"
                )
            account.credit_kib -= num_kib
        account.reserved_kib += num_kib

    def unreserve(self, tenant: TenantId, num_kib: int) -> None:
        """End a put lease, whatever became of it."""
        self._account(tenant).reserved_kib -= num_kib

    def add(self, tenant: TenantId, num_kib: int) -> None:
        """An extent exists."""
        self._account(tenant).used_kib += num_kib

    def remove(self, tenant: TenantId, num_kib: int) -> None:
        """An extent is gone."""
        self._account(tenant).used_kib -= num_kib

    def tenants(self) -> dict[TenantId, tuple[int, int]]:
        """Per tenant: KiB used, KiB reserved."""
        return {tenant: (a.used_kib, a.reserved_kib) for tenant, a in self._accounts.items()}

    def own(self) -> dict[int, TenantQuota]:
        """Limits of the tenants that have others than the default ones."""
        return {int(tenant): a.quota for tenant, a in self._accounts.items() if a.quota != self.default}

    def _account(self, tenant: TenantId) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            burst = self.default.write_mib_s * _KIB_PER_MIB * BURST_S
            account = self._accounts[tenant] = _Account(self.default, credit_kib=burst)
        return account


def stored_kib(num_bytes: int, k: int, m: int) -> int:
    """What is charged for `num_bytes` of blocks."""
    return ceil_div(num_bytes * (k + m), k * KIB)
