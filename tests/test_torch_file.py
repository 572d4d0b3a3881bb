"""Files of torch: tensors are read, nothing in them is run, damage is told."""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from torch_writer import FLOAT, TENSOR, Call, Storage, published, stand_in, write_torch

from kvjax.weights.torch_file import TorchFileError, read_tensors


def test_tensors_of_a_torch_file(tmp_path):
    right = published() | {"half": np.arange(4).astype(ml_dtypes.bfloat16)}
    tensors = read_tensors(write_torch(tmp_path / "a.pt", right))
    assert tensors.keys() == right.keys()
    for name, x in right.items():
        assert tensors[name].dtype == x.dtype
        np.testing.assert_array_equal(tensors[name], x)


def test_nothing_in_a_torch_file_is_run(tmp_path):
    marker = tmp_path / "run"
    bad = Call(stand_in("pathlib", "Path.touch"), marker)
    worse = Call(stand_in("os", "system"), f"touch {marker}")
    for call in (bad, worse):
        file = write_torch(tmp_path / "a.pt", {}, x=call)
        with pytest.raises(TorchFileError, match="is not part of a plain tensor, and is not run"):
            read_tensors(file)
    assert not marker.exists()


def test_torch_files_that_cannot_be_read(tmp_path):
    def tensor(offset: int, size: tuple, stride: tuple) -> Call:
        return Call(TENSOR, Storage("0", FLOAT, 4), offset, size, stride, False, OrderedDict())

    x, names = {"x": np.zeros(4, np.float32)}, iter("abcdefgh")

    def file(**changes: Any) -> Path:
        return write_torch(tmp_path / f"{next(names)}.pt", x, **changes)

    cut, other, text = file(), tmp_path / "other.zip", tmp_path / "text.pt"
    cut.write_bytes(cut.read_bytes()[:200])
    text.write_text("no zip")
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("readme.txt", "hello")
    for path, says in [
        (tmp_path / "none.pt", "cannot be read"),
        (cut, "not a whole zip archive"),
        (text, "not a whole zip archive"),
        (other, "without one data.pkl"),
        (file(y=tensor(1, (4,), (1,))), "reaches beyond its storage"),
        (file(y=tensor(0, (2, 3), (2, 1))), "reaches beyond its storage"),
        (file(y=tensor(3, (2,), (-1,))), "reaches beyond its storage"),
        (file(y=Call(TENSOR, 5)), "pickle is damaged"),
        (file(y=3), "not a dict of tensors"),
        (file(y=Call(TENSOR, Storage("7", FLOAT, 4), 0, (4,), (1,))), "pickle is damaged"),
        (file(lost=1), "storage 0 is cut short"),
    ]:
        with pytest.raises(TorchFileError, match=says):
            read_tensors(path)
