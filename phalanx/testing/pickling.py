"""Programs as bytes: functions that have no importable name travel by value, with the file they are from."""

from __future__ import annotations

import io
import types
from typing import Any

import cloudpickle


def dumps(program: Any) -> bytes:
    """Pickle anything, lambdas and local functions included; `pickle.loads` reads it."""
    file = io.BytesIO()
    _Pickler(file).dump(program)
    return file.getvalue()


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]  # cloudpickle has no types
    """Keeps the file name of code, which cloudpickle drops, so that tracebacks show the lines of the test."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            return _code_of, (self.dispatch_table[types.CodeType](obj), obj.co_filename)
        return super().reducer_override(obj)


def _code_of(reduced: tuple[Any, ...], filename: str) -> types.CodeType:
    rebuild, parts = reduced
    code: types.CodeType = rebuild(*parts).replace(co_filename=filename)
    return code
