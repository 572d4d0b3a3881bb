"""Tensors out of a file that ``torch.save`` wrote, without torch and without running what it holds.

Such a file is a zip archive:

  <name>/data.pkl     a pickle of the saved object; tensors in it refer to storages
  <name>/data/<key>   the bytes of one storage, uncompressed
  <name>/byteorder    "little" or "big"; little where absent

A pickle may name anything importable and call it. The reader below resolves a dozen names of torch's own
tensor pickling to functions of this file and refuses every other one, so that nothing else can run.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvjax.errors import UserError

_TYPES: dict[str, np.dtype] = {
    "FloatStorage": np.dtype(np.float32),
    "DoubleStorage": np.dtype(np.float64),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(bool),
}


_TRIPS = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    OverflowError,
    MemoryError,
)
"""What a broken stream makes an unpickler raise."""


class TorchFileError(UserError):
    """A file without tensors that this module can read."""


@dataclasses.dataclass(frozen=True)
class _Kind:
    """The element type a pickle means by ``torch.FloatStorage`` and its kin."""

    dtype: np.dtype


def read_tensors(file: str | Path) -> dict[str, np.ndarray]:
    """The tensors of a saved dict, such as a ``state_dict``, by name.

    Args:
      file: written by ``torch.save`` in its zip form (the default since torch 1.6).

    Raises:
      TorchFileError: no such file, another format, something in it that is not a tensor.
    """
    tensors = read_saved(file)
    if not isinstance(tensors, dict) or not all(isinstance(x, np.ndarray) for x in tensors.values()):
        raise TorchFileError(f"{file} is not a dict of tensors. Save a state_dict, or a dict like it.")
    return {str(name): value for name, value in tensors.items()}


def read_saved(file: str | Path, *, beside: bool = False) -> Any:
    """The saved object, tensors in it as arrays.

    Args:
      file: as in ``read_tensors``.
      beside: NumPy arrays may stand beside the tensors; they are not read, and appear as ``Unread``.

    Raises:
      TorchFileError: no such file, another format, something in it that is neither.
    """
    file = Path(file)
    try:
        with zipfile.ZipFile(file) as archive:
            return _Reader(archive, file, beside).load()
    except OSError as error:
        raise TorchFileError(f"{file} cannot be read ({error.strerror or error}). Check the path.") from error
    except zipfile.BadZipFile as error:
        raise TorchFileError(
            f"{file} is not a whole zip archive, which torch.save writes since torch 1.6. Download it again, "
            "or save it with a newer torch."
        ) from error


class Unread:
    """Stands for a NumPy array that a pickle holds, and for whatever it is made of."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


_OF_ARRAYS = (
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
)
"""Names by which NumPy pickles an array."""


class _Reader(pickle.Unpickler):
    """An unpickler to which only tensors, dicts and plain values exist."""

    def __init__(self, archive: zipfile.ZipFile, file: Path, beside: bool) -> None:
        self._beside = beside
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(names) != 1:
            raise TorchFileError(
                f"{file} is a zip archive without one data.pkl: torch.save did not write it."
            )
        self._archive, self._file = archive, file
        self._home = names[0].removesuffix("data.pkl")
        order = self._home + "byteorder"
        if order in archive.namelist() and archive.read(order).strip() != b"little":
            raise TorchFileError(f"{file} was written on a big-endian machine. Save it again on another one.")
        self._storages: dict[str, np.ndarray] = {}
        super().__init__(io.BytesIO(archive.read(names[0])))

    def load(self) -> Any:
        """The saved object, tensors as arrays.

        Raises:
          TorchFileError: a damaged pickle.
        """
        try:
            return super().load()
        except TorchFileError:
            raise
        except _TRIPS as error:
            raise TorchFileError(
                f"{self._file}: its pickle is damaged ({type(error).__name__}: {error}). Download it again."
            ) from error

    def find_class(self, module: str, name: str) -> Any:
        """The few names a pickled tensor needs; everything else is refused."""
        if module in ("torch", "torch.storage") and name in _TYPES:
            return _Kind(_TYPES[name])
        if self._beside and (module, name) in _OF_ARRAYS:
            return Unread
        known = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_parameter"): _parameter,
        }
        if (module, name) not in known:
            raise TorchFileError(
                f"{self._file} names {module}.{name}, which is not part of a plain tensor, and is not run. "
                "Save a dict of tensors."
            )
        return known[module, name]

    def persistent_load(self, pid: Any) -> np.ndarray:
        """A storage: ("storage", type, key, device, number of elements)."""
        _, kind, key, _, count = pid
        if key not in self._storages:
            content = self._archive.read(f"{self._home}data/{key}")
            if len(content) < count * kind.dtype.itemsize:
                raise TorchFileError(f"{self._file}: storage {key} is cut short. Download it again.")
            self._storages[key] = np.frombuffer(content, kind.dtype, count)
        return self._storages[key]


def _tensor(
    storage: np.ndarray, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> np.ndarray:
    """A tensor is a view of its storage; strides count elements."""
    last = offset + sum((n - 1) * step for n, step in zip(size, stride))
    if 0 not in size and not (offset >= 0 and min(stride, default=0) >= 0 and last < len(storage)):
        raise TorchFileError(f"a tensor of size {size} reaches beyond its storage. Download the file again.")
    steps = [step * storage.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(storage[offset:], size, steps).copy()


def _parameter(data: np.ndarray, *_: Any) -> np.ndarray:
    """``torch.nn.Parameter``: the tensor in it."""
    return data
