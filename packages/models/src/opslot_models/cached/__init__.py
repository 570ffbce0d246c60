"""Modules that are generated from the installed transformers, where no set that is shipped serves it.

`opslot_models.cached.modeling_llama` is a name like that of a module in a set: importing it generates the module where
the user's cache has none, so a pickled model finds its classes in any process.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import CodeType, ModuleType

from .._cache import Entry
from .._generation import provide
from .._sets import known_families


class _Loader(SourceFileLoader):
    """Runs the content that was verified, whatever the file holds by then, and puts no bytecode beside it."""

    def __init__(self, name: str, entry: Entry) -> None:
        super().__init__(name, str(entry.path))
        self._content = entry.content

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self._content, self.path)
        return code


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        family = name.removeprefix("modeling_")
        if package != __name__ or name == family or family not in known_families():
            return None
        entry = provide(family)
        return spec_from_file_location(fullname, entry.path, loader=_Loader(fullname, entry))


sys.meta_path.append(_Finder())
