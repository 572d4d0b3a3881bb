"""The managed KV state: a ring of recent tokens, ragged pages for the rest, a φ summary.

``ring`` holds the last W tokens of each row, ``pages`` what outlived the window (one length per KV head),
``per_head`` numbers a KV head's slots through, ``pool`` says how many pages there are, ``state`` is all
layers together. Everything is a frozen pytree: updated by returning a new one, and donated to jit, so that
the update happens in place.
"""

from kvjax.cache.pages import Pages
from kvjax.cache.ring import Entry, Ring
from kvjax.cache.state import KVState, LayerCache

__all__ = ["Entry", "KVState", "LayerCache", "Pages", "Ring"]
