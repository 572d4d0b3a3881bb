"""States on disk: ``save`` and ``open``.

A file holds what is live and nothing that depends on pools or page tables: the slots of every per-head cache
one after the other, in the order (row, KV head, list), the scales of the pages of codes, and the written
slots of rings. Its head names what it belongs to: the format's version, the fingerprint of the model, the
policy and its structure, the names of its learned weights, the dtype, and the sizes of slots. The file is
safetensors. It is written under another name and renamed when it is complete; a file that was cut off or
damaged later is recognised by a digest of head, shapes and arrays. Every size in it is checked against the
model before anything is made of that size (``kvjax.saving._sizes``).

A state across processes is a folder of such files, one for each device (``kvjax.saving._device_parts``).

Why: kvjax/DESIGN.md, 15.
"""

from kvjax.saving._format import FORMAT, VERSION, StateError
from kvjax.saving._read import Saved, open
from kvjax.saving._write import save

__all__ = ["FORMAT", "VERSION", "Saved", "StateError", "open", "save"]
