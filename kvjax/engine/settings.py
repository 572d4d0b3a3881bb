"""Sizes of the engine, checked, and what memory the device has left."""

from __future__ import annotations

import dataclasses
import os

import jax

from kvjax.decode import CHUNK, LONG_PAGE, RequestError
from kvjax.sharding.mesh import ONE, Mesh, mesh_of
from kvjax.sharding.specs import DATA
from kvjax.types import Weighted

NOTE_AFTER = 0.5
"""Seconds of compilation or of a pause from which on the operator gets a line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Sizes, as ``Engine`` takes them and explains them, all known."""

    kv_memory: int
    max_rows: int
    max_lanes: int
    context: int
    chunk: int
    segment: int
    prefill_tokens: int
    page: int | None
    share: float | None = None
    share_pages: bool = False
    max_contexts: int = 64
    contexts_share: float = 0.5
    contexts_ttl: float | None = None
    host_memory: int = 0

    @staticmethod
    def checked(
        model: Weighted,
        *,
        kv_memory: int | None,
        context: int | None,
        page: int | None,
        share: float | None,
        share_pages: bool | None,
        contexts_share: float = 0.5,
        contexts_ttl: float | None = None,
        host_memory: int = 0,
        **sizes: int,
    ) -> EngineSettings:
        """The arguments of ``Engine``, checked, with defaults filled in.

        Raises:
          RequestError: a number out of range, or a model on a mesh that no engine runs on.
        """
        mesh = mesh_of(model.params)
        check_mesh("Engine(model=...)", mesh)
        if mesh != ONE and share_pages:
            raise RequestError(
                f"Engine(share_pages=True) is for one device, and the model lies on {mesh}. Leave it out."
            )
        for name, value in {"kv_memory": kv_memory, "page": page, **sizes}.items():
            if value is None and name not in sizes:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RequestError(f"Engine({name}={value!r}) is not a size. Give a whole number, 1 or more.")
        if share is not None and not 0 <= share <= 1:
            raise RequestError(f"Engine(share={share}) is out of range. Give a number from 0 to 1, or None.")
        if not 0 <= contexts_share <= 1:
            raise RequestError(
                f"Engine(contexts_share={contexts_share}) is out of range. Give a number from 0 to 1."
            )
        if isinstance(host_memory, bool) or not isinstance(host_memory, int) or host_memory < 0:
            raise RequestError(
                f"Engine(host_memory={host_memory!r}) is not a size. Give a whole number, 0 or more."
            )
        if host_memory and mesh != ONE:
            raise RequestError(
                f"Engine(host_memory={host_memory}) is for one device, and the model lies on {mesh}. "
                "Leave it out."
            )
        if contexts_ttl is not None and not contexts_ttl > 0:
            raise RequestError(
                f"Engine(contexts_ttl={contexts_ttl}) is out of range. Give seconds above 0, or None."
            )
        most = model.network.max_positions
        context = most if context is None else context
        if not 2 <= context <= most:
            raise RequestError(
                f"Engine(context={context}) is out of range: the model was trained for {most} positions. "
                f"Give a number from 2 to {most}."
            )
        for name, value, default in (("chunk", sizes["chunk"], CHUNK), ("page", page, LONG_PAGE)):
            if value is not None and value > max(most, default):
                raise RequestError(
                    f"Engine({name}={value}) is out of range: the model was trained for {most} positions. "
                    f"Give at most {max(most, default)}."
                )
        if share_pages is None:
            share_pages = jax.default_backend() != "cpu" and mesh == ONE
        return EngineSettings(
            kv_memory=_free_bytes(mesh.pools) if kv_memory is None else kv_memory,
            context=context,
            page=page,
            share=share,
            share_pages=share_pages,
            contexts_share=contexts_share,
            contexts_ttl=contexts_ttl,
            host_memory=host_memory,
            **sizes,
        )


def check_mesh(call: str, mesh: Mesh) -> None:
    """Refuses devices that no engine runs on; of a mesh its sizes are enough.

    Raises:
      RequestError: a mesh that cuts rows, or lies over several processes.
    """
    if mesh.across:
        raise RequestError(
            f"{call} takes rows one by one, in one process, and {mesh} lies over several. Give it the "
            "devices of one process; kvjax.generate runs over all."
        )
    if mesh.size(DATA) > 1:
        raise RequestError(
            f"{call} takes rows one by one, and {mesh} cuts rows along data. Give all devices to tensor and "
            "context, or run an engine on each group of them."
        )


def _free_bytes(devices: int) -> int:
    """Nine tenths of the bytes that so many devices have left, by the first of them."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(0.9 * devices * (stats["bytes_limit"] - stats["bytes_in_use"]))
    return int(0.9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
