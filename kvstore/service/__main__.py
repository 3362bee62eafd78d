"""`python -m kvstore.service`: the service alone, configured by KVSTORE_* and the file that KVSTORE_CONFIG names."""

from __future__ import annotations

import sys

from kvstore.config import load_service_config
from kvstore.errors import KvstoreError
from kvstore.service.server import main_blocking


def main() -> int:
    try:
        main_blocking(load_service_config({}))
    except KvstoreError as error:
        print(f"kvstore: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
