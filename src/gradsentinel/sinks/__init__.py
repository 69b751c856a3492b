"""Where a run's numbers go: a small protocol, and sinks for TensorBoard and MLflow.

`MetricsCallback(sink=...)` feeds any of them; `TensorBoardCallback` does more, for TensorBoard alone.
"""

from gradsentinel.sinks.mlflow import MLflowSink
from gradsentinel.sinks.protocol import MetricsSink
from gradsentinel.sinks.tensorboard import TensorBoardSink

__all__ = ["MLflowSink", "MetricsSink", "TensorBoardSink"]
