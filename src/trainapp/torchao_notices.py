"""What torchao logs whenever it is imported, which Transformers and PEFT do, too. Imports no torch."""

import contextlib
import logging
from collections.abc import Iterator

# By logger, from torchao 0.18: kernels for other devices or without Triton, which it does not need to be imported (a
# precision that needs them tries them), and its own use of a deprecated function of torch 2.13.
_NOTICES = {
    "torchao": "Failed to load ",
    "torchao.kernel.intmm": "Detected no triton",
    "torch.utils._pytree": "is an Enum subclass and is now natively supported",
}


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Inside the block these messages are dropped, and no others. Import torchao, or what imports it, there."""
    with contextlib.ExitStack() as stack:
        for name, text in _NOTICES.items():
            logger, notice = logging.getLogger(name), _Without(text)
            logger.addFilter(notice)
            stack.callback(logger.removeFilter, notice)
        yield


class _Without(logging.Filter):
    def __init__(self, text: str):
        super().__init__()
        self._text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self._text not in record.getMessage()
