"""Fields of a body that this server does not know: ignored and noted, or refused if they look like ours."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from kvjax.serve.http.errors import bad_request
from kvjax.serve.http.schemas import Body
from kvjax.serve.http.service import Service

CLOSE = 2  # letters between a field and a misspelt one
SHORTEST = 4  # letters of a field that others can be close to
MOST_NOTED = 256  # fields that are noted in the log of one server
LONGEST_NOTED = 64  # letters of such a field


def check_fields(service: Service, body: Body) -> list[str]:
    """The fields of a body that are ignored; each is noted in the log the first time.

    Raises:
      ApiError: 400 for a field that begins with ``kv`` or is close to one of ours, with ``--strict`` for any.
    """
    ignored = []
    for kind, path, name in dict.fromkeys(_unknown(body)):
        near = next((known for known in kind.model_fields if is_close(name, known)), None)
        shown = f"{path}{name[:LONGEST_NOTED]}"
        if near is not None:
            message = f"{shown}: not a field, but {near} is. Correct it, or leave it out."
        elif name.startswith("kv"):
            message = f"{shown}: not a field, though ours begin with kv. Leave it out."
        elif service.options.strict:
            message = f"{shown}: not a field, and this server ignores none (--strict). Leave it out."
        else:
            ignored.append(shown)
            continue
        raise bad_request(shown, message, "unknown_field")
    for shown in ignored:
        if shown not in service.noted_fields and len(service.noted_fields) < MOST_NOTED:
            service.noted_fields.add(shown)
            service.log("ignored_field", field=shown)
    return ignored


def _unknown(body: BaseModel, path: str = "") -> Iterator[tuple[type[BaseModel], str, str]]:
    """(kind of object, path of the object, field); elements of lists have no number, so each counts once."""
    for name in body.model_extra or ():
        yield type(body), path, name
    for name in type(body).model_fields:
        value = getattr(body, name)
        for inner in value if isinstance(value, list) else [value]:
            if not isinstance(inner, BaseModel):
                break  # elements of a list are of one kind
            yield from _unknown(inner, f"{path}{name}.")


def is_close(name: str, known: str) -> bool:
    """Are they ``CLOSE`` letters apart at most (inserted, left out or changed)?"""
    if len(known) < SHORTEST or abs(len(name) - len(known)) > CLOSE:
        return False
    row = list(range(len(known) + 1))
    for at, letter in enumerate(name, 1):
        above, row = row, [at]
        for to, other in enumerate(known, 1):
            row.append(min(above[to] + 1, row[-1] + 1, above[to - 1] + (letter != other)))
    return row[-1] <= CLOSE
