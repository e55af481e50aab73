"""While it is imported, transformers writes docstrings for its models' classes and methods, and reads the files of all
its models twice, to list what is in them. When Unsloth asks for these names, each is compared with all before it.

Without this: the same training, but each start takes a second longer.
"""

import functools
import importlib.util
import os
import sys
import types
from typing import Any

from patches import core

UPSTREAM = "https://github.com/huggingface/transformers/blob/main/src/transformers/utils/auto_docstring.py"
REMOVE_WHEN = None  # when transformers does this at the first use; a function that it lacks is not replaced


def needed() -> bool:
    """Whether transformers is going to be imported in this way. Does not import it."""
    imported = "transformers" in sys.modules or core.is_changed(*_CHANGES)
    return not imported and importlib.util.find_spec("transformers") is not None


def apply() -> None:
    """Replace both functions before any other module of transformers takes them."""
    if needed():
        core.change_on_import(_CHANGES)


def _write_none(module: Any) -> None:
    def auto_docstring(obj=None, **_):
        if obj is None:
            return auto_docstring
        if isinstance(obj, type):  # what replace_return_docstrings, in remote code, looks for in outputs
            obj.__doc__ = (obj.__doc__ or "") + "\n    Args:\n"
        return obj

    module.auto_docstring = auto_docstring


def _list_models(module: Any) -> None:
    read = getattr(module, "create_import_structure_from_path", None)
    if read is None:
        return
    of_folder = functools.cache(read)

    def create_import_structure_from_path(module_path):  # a folder, or a file in it
        path = os.fspath(module_path)
        return of_folder(os.path.dirname(path) if os.path.isfile(path) else path)

    module.create_import_structure_from_path = create_import_structure_from_path
    names = types.ModuleType.__dir__
    module._LazyModule.__dir__ = lambda self: list(dict.fromkeys([*names(self), *self.__all__]))


_CHANGES = {"transformers.utils.auto_docstring": _write_none, "transformers.utils.import_utils": _list_models}
