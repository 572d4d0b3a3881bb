"""Writes what ``torch.save`` writes, without torch: files for the reader of torch files to read."""

from __future__ import annotations

import dataclasses
import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True)
class Storage:
    """Stands for a storage while a pickle is written."""

    key: str
    kind: type
    count: int


def stand_in(module: str, name: str) -> type:
    """A class that pickles as ``module.name``; whatever it is called with becomes the call in the pickle."""
    return type(name, (), {"__module__": module, "__qualname__": name})


class Call:
    """Pickles as a call of ``function`` with ``arguments``."""

    def __init__(self, function: type, *arguments: object) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple:
        return self.function, self.arguments


class Pickler(pickle._Pickler):  # the one in Python: it lets a stand-in go under another module's name
    """Writes storages as torch does, and stand-ins by name alone."""

    def persistent_id(self, value: object) -> tuple | None:
        return ("storage", value.kind, value.key, "cpu", value.count) if isinstance(value, Storage) else None

    def save_global(self, value: type, name: str | None = None) -> None:
        self.write(b"c" + f"{value.__module__}\n{value.__qualname__}\n".encode())
        self.memoize(value)


TENSOR, PARAMETER = (
    stand_in("torch._utils", "_rebuild_tensor_v2"),
    stand_in("torch._utils", "_rebuild_parameter"),
)
FLOAT, BFLOAT = stand_in("torch", "FloatStorage"), stand_in("torch", "BFloat16Storage")


def write_torch(file: Path, arrays: dict[str, np.ndarray], lost: int = 0, **changes: object) -> Path:
    """What ``torch.save({name: Parameter})`` writes: pickle protocol 2 and one storage an array.

    ``lost`` bytes are missing at the end of every storage.
    """
    saved: dict[str, object] = {}
    for key, (name, x) in enumerate(arrays.items()):
        kind = BFLOAT if x.dtype == ml_dtypes.bfloat16 else FLOAT
        stride = tuple(s // x.itemsize for s in x.strides)
        tensor = Call(TENSOR, Storage(str(key), kind, x.size), 0, x.shape, stride, False, OrderedDict())
        saved[name] = Call(PARAMETER, tensor, True, OrderedDict())
    content = io.BytesIO()
    Pickler(content, 2).dump(saved | changes)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{file.stem}/data.pkl", content.getvalue())
        archive.writestr(f"{file.stem}/byteorder", "little")
        for key, x in enumerate(arrays.values()):
            archive.writestr(f"{file.stem}/data/{key}", x.tobytes()[: x.nbytes - lost])
    return file


def published(layers: int = 2, heads: int = 2, dim: int = 8, hidden: int = 12, norms: bool = True) -> dict:
    """Random gates under the authors' names."""
    random, tensors = np.random.default_rng(0), {}
    shapes = {
        "conv1.weight": (heads * hidden, 2 * dim, 1),
        "conv1.bias": (heads * hidden,),
        "conv2.weight": (heads, hidden, 1),
        "conv2.bias": (heads,),
    }
    shapes |= {"pre_key_norm.weight": (dim,), "post_key_norm.weight": (dim,)} if norms else {}
    for layer in range(layers):
        for name, shape in shapes.items():
            x = random.standard_normal(shape).astype(np.float32)
            tensors[f"model.layers.{layer}.self_attn.g_predictors.{name}"] = x
    return tensors
