"""Whether libllama may keep weights in ggml's extra CPU buffers (AMX, CPU_REPACK).

A CPU may advertise instructions that its hypervisor kills the process for, and libllama uses them unasked.
"""

from __future__ import annotations

from collections.abc import Iterable

from backends.ggml.devices import open_device
from backends.ggml.lib import ggml
from backends.ggml.probe import PLAIN, probe


def extra_buffers_work(types: Iterable[int]) -> bool:
    """Whether products with weights of these types survived in all extra buffers, where they do in any.

    A type that a buffer does not take looks like one that killed the trial: then the answer is no, which
    costs speed and nothing else.
    """
    device = open_device("CPU", 1)
    names = {ggml().backend_buft_name(kind).decode() for kind in device.extra_buffer_types()}
    device.close()
    if not names:
        return False
    verdicts = probe(types)
    held: dict[int, set[str]] = {}
    for kind, name in verdicts:
        if name != PLAIN:
            held.setdefault(kind, set()).add(name)
    return bool(held) and all(found == names for found in held.values())


__all__ = ["extra_buffers_work"]
