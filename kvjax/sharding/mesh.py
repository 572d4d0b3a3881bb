"""Devices for a model and its state: rows along one axis of a mesh, KV heads along another.

Attention to a cache runs inside ``shard_map``: each device owns the caches of its rows and KV heads, with a
pool, a free stack and page tables of its own, and does what one device does. So nothing is allocated,
evicted or read across devices. The model stays in ordinary jit and is partitioned by where its weights lie.
How each kind of array is cut stands in ``kvjax.sharding.specs``.

Along ``context`` the cache is the same on every device; only the model is cut further. It is for more devices
than there are KV heads.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kvjax.errors import UserError
from kvjax.sharding.specs import AXES, DATA, ROWS, SERVED, TENSOR, WHOLE, of_state, of_weight, spread
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Num


class MeshError(UserError):
    """A mesh that cannot be made here, or that does not divide what is asked of it."""


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Devices in a grid of data x tensor x context; or one device, on which all methods do nothing.

    Attributes:
      grid: JAX's mesh of these axes; None for one device.
    """

    grid: jax.sharding.Mesh | None = None

    def __repr__(self) -> str:
        return ",".join(f"{axis}={self.size(axis)}" for axis in AXES) if self.grid else "one device"

    def size(self, axis: str) -> int:
        """Devices along an axis."""
        return self.grid.shape[axis] if self.grid else 1

    @property
    def pools(self) -> int:
        """D, devices that have a pool of their own."""
        return self.size(DATA) * self.size(TENSOR)

    @property
    def across(self) -> bool:
        """May it lie on more than one process?"""
        return self.grid is not None and jax.process_count() > 1

    @property
    def processes(self) -> tuple[int, ...]:
        """Indices of the processes in the mesh; empty for a single device."""
        return tuple(sorted({device.process_index for device in self.grid.devices.flat})) if self.grid else ()

    def sharding(self, spec: P) -> NamedSharding:
        """Of an array on this mesh."""
        assert self.grid is not None
        return NamedSharding(self.grid, spec)

    # --- from and to the host ---

    def put(self, x: Any, specs: Any = WHOLE) -> Any:
        """Host values, the same in every process, where they belong: everywhere, or as ``specs`` says."""
        if self.grid is None:
            return jax.device_put(x)
        placed = jax.tree.map(lambda leaf, spec: shard(leaf, self.sharding(spec)), x, spread(specs, x))
        knows = lambda x: hasattr(x, "on_mesh")  # noqa: E731
        return jax.tree.map(lambda x: x.on_mesh() if knows(x) else x, placed, is_leaf=knows)

    def shapes(self, tree: Any, specs: Any) -> Any:
        """The shapes of a tree with the sharding that each leaf would have; no array is made."""
        shape = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding(spec))  # noqa: E731
        return jax.tree.map(shape, tree, spread(specs, tree))

    def build(self, shape: tuple[int, ...], spec: P, part: Callable[[tuple[slice, ...]], np.ndarray]) -> Any:
        """An array of parts, each asked for once by a process that has a device for it.

        Args:
          shape: of the whole.
          spec: how it is cut.
          part: what stands at these slices, one of each dimension.
        """
        if self.grid is None:
            return jax.device_put(part((slice(None),) * len(shape)))
        made: dict[str, np.ndarray] = {}

        def once(index: Any) -> np.ndarray:
            if str(index) not in made:
                made[str(index)] = part(index)
            return made[str(index)]

        return jax.make_array_from_callback(shape, self.sharding(spec), once)

    def place(self, weight: Any, letters: str) -> Any:
        """Host arrays that lie as one weight of these dimensions, cut as it is."""
        return self.put(weight, jax.tree.map(lambda x: self.spec(letters, x.shape), weight))

    def read(self, x: Any) -> Any:
        """NumPy values of arrays, the same in every process."""
        if self.across:
            x = _everywhere(x, self)
        return jax.device_get(x)

    def blocks(self, x: Num[np.ndarray, "B K ..."]) -> Iterator[np.ndarray]:
        """The part of each device that has a pool of its own, in the order of the pools."""
        rows, heads = x.shape[0] // self.size(DATA), x.shape[1] // self.size(TENSOR)
        for at in range(self.pools):
            row, head = divmod(at, self.size(TENSOR))
            yield x[row * rows : (row + 1) * rows, head * heads : (head + 1) * heads]

    def local(self, tree: Any) -> Any:
        """Shapes of what one device has of a state's arrays; the arrays themselves on one device."""
        if self.grid is None:
            return tree

        def one(x: Any, spec: P) -> Any:
            return jax.ShapeDtypeStruct(self.sharding(spec).shard_shape(x.shape), x.dtype)

        return jax.tree.map(one, tree, of_state(tree))

    # --- inside a program ---

    def everywhere(self, x: Any) -> Any:
        """The same values on every device, so that any process may look at them."""
        return self.pinned(x, WHOLE)

    def by_row(self, x: Any) -> Any:
        """Arrays [B, ...], each device with its rows."""
        return self.pinned(x, ROWS)

    def pinned(self, x: Any, spec: P) -> Any:
        """Arrays that the compiler must cut so."""
        if self.grid is None:
            return x
        pin = functools.partial(jax.lax.with_sharding_constraint, shardings=self.sharding(spec))
        return jax.tree.map(pin, x)

    def each(self, run: Callable[..., Any], trees: Sequence[Any], specs: Sequence[Any], out: Any) -> Any:
        """``run(*trees)`` on each device, with its own part of every array.

        Args:
          run: a pure function; it sees no mesh, but may reduce over the axis ``tensor``.
          trees: pytrees of arrays.
          specs: how each of them is cut; may be prefixes of its tree.
          out: how the result is.
        """
        if self.grid is None:
            return run(*trees)

        def on_one(*parts: Any) -> Any:
            return _outside(run(*_inside(parts)))

        # What devices hold varies, and so do loops over it: shard_map's types of replication know neither.
        sharded = jax.shard_map(on_one, mesh=self.grid, in_specs=tuple(specs), out_specs=out, check_vma=False)
        return sharded(*trees)

    def spec(self, letters: str, shape: tuple[int, ...], cut: Mapping[str, tuple[str, ...]] = SERVED) -> P:
        """How a weight of these dimensions is cut; see ``kvjax.sharding.specs.of_weight``."""
        return of_weight(letters, shape, self.size, cut)

    def of_model(self, network: Any, params: Params) -> Params:
        """How a model's weights are cut, by the letters that its network names their dimensions by."""
        letters = getattr(network, "letters", None)
        if letters is None:
            return jax.tree.map(lambda _: WHOLE, params)
        return jax.tree.map(lambda leaf, named: self.spec(named, leaf.shape), params, letters(params))

    # --- what it divides ---

    def check(
        self, call: str, *, rows: int | None = None, heads: int, kv_heads: int, experts: int | None = None
    ) -> None:
        """Refuses sizes that the mesh does not divide.

        Raises:
          MeshError: naming the axis, and what it may be.
        """
        data, tensor, context = (self.size(axis) for axis in AXES)
        if kv_heads % tensor:
            fits = max(n for n in range(1, tensor + 1) if kv_heads % n == 0 and tensor % n == 0)
            more = f"tensor={fits},context={context * tensor // fits}"
            raise MeshError(
                f"{call}: tensor={tensor} does not divide the model's {kv_heads} KV heads. Take {more}: "
                "along context the model is cut too, and the cache is the same on every device."
            )
        if heads % (tensor * context):
            raise MeshError(
                f"{call}: tensor={tensor} x context={context} does not divide the model's {heads} query "
                "heads. Take fewer devices along context; data takes the rest."
            )
        if experts is not None and experts % (tensor * context):
            raise MeshError(
                f"{call}: tensor={tensor} x context={context} does not divide the model's {experts} experts. "
                "Take fewer devices along these axes; data takes the rest."
            )
        if rows is not None and rows % data:
            raise MeshError(
                f"{call}: data={data} does not divide {rows} rows. Give a multiple of {data} rows, or a mesh "
                "with fewer devices along data."
            )


ONE = Mesh()
"""One device."""


def mesh(named: str | Mesh | None = None, *, devices: Sequence[Any] | None = None, **sizes: int) -> Mesh:
    """Devices for ``load``, ``prefill`` and ``generate``: ``mesh("data=2,tensor=4")``, ``mesh(tensor=8)``.

    Args:
      named: axes and their sizes; other axes have one device. A mesh is returned as it is.
      devices: to take, in this order; all there are by default, those of a process side by side.
      sizes: ``data`` (cuts rows), ``tensor`` (KV heads and the model), ``context`` (the model alone).

    Raises:
      MeshError: an unknown axis, a size that is not a whole number of 1 or more, or too few devices.
    """
    if isinstance(named, Mesh):
        return named
    shape, call = axis_sizes(named, **sizes)
    need = math.prod(shape)
    if need == 1 and devices is None:
        return ONE
    chosen = sorted(jax.devices(), key=_place) if devices is None else list(devices)
    if len(chosen) < need:
        raise MeshError(
            f"{call} needs {need} devices, {len(chosen)} are here. Make the axes smaller; on a CPU, "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={need} makes more."
        )
    grid = np.asarray(chosen[:need]).reshape(shape)
    return Mesh(jax.sharding.Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES)))


def sizes_of(named: str) -> Mesh:
    """A mesh of sizes alone, without devices, to ask what it divides.

    Raises:
      MeshError: as ``mesh``, but for too few devices.
    """
    shape = axis_sizes(named)[0]
    return ONE if math.prod(shape) == 1 else Mesh(jax.sharding.AbstractMesh(shape, AXES))  # type: ignore[arg-type]


def axis_sizes(named: str | None = None, **sizes: int) -> tuple[tuple[int, ...], str]:
    """Devices along each of ``AXES``, and the call of ``mesh`` as it was written.

    Raises:
      MeshError: an unknown axis, or a size that is not a whole number of 1 or more.
    """
    by_axis: dict[str, Any] = dict(sizes)
    call = f"mesh({named!r})" if named is not None else f"mesh(**{by_axis})"
    for word in filter(None, (named or "").replace(" ", "").split(",")):
        axis, equals, size = word.partition("=")
        if not equals or not re.fullmatch(r"\d+", size):
            raise MeshError(f"{call}: {word!r} is not an axis and its size. Write it as 'data=2,tensor=4'.")
        by_axis[axis] = int(size)
    if unknown := [axis for axis in by_axis if axis not in AXES]:
        raise MeshError(f"{call}: {unknown[0]!r} is not an axis. The axes are {', '.join(AXES)}.")
    if wrong := [
        axis for axis, n in by_axis.items() if isinstance(n, bool) or not isinstance(n, int) or n < 1
    ]:
        raise MeshError(
            f"{call}: {wrong[0]}={by_axis[wrong[0]]!r} is not a number of devices. Give 1 or more."
        )
    return tuple(by_axis.get(axis, 1) for axis in AXES), call


def mesh_of(params: Params) -> Mesh:
    """The mesh that a model's weights lie on."""
    where = getattr(jax.tree.leaves(params)[0], "sharding", None)
    sharded = isinstance(where, NamedSharding) and tuple(where.mesh.axis_names) == AXES
    return Mesh(where.mesh) if sharded else ONE  # type: ignore[union-attr, arg-type]


def _place(device: Any) -> tuple[int, int]:
    return device.process_index, device.id


def shard(x: Any, where: NamedSharding) -> Any:
    """An array on its devices; each process brings its own devices' part of a host value."""
    if where.is_fully_addressable or getattr(x, "sharding", None) == where:
        return jax.device_put(x, where)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, where, lambda index: x[index])


@functools.partial(jax.jit, static_argnums=1)
def _everywhere(x: Any, where: Mesh) -> Any:
    return where.everywhere(x)


def _per_device(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The tree with the numbers changed of which every device has one (``Pages.per_device``)."""

    def one(x: Any) -> Any:
        names = getattr(x, "per_device", ())
        return dataclasses.replace(x, **{name: change(getattr(x, name)) for name in names}) if names else x

    return jax.tree.map(one, tree, is_leaf=lambda x: hasattr(x, "per_device"))


_inside = functools.partial(_per_device, change=lambda x: x[0])
_outside = functools.partial(_per_device, change=lambda x: x[None])
