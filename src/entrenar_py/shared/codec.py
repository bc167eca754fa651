"""Conversion of dataclasses to dicts that JSON can hold, and back, guided by their annotations.

This module knows nothing about files, frames or events. A `Form` reads and writes the values of one
annotation.
"""

from __future__ import annotations

import ast
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from types import EllipsisType
from typing import Any, Generic, NamedTuple, TypeVar

from entrenar_py.shared.errors import UsageError, did_you_mean

INT_MAX = 2**63 - 1
_DEPTH_MAX = 16
_DIGITS_MAX = 4300  # the most digits of a whole number that Python reads
_WORD_INT_MAX = 10**_DIGITS_MAX - 1
_AS_THEY_ARE = frozenset({str, int, bool, type(None)})

T = TypeVar("T")


class Form(NamedTuple):
    """A pair of functions that convert the values of one annotation from and to JSON.

    `read` converts a JSON value to the field's value, and `write` converts it back. Both raise
    ValueError for a wrong value, with advice on what to use, so nothing is written that a reader
    would refuse. If `write` is None, values are written unchanged.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any], Any] | None = None


class Schema(Generic[T]):
    """The JSON form of one dataclass. Error messages use `what` as its name.

    `forms` adds entries to FORMS or replaces them. Its keys are names in annotations, or whole
    annotations. Fields with `init=False` are left out. If `sparse`, `dump` omits fields that have
    their default values.
    """

    def __init__(
        self,
        kind: type[T],
        *,
        what: str = "",
        forms: Mapping[str, Form] | None = None,
        sparse: bool = False,
    ) -> None:
        self.kind, self._what = kind, what
        known = {**FORMS, **(forms or {})}
        own = [field for field in fields(kind) if field.init]  # type: ignore[arg-type]
        of_field = {field.name: _composed(str(field.type), known) for field in own}
        self._readers = {name: form.read for name, form in of_field.items()}
        self._writers = [(name, form.write) for name, form in of_field.items()]
        self._usual = {field.name: field.default for field in own} if sparse else None
        self._required = {field.name for field in own if not _has_default(field)}

    def dump(self, value: T) -> dict[str, Any]:
        """Return the fields of `value` in their order, as a dict that JSON can hold.

        Raises UsageError for a field that `load` would refuse; the error's `field` is its name.
        """
        record = {}
        for name, write in self._writers:
            item = getattr(value, name)
            if self._usual is None or item != self._usual[name]:
                try:
                    record[name] = item if write is None else write(item)
                except ValueError as error:
                    problem = f"{name}={_shown(item)}: {error}"
                    raise UsageError(self._about(problem), field=name) from error
        return record

    def load(self, record: Any) -> T:
        """Return the dataclass instance that `dump` wrote as `record`.

        Raises UsageError for an unknown or missing key, and for a value that the field's annotation
        does not allow. The error's `field` is the missing key or the key of the wrong value. Errors
        that the dataclass itself raises pass unchanged.
        """
        if type(record) is not dict and not isinstance(record, Mapping):
            raise UsageError(self._about(f"{reprlib.repr(record)}: use a mapping{self._keys()}"))
        values = {}
        for name, value in record.items():
            read = self._readers.get(name)
            if read is None:
                problem = (
                    f"key={reprlib.repr(name)}: {did_you_mean(name, self._readers or ('none',))}"
                )
                raise UsageError(self._about(problem))
            try:
                values[name] = read(value)
            except ValueError as error:
                problem = f"{name}={reprlib.repr(value)}: {error}"
                raise UsageError(self._about(problem), field=name) from error
        missing = self._required - values.keys()
        if missing:
            names = [name for name in self._readers if name in missing]
            problem = f"without {', '.join(names)}: add what is missing"
            raise UsageError(self._about(problem), field=names[0])
        return self.kind(**values)

    def _keys(self) -> str:
        """Return the required keys (or all, if none is required) as text for an error message."""
        names = [name for name in self._readers if name in self._required] or [*self._readers]
        more = ", ..." if len(names) < len(self._readers) else ""
        return f" of {', '.join(names)}{more}" if names else ""

    def _about(self, problem: str) -> str:
        return f"{self._what} {problem}" if self._what else problem


def plain(value: Any) -> Any:
    """Return `value` as strict JSON: NaN and infinities become "nan", "inf" and "-inf"."""
    if type(value) in _AS_THEY_ARE:  # first, since most values are, and the Mapping test is slow
        return value
    if isinstance(value, float):
        return _write_float(value)
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def _shown(value: Any) -> str:
    """Return a short text for `value`, even for an int with more digits than Python can print."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return f"({type(value).__name__})"


# --- forms ------------------------------------------------------------------------------------


def whole(least: int, most: int = INT_MAX, *, advice: str) -> Form:
    """Return the Form of integers from `least` to `most`; its errors end with `advice`."""

    def read(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise ValueError(advice)
        return value

    return Form(read, read)


def many(item: Form, *, most: int | None = None) -> Form:
    """Return the Form of a tuple of `item`s, at most `most` (None: no limit); a list in JSON."""
    advice = "use a list" if most is None else f"use a list of at most {most}"

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or (most is not None and len(value) > most):
            raise ValueError(advice)
        return tuple(map(item.read, value))

    return Form(read, _write_items(item.write))


def optional(item: Form) -> Form:
    """Return the Form of a value that is None or has the form `item`."""
    write = item.write
    return Form(
        lambda value: None if value is None else item.read(value),
        write and (lambda value: None if value is None else write(value)),
    )


def _exactly(*items: Form) -> Form:
    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or len(value) != len(items):
            raise ValueError(f"use a list of {len(items)}")
        return tuple(item.read(element) for item, element in zip(items, value, strict=True))

    def write(value: Any) -> list[Any]:
        return [
            element if item.write is None else item.write(element)
            for item, element in zip(items, value, strict=True)
        ]

    return Form(read, write)


def _mapping(item: Form) -> Form:
    def read(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise ValueError("use a mapping")
        return {name: item.read(element) for name, element in value.items()}

    write = item.write
    if write is None:
        return Form(read, dict)
    return Form(read, lambda value: {name: write(element) for name, element in value.items()})


def _write_items(write: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    return list if write is None else lambda value: [write(element) for element in value]


def _write_float(value: Any) -> float | str:
    if not isinstance(value, float):
        return _read_float(value)  # an integer, which may be too large for a float
    return value if math.isfinite(value) else str(value)  # JSON has no NaN


def _read_float(value: Any) -> float:
    if type(value) is float:
        return value
    if (type(value) is int and abs(value) <= INT_MAX) or value in ("nan", "inf", "-inf"):
        return float(value)
    raise ValueError("use a number, or nan, inf, -inf")


def _read_flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("use true or false")
    return value


def _read_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("use text")
    return value


def _read_words(value: Any) -> dict[str, Any]:
    if type(value) is not dict or _depth(value, _DEPTH_MAX) > _DEPTH_MAX:
        raise ValueError(f"use a mapping of at most {_DEPTH_MAX} levels")
    return value


def _write_words(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError("use a mapping")
    return {_key(name): _word(item, _DEPTH_MAX - 1) for name, item in value.items()}


def _word(value: Any, left: int) -> Any:
    """Return a user's value as JSON can hold it, nested at most `left` levels deep."""
    if isinstance(value, float):
        return _write_float(value)
    if isinstance(value, int):
        if not -_WORD_INT_MAX <= value <= _WORD_INT_MAX:
            raise ValueError(f"use whole numbers of at most {_DIGITS_MAX} digits")
        return value
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, Mapping | tuple | list):
        raise ValueError(f"JSON can't hold a {type(value).__name__}; use text and numbers")
    if not left:
        raise ValueError(f"use a mapping of at most {_DEPTH_MAX} levels")
    if isinstance(value, Mapping):
        return {_key(name): _word(item, left - 1) for name, item in value.items()}
    return [_word(item, left - 1) for item in value]


def _key(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError(f"use text as keys, not a {type(name).__name__}")
    return name


def _depth(value: Any, left: int) -> int:
    """Return the depth of nested lists and mappings in `value`, at most `left` + 1 levels."""
    if not isinstance(value, dict | list) or left < 0:
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max((_depth(item, left - 1) for item in inner), default=0)


FORMS: Mapping[str, Form] = {
    "bool": Form(_read_flag, _read_flag),
    "int": whole(-INT_MAX, advice="use a whole number of at most 63 bits"),
    "float": Form(_read_float, _write_float),
    "str": Form(_read_text, _read_text),
}
# A mapping with any JSON values, such as a trainer's own notes.
WORDS = Form(_read_words, _write_words)
# For a dataclass that validates its fields itself.
UNCHECKED: Mapping[str, Form] = dict.fromkeys(FORMS, Form(lambda value: value))


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _composed(annotation: str, forms: Mapping[str, Form]) -> Form:
    return _of_node(ast.parse(annotation, mode="eval").body, forms)


def _of_node(node: ast.expr, forms: Mapping[str, Form]) -> Form:
    """Return the Form of an annotation, composed of the Forms of the names in it."""
    known = forms.get(ast.unparse(node))
    if known is not None:
        return known
    match node:
        case ast.BinOp(left=item, op=ast.BitOr(), right=ast.Constant(value=None)):
            return optional(_of_node(item, forms))
        case ast.Subscript(
            value=ast.Name(id="tuple"),
            slice=ast.Tuple(elts=[item, ast.Constant(value=EllipsisType())]),
        ):
            return many(_of_node(item, forms))
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=items)):
            return _exactly(*(_of_node(item, forms) for item in items))
        case ast.Subscript(value=ast.Name(id="Mapping"), slice=ast.Tuple(elts=[_, item])):
            return _mapping(_of_node(item, forms))
    raise TypeError(f"annotation {ast.unparse(node)}: no form is known for it")
