"""One file of a saved state: its head, which is checked before anything else is read, then its arrays.

The file is safetensors: eight bytes with the length of a JSON header, the header, the arrays. The header's
metadata are ``head`` (what the state belongs to), ``shapes`` (dtype and shape of each array, which is stored
as bytes: safetensors has no word for some dtypes), ``content`` (SHA-256 of each array) and ``digest`` (of
these three). Up to version 4 ``content`` is one for all arrays; in versions 1 and 2 it is called ``digest``.

Arrays of a multiple of 64 bytes come first and begin at one, so jax can read them where a file is mapped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.saving._format import FORMAT, VERSION, DamagedError, StateError

LONGEST = 2**26
"""Most bytes of a header."""

MOST_AXES = 32
"""Of an array."""

ALIGNED = 64
"""Bytes: where an array begins that jax reads without a copy."""

EACH = 5
"""From this version on every array has a digest of its own."""

Shape = tuple[np.dtype[Any], tuple[int, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateFile:
    """A file whose head was read and whose arrays were not.

    Attributes:
      call: for errors.
      path: of the file.
      head: as ``save`` wrote it; of its values only format and version are checked.
      shapes: dtype and shape of each array; together they are as long as the file.
      begins: where in the file each array begins.
      content: digests of the arrays, or of all of them in one.
      digest: files of equal head and content have equal ones.
    """

    call: str
    path: Path
    head: dict[str, Any]
    shapes: dict[str, Shape]
    begins: dict[str, int]
    content: str
    digest: str

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return sum(map(self.size, self.shapes))

    def size(self, name: str) -> int:
        """Bytes of an array."""
        dtype, shape = self.shapes[name]
        return math.prod(shape) * dtype.itemsize

    def arrays(self, mapped: Collection[str] = ()) -> dict[str, np.ndarray]:
        """The arrays, each read once; those to be ``mapped`` are not read, and not checked.

        Raises:
          StateError: they are not what was written.
        """
        arrays = {}
        try:
            with self.path.open("rb") as file:
                for name, (dtype, shape) in self.shapes.items():
                    begin, size = self.begins[name], self.size(name)
                    raw: np.ndarray
                    if name in mapped:
                        raw = np.memmap(file, np.uint8, "r", begin, size)
                    else:
                        raw = np.empty(size, np.uint8)
                        file.seek(begin)
                        if file.readinto(raw) != size:  # type: ignore[arg-type]
                            raise DamagedError(self.call, "it ended early")
                    arrays[name] = raw.view(dtype).reshape(shape)
        except OSError as error:
            raise unreadable(self.call, error) from error
        if not self._sound({name: x for name, x in arrays.items() if name not in mapped}):
            raise DamagedError(self.call, "its content is not what was written")
        return arrays

    def _sound(self, arrays: Mapping[str, np.ndarray]) -> bool:
        raw = {name: as_bytes(value) for name, value in arrays.items()}
        if self.head["version"] < EACH:
            return content_of(raw) == self.content
        right = json.loads(self.content)
        return all(right.get(name) == sha(x) for name, x in raw.items())


def as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def sha(*pieces: Any) -> str:
    """SHA-256 of some bytes, one after the other."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def content_of(raw: Mapping[str, np.ndarray]) -> str:
    """One digest of all arrays and their names, as files before version 5 have it."""
    return sha(*(piece for name in sorted(raw) for piece in (name.encode(), raw[name].data)))


def encoded(head: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Iterator[bytes | memoryview]:
    """A whole file, piece by piece. (The safetensors package does not let one say where an array begins.)"""
    raw = {name: as_bytes(value) for name, value in arrays.items()}
    shapes = {name: [str(value.dtype), list(value.shape)] for name, value in arrays.items()}
    content = json.dumps({name: sha(x.data) for name, x in raw.items()})
    words = {"head": json.dumps(head), "shapes": json.dumps(shapes), "content": content}
    order = sorted(raw, key=lambda name: (raw[name].nbytes % ALIGNED > 0, name))
    header: dict[str, Any] = {"__metadata__": words | {"digest": digest(words)}}
    end = 0
    for name in order:
        begin, end = end, end + raw[name].nbytes
        header[name] = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in order:
        yield raw[name].data


def digest(words: Mapping[str, str]) -> str:
    """Of a header's words."""
    covered = [words["head"], words["shapes"], words["content"]]
    return hashlib.sha256(json.dumps(covered).encode()).hexdigest()


def open_file(call: str, path: Path) -> StateFile:
    """Reads the head of a file.

    Raises:
      StateError: no such file; one that is not a state, is cut off or damaged, or of a newer format.
    """
    try:
        with path.open("rb") as file:
            length = path.stat().st_size
            size = int.from_bytes(file.read(8), "little")
            header = file.read(size) if size <= min(LONGEST, length - 8) else b""
    except OSError as error:
        raise unreadable(call, error) from error
    try:
        stored = json.loads(header)
        words = stored.pop("__metadata__")
        head, shapes = json.loads(words["head"]), json.loads(words["shapes"])
        ours = head["format"] == FORMAT and type(head["version"]) is int and isinstance(words["digest"], str)
        ours = ours and (head["version"] < EACH or isinstance(json.loads(words["content"]), dict))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(f"{call} is not a saved state. Give a file that save wrote.") from error
    if not ours:
        raise StateError(f"{call} is not a saved state. Give a file that save wrote.")
    if head["version"] > VERSION:
        raise StateError(
            f"{call} has format {head['version']}, this kvjax reads up to {VERSION}. Use a newer kvjax."
        )
    covered = head["version"] not in (1, 2)
    if covered and words["digest"] != digest({"content": "", **words}):
        raise DamagedError(call, "its head is not what was written")
    begins = _begins(call, stored, shapes, 8 + size, length)
    content = words["content" if covered else "digest"]
    both = hashlib.sha256(json.dumps([words["head"], words["shapes"], content]).encode()).hexdigest()
    named = {name: (jnp.dtype(dtype), tuple(shape)) for name, (dtype, shape) in shapes.items()}
    return StateFile(
        call=call, path=path, head=head, shapes=named, begins=begins, content=content, digest=both
    )


def unreadable(call: str, error: OSError) -> StateError:
    return StateError(f"{call} cannot be read ({error.strerror}). Give a file that save wrote.")


def _begins(call: str, stored: Any, shapes: Any, begin: int, length: int) -> dict[str, int]:
    """Where each array begins; refuses arrays that are not side by side from ``begin`` to the end."""
    try:
        if stored.keys() != shapes.keys():
            raise ValueError("other names")
        places = sorted((*map(_whole, stored[name]["data_offsets"]), name) for name in shapes)
        begins, end = {}, 0
        for first, last, name in places:
            size = _bytes_of(*shapes[name])
            if [first, last, stored[name]["dtype"], stored[name]["shape"]] != [end, end + size, "U8", [size]]:
                raise ValueError(name)
            begins[name], end = begin + first, last
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(call, f"its head does not say where its arrays are ({error})") from error
    if begin + end != length:
        raise DamagedError(call, f"it has {length} bytes of {begin + end}")
    return begins


def _bytes_of(dtype: str, shape: list[int]) -> int:
    kind = jnp.dtype(dtype)
    if str(kind) != dtype or kind.hasobject or len(shape) > MOST_AXES:
        raise ValueError(f"{dtype} {shape}")
    return math.prod(map(_whole, shape)) * kind.itemsize


def _whole(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(number)
    return number
