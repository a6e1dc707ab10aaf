# SPDX-License-Identifier: Apache-2.0
"""What kbmla writes to vLLM's log, whatever vLLM and pytest do with their handlers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """Collects the messages of the logger "vllm.kbmla" while the block runs."""
    lines: list[str] = []
    logger = logging.getLogger("vllm.kbmla")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
