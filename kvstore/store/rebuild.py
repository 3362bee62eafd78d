"""Beginning the catalogue again from the log: the old one is set aside until that has succeeded."""

from __future__ import annotations

from pathlib import Path

from kvstore.store.catalog import LmdbCatalog, Loaded
from kvstore.store.device import translated

ASIDE_NAME = LmdbCatalog.DATA_NAME + ".aside"


class RebuiltCatalog(LmdbCatalog):
    """A catalogue that knows nothing when it is loaded. Afterwards call `keep`, or, closed, `put_back`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._file = directory / self.DATA_NAME
        self._aside = directory / ASIDE_NAME

    def load(self) -> Loaded:
        # Only here: by now the directory is locked.
        with translated("set aside", str(self._file)):
            if self._file.exists():
                self._file.replace(self._aside)
        return super().load()

    def keep(self) -> None:
        """The new one is whole: the old one goes."""
        with translated("remove", str(self._aside)):
            self._aside.unlink(missing_ok=True)

    def put_back(self) -> None:
        """It failed: the old one is what there is."""
        with translated("put back", str(self._aside)):
            if self._aside.exists():
                self._aside.replace(self._file)
