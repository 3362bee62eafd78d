"""Beginning the catalogue again from the log: the old one is set aside until that has succeeded."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from kvstore.errors import DeviceError
from kvstore.store.catalog import IDENTITY_KEY, OF_NAMESPACES, LmdbCatalog, Loaded
from kvstore.store.device import translated


class RebuiltCatalog(LmdbCatalog):
    """A catalogue that knows nothing of segments when it is loaded. What it alone may know of namespaces is taken over from
    the old one where that can be read. Call `keep` when the log is open; closed without that, it puts the old one back."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._is_aside = False

    def load(self) -> Loaded:
        # Only here: by now the directory is locked, and it is until after `close`.
        self._end_rebuild()
        with translated("set aside", str(self._data)):
            if self._data.exists():
                self._data.replace(self._aside)
                self._is_aside = True
        loaded = self._load()
        kept: dict[bytes, bytes] | None = None
        if self._is_aside:
            with suppress(DeviceError):  # what cannot be read is why it is built anew
                kept = self._read_rows(self._aside)
        rows = {
            key: row for key, row in (kept or {}).items() if key == IDENTITY_KEY or key[:1] in OF_NAMESPACES
        }
        return Loaded({**loaded.rows, **rows}, intact=False)

    def keep(self) -> None:
        """The new one is whole: the old one goes."""
        with translated("remove", str(self._aside)):
            self._aside.unlink(missing_ok=True)
        self._is_aside = False

    def close(self) -> None:
        super().close()
        if self._is_aside:
            self._is_aside = False
            self._end_rebuild()
