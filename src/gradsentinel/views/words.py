"""The words of the views in English and in Chinese."""

from __future__ import annotations

from typing import Any

LANGUAGES = ("en", "zh")

_KINDS = {
    "nonfinite_loss": ("non-finite loss", "损失为 NaN/Inf"),
    "nonfinite_input": ("non-finite input", "输入为 NaN/Inf"),
    "nonfinite_gradient": ("non-finite gradient", "梯度为 NaN/Inf"),
    "nonfinite_parameter": ("non-finite parameter", "参数为 NaN/Inf"),
    "nonfinite_state": ("non-finite training state", "训练状态为 NaN/Inf"),
    "saturation": ("saturation", "数值饱和"),
    "magnitude": ("gradient too large", "梯度过大"),
    "spike": ("spike", "尖峰"),
    "stagnation": ("stagnation", "停滞"),
    "rank_divergence": ("ranks that differ", "各 rank 不一致"),
    "loss_scale": ("loss scale", "损失缩放异常"),
    "device_health": ("device in doubt", "设备可疑"),
    "callback_error": ("error of a callback", "回调出错"),
    "custom": ("own check", "自定义检查"),
}
_CAUSES = {
    "data": ("bad data", "数据有问题"),
    "precision": ("too little precision", "精度不足"),
    "math": ("unstable math of the model", "模型数学不稳定"),
    "operator": ("a wrong operator", "算子有误"),
    "hardware": ("hardware", "硬件"),
    "optimizer": ("optimizer or learning rate", "优化器或学习率"),
    "desync": ("ranks out of step", "各 rank 失步"),
    "setup": ("the set-up", "配置"),
    "unknown": ("unknown", "未知"),
}
_PHASES = {
    "setup": ("during set-up", "配置阶段"),
    "input": ("in the input", "输入中"),
    "forward": ("in the forward pass", "前向传播中"),
    "loss": ("in the loss", "损失中"),
    "backward": ("in the backward pass", "反向传播中"),
    "reduce": ("in the reduction over ranks", "跨 rank 归约中"),
    "optimizer": ("in the optimizer step", "优化器更新中"),
}
_OUTCOMES = {
    "retried": ("computed again, and the step was made", "重新计算成功，该步已更新"),
    "rescued": ("saved, and the step was made", "挽救成功，该步已更新"),
    "skipped": ("dropped the step", "丢弃了该步"),
    "rolled_back": ("went back to an earlier state", "回滚到更早的状态"),
    "aborted": ("stopped the run", "终止了训练"),
    "reported": ("reported only", "仅作报告"),
}
_STATES = {
    "running": ("is running", "正在运行"),
    "ended": ("has ended", "已正常结束"),
    "failed": ("ended with an error", "因错误结束"),
    "aborted": ("was stopped by GradSentinel", "被 GradSentinel 终止"),
    "empty": ("is empty so far", "暂无内容"),
    "unknown": ("has no end on record; the process may have been killed", "没有结束记录，进程可能已被终止"),
}
_COMMANDS = {
    "repro": (
        "the bad operator alone, with torch and safetensors only",
        "单独重现坏算子，只需 torch 和 safetensors",
    ),
    "replay_operator": ("the bad operator alone", "单独重现坏算子"),
    "replay_step": ("the whole step with your model", "用你的模型重现整步"),
    "verify": ("does a fix hold?", "验证修复是否有效"),
    "show": ("the story in the terminal", "在终端查看经过"),
    "report": ("all of this as one HTML file", "导出为单个 HTML 文件"),
}
_TABLES = {
    "kind": _KINDS,
    "cause": _CAUSES,
    "phase": _PHASES,
    "outcome": _OUTCOMES,
    "state": _STATES,
    "command": _COMMANDS,
}


def language(wanted: Any) -> str:
    """Return the language to write in; English where another one is asked for."""
    return wanted if wanted in LANGUAGES else "en"


def word(table: str, key: Any, lang: str) -> str:
    """Return what a kind, cause, phase, outcome, state or command is called; the key itself if it is new."""
    entry = _TABLES[table].get(str(key))
    return str(key).replace("_", " ") if entry is None else entry[LANGUAGES.index(language(lang))]


def pick(lang: str, english: str, chinese: str) -> str:
    """Return one of two sentences."""
    return chinese if language(lang) == "zh" else english


def plural(count: int, one: str, many: str | None = None) -> str:
    """Return an English count with its noun."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
