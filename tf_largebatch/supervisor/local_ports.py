"""Ports of this machine on which nobody listens."""

from __future__ import annotations

import socket

from absl import logging

from tf_largebatch.validation import InputError

_LAST_PORT = 65535


def free_addresses(count: int, wanted_first_port: int | None = None) -> list[str]:
    """`127.0.0.1:port` for each of `count` workers, all different.

    A port is only seen to be free: another program can still take it before TensorFlow does.

    Args:
      count: how many addresses.
      wanted_first_port: use this port and those after it, passing over the busy ones (and saying
        so); None or 0 takes any free ports.

    Raises:
      InputError: fewer than `count` ports from `wanted_first_port` on are free.
    """
    held: list[socket.socket] = []
    try:
        # All are held open until the last is found: otherwise the system may give one out twice.
        port = wanted_first_port or 0
        while len(held) < count:
            if port > _LAST_PORT:
                raise InputError(
                    f"--port is {wanted_first_port}, but only {len(held)} of the {count} ports needed are free "
                    f"from there to {_LAST_PORT}; use a lower port, or 0 for any free ones."
                )
            try:
                held.append(_listen(port))
            except OSError as failure:
                if not port:
                    raise
                logging.warning("Port %d cannot be used (%s); trying the next.", port, failure.strerror)
            port += 1 if port else 0
        return [f"127.0.0.1:{holder.getsockname()[1]}" for holder in held]
    finally:
        for holder in held:
            holder.close()


def _listen(port: int) -> socket.socket:
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # As TensorFlow's server does: on every interface, and beside closed connections of an earlier job.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("0.0.0.0", port))
        holder.listen()
    except OSError:
        holder.close()
        raise
    return holder
