"""`KvNames`: under which names the KV of a request is looked up and kept (interfaces A.1, docs/adr/0009)."""

from __future__ import annotations

from pathlib import Path

from millpond.config.sections import Config
from millpond.core.extents import window_blocks
from millpond.core.hashing import ExtraKey, ExtraKind, chain_digest, root_digest
from millpond.core.kv_layout import KvLayout
from millpond.core.request import KvIdentity, StateRestore, token_ids
from millpond.engine.kv_identity import WeightDigests, configured_fingerprint, configured_layout
from millpond.serve.gateway.tenants import Tenant


class KvNames:
    """Makes the identity of a request's KV.

    Args:
        model_fingerprint: Of the served model.
        layout: Of its blocks.
    """

    def __init__(self, model_fingerprint: bytes, layout: KvLayout) -> None:
        self._model_fingerprint = model_fingerprint
        self._layout_fingerprint = layout.fingerprint
        self._has_state = bool(layout.state)
        self.window = window_blocks(layout)
        """Blocks of a full extent."""

    def identity(self, tenant: Tenant, cache_salt: str, restore: StateRestore) -> KvIdentity:
        """Identity of a request's KV.

        Guarantees:
            Two tenants never share a root, whatever `cache_salt` they send. Neither do requests that want
            exact results with those that put up with bounded replays, if the model has window state.
        """
        root = root_digest(
            self._model_fingerprint, self._layout_fingerprint, tenant.salt, cache_salt.encode()
        )
        if self._has_state and restore is StateRestore.REPLAY:
            root = chain_digest(root, token_ids(), [ExtraKey(ExtraKind.APPROXIMATE, 0, b"")])
        return KvIdentity(root, tenant.number)


def load_kv_names(config: Config) -> KvNames:
    """Names of the configured model's KV. Reads its weights if the state folder does not know their digests.

    Raises:
        UnknownModel: There is no such model.
        ModelFormatError: Its files cannot be used.
    """
    digests = WeightDigests(Path(config.supervise.state_dir))
    fingerprint = configured_fingerprint(config.engine, digests)
    return KvNames(fingerprint, configured_layout(config.engine, config.synthetic))
