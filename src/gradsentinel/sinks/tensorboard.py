"""TensorBoard's event files as a sink."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gradsentinel.errors import ConfigurationError
from gradsentinel.measures.histogram import Histogram

PREFIX = "gradsentinel/"


class TensorBoardSink:
    """Writes to a SummaryWriter; all numbers of a step become one event where it is torch's own.

    Args:
        log_dir: where to write; needs gradsentinel[tensorboard].
        writer: a SummaryWriter, or something like it, to write to instead; it is not closed.
    """

    def __init__(self, log_dir: str | os.PathLike[str] | None = None, *, writer: Any = None) -> None:
        if (log_dir is None) == (writer is None):
            raise ConfigurationError("TensorBoardSink needs either log_dir= or writer=")
        self._owned = writer is None
        if writer is None:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an optional dependency

            writer = SummaryWriter(log_dir=os.fspath(log_dir))  # type: ignore[arg-type]
        self.writer = writer
        self._summary = _summary_class(writer)
        """What holds all numbers of a step; None if the writer takes them one by one only."""

    def scalars(self, step: int, numbers: Mapping[str, float], time: float | None = None) -> None:
        """Write numbers of a step, at the time they were measured."""
        summary = self._summary
        if summary is None:
            for name, value in numbers.items():
                self.writer.add_scalar(f"{PREFIX}{name}", value, step, time)
            return
        values = [summary.Value(tag=PREFIX + name, simple_value=value) for name, value in numbers.items()]
        self.writer._get_file_writer().add_summary(summary(value=values), step, time)

    def text(self, step: int, tag: str, markdown: str) -> None:
        """Write a text, and have it on disk."""
        self.writer.add_text(f"{PREFIX}{tag}", markdown, step)
        self.flush()

    def histogram(self, step: int, name: str, histogram: Histogram, time: float | None = None) -> None:
        """Write the powers of two that occur; TensorBoard's own buckets would put them all into one."""
        limits, counts = histogram.log2()
        if not limits or not hasattr(self.writer, "add_histogram_raw"):
            return
        self.writer.add_histogram_raw(
            f"{PREFIX}{name}",
            min=limits[0] - 1,
            max=limits[-1],
            num=sum(counts),
            sum=sum((limit - 0.5) * count for limit, count in zip(limits, counts, strict=True)),
            sum_squares=sum((limit - 0.5) ** 2 * count for limit, count in zip(limits, counts, strict=True)),
            bucket_limits=limits,
            bucket_counts=counts,
            global_step=step,
            walltime=time,
        )

    def layout(self, layout: Mapping[str, Any]) -> None:
        """Lay out the page of custom scalars."""
        self.writer.add_custom_scalars(dict(layout))

    def hparams(self, settings: Mapping[str, str | float | bool]) -> None:
        """Write settings into the run itself; left out for writers that are not torch's own."""
        if self._summary is None or not settings:
            return
        from torch.utils.tensorboard.summary import hparams  # noqa: PLC0415 - an optional dependency

        summaries = hparams(dict(settings), {f"{PREFIX}loss": 0.0})  # type: ignore[no-untyped-call]
        for summary in summaries[:2]:  # the third would say that the run has ended
            self.writer._get_file_writer().add_summary(summary, 0)

    def flush(self) -> None:
        """Have on disk what was written."""
        self.writer.flush()

    def close(self) -> None:
        """Close what was opened here, and flush what was given."""
        if self._owned:
            self.writer.close()
        else:
            self.writer.flush()


def _summary_class(writer: Any) -> Any:
    """Return the class of whole events, if this is torch's writer, which takes them."""
    try:
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415 - an optional dependency
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an optional dependency
    except ImportError:
        return None
    return Summary if isinstance(writer, SummaryWriter) and hasattr(writer, "_get_file_writer") else None
