"""An incident in sentences, in English and in Chinese."""

from __future__ import annotations

from gradsentinel.incident import Incident, Outcome
from gradsentinel.views.phrases import said
from gradsentinel.views.words import pick, word
from gradsentinel.wording import duration

_SECONDS = {
    "detect": ("to detect", "检测"),
    "diagnose": ("to diagnose", "诊断"),
    "recover": ("to recover", "恢复"),
}

_SAID_ALREADY = {
    Outcome.SKIPPED: ("step dropped, ", "已丢弃该步，"),
    Outcome.ABORTED: ("stopped: ", "已停止："),
}
"""How the sentence of a recovery begins where its outcome has just been named."""


def sentences(incident: Incident, lang: str) -> list[str]:
    """Return what happened, where, why, and what was done about it.

    What detectors, diagnosis and recovery wrote is put into Chinese as far as there is a wording of it.
    """
    found = [_seen(incident, lang), _place(incident, lang), _cause(incident, lang), _done(incident, lang)]
    found += [_also(note, lang) for note in incident.notes]
    found.append(_cost(incident, lang))
    return [sentence for sentence in found if sentence]


def _seen(incident: Incident, lang: str) -> str:
    kind, who = word("kind", incident.kind, lang), incident.detector
    message = said(incident.message.rstrip("."), lang)
    english = f"At step {incident.step} {who or 'a detector'} found: {message}."
    chinese = f"第 {incident.step} 步，{who or '检测器'} 发现{kind}：{message}。"
    return pick(lang, english, chinese)


def _place(incident: Incident, lang: str) -> str:
    parts_en, parts_zh = [], []
    if incident.microbatch is not None and "micro-batch" not in incident.message:
        parts_en.append(f"in micro-batch {incident.microbatch}")
        parts_zh.append(f"微批次 {incident.microbatch}")
    if incident.rank_count == 1:
        rank = incident.ranks[0]
        axes = "".join(f", {axis} {position}" for axis, position in rank.coordinates.items())
        parts_en.append(f"on rank {rank.rank} ({rank.host}, {rank.device}{axes})")
        parts_zh.append(f"rank {rank.rank}（{rank.host}，{rank.device}{axes}）")
    elif incident.rank_count:
        parts_en.append(f"on {incident.rank_count:,} ranks ({incident.who})")
        parts_zh.append(f"{incident.rank_count:,} 个 rank（{incident.who}）")
    if not parts_en:
        return ""
    return pick(lang, f"It happened {' '.join(parts_en)}.", f"发生位置：{'，'.join(parts_zh)}。")


def _cause(incident: Incident, lang: str) -> str:
    diagnosis = incident.diagnosis
    if diagnosis is None or diagnosis.cause == "unknown":
        return pick(lang, "What caused it is not known.", "原因未知。")
    label = word("cause", diagnosis.cause, lang)
    sure = f"{diagnosis.confidence * 100:.0f}"
    places = [part for part in (diagnosis.module, diagnosis.op, diagnosis.node, diagnosis.source) if part]
    phase = word("phase", diagnosis.phase, lang) if diagnosis.phase else ""
    english = f"The cause is {label} ({sure} % sure)"
    chinese = f"原因是{label}（置信度 {sure}%）"
    english += f", {phase}" if phase else ""
    chinese += f"，{phase}" if phase else ""
    if places:
        english += f": {', '.join(places)}"
        chinese += f"：{'，'.join(places)}"
    return pick(lang, f"{english}.", f"{chinese}。")


def _also(note: str, lang: str) -> str:
    text = said(note, lang).rstrip(".。")
    begins = note[:1].isupper()  # a sentence of its own
    return pick(
        lang, f"{text}." if begins else f"Also: {text}.", f"{text}。" if begins else f"另外：{text}。"
    )


def _done(incident: Incident, lang: str) -> str:
    outcome = word("outcome", incident.outcome, lang)
    how = said(incident.recovery.rstrip("."), lang)
    english = (
        f"GradSentinel {outcome}"
        if outcome.split()[0] in {"dropped", "went", "stopped"}
        else f"It was {outcome}"
    )
    chinese = f"处理：{outcome}"
    for head in _SAID_ALREADY.get(incident.outcome, ()):
        how = how.removeprefix(head)
    return pick(lang, f"{english}{f': {how}' if how else ''}.", f"{chinese}{f'：{how}' if how else ''}。")


def _cost(incident: Incident, lang: str) -> str:
    parts = [
        f"{duration(seconds)} {pick(lang, *_SECONDS[name])}"
        for name, seconds in incident.seconds.items()
        if name in _SECONDS
    ]
    if not parts:
        return ""
    return pick(lang, f"It took {', '.join(parts)}.", f"耗时：{'，'.join(parts)}。")
