"""Tells the service manager that the service is ready, where one asks to be told (sd_notify of systemd)."""

from __future__ import annotations

import logging
import socket

from kvstore.config import environment

log = logging.getLogger(__name__)


def notify_ready() -> None:
    """Without effect where nobody asked. A manager that cannot be told is a warning: it waits, and may end us."""
    place = environment("NOTIFY_SOCKET")
    if not place:
        return
    # A name that begins with @ is abstract: of no file.
    address = "\0" + place[1:] if place.startswith("@") else place
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
            manager.sendto(b"READY=1", address)
    except OSError as error:
        log.warning("could not tell the service manager at %s that we are ready: %s", place, error)
