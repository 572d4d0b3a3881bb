"""States on disk: ``save`` and ``open``.

A file holds what is live and nothing that depends on pools or page tables: of every stream its slots one
after the other, in stream order (row, KV head, list), of codes the scales of the pages they were written in,
and of rings the slots that were written. Its head says what it belongs to: the format's version, the
fingerprint of the model, the policy's structure and the policy itself, the names of its learned weights, the
dtype, and the sizes that decide what a slot is. The file is safetensors; it is written beside its name and
renamed when it is whole, so a file that was cut off was never there under its name, and one that was cut
off later is recognised by its length.

A state that lies across processes is a folder of such files, one of each device (``kvjax.saving._parts``).
"""

from kvjax.saving._head import FORMAT, VERSION, StateError
from kvjax.saving._read import Saved, open
from kvjax.saving._write import save

__all__ = ["FORMAT", "VERSION", "Saved", "StateError", "open", "save"]
