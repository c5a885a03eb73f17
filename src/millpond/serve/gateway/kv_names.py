"""`KvNames`: under which names the KV of a request is looked up and kept (interfaces A.1, docs/adr/0009)."""

from __future__ import annotations

from millpond.config.sections import Config
from millpond.core.extents import window_blocks
from millpond.core.hashing import ExtraKey, ExtraKind, chain_digest, root_digest
from millpond.core.kv_layout import KvLayout
from millpond.core.request import KvIdentity, StateRestore, token_ids
from millpond.engine.kv_identity import configured_layout
from millpond.serve.gateway.tenants import Tenant
from millpond.serve.run_folder import RunFolder


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


def load_kv_names(config: Config, folder: RunFolder) -> KvNames:
    """Names of the KV of the model with which the service started; its engines make sure that they have it.

    Raises:
        UnknownModel: There is no such model any more.
        ModelFormatError: Its config cannot be used.
    """
    return KvNames(folder.load_fingerprint(), configured_layout(config.engine, config.synthetic))
