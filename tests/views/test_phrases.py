"""What the core writes about an incident has a Chinese form: the sentences are taken from the sources."""

import ast
import json
import re
from pathlib import Path

import pytest
from runs_on_disk import train, write_incident

import gradsentinel
from gradsentinel.evidence import Diagnosis
from gradsentinel.views import Views
from gradsentinel.views.markdown import markdown
from gradsentinel.views.phrases import said
from gradsentinel.views.strings import asset

PACKAGE = Path(gradsentinel.__file__).parent
TABLE = json.loads(asset("phrases.zh.json"))
HOLE = re.compile(r"\{[^{}]*\}")
CHINESE = re.compile("[\u4e00-\u9fff\uff00-\uffef]")

WRITERS = """
    evidence incident inquiry recovery repeats again/model_calls again/recompute bus callbacks/batch
    callbacks/batch_evidence callbacks/batch_fields callbacks/batch_gross callbacks/batch_habits
    callbacks/batch_heard callbacks/batch_lookups callbacks/batch_share callbacks/cross_rank
    callbacks/device_health callbacks/escalation callbacks/forecast callbacks/headroom
    callbacks/growth callbacks/health_evidence callbacks/incurable callbacks/initial_state
    callbacks/lifeless
    callbacks/loss_scale callbacks/lost_eps callbacks/magnitude callbacks/nan callbacks/outliers
    callbacks/peaks callbacks/recomputing callbacks/rescue callbacks/resync callbacks/retry
    callbacks/rollback callbacks/saturation callbacks/skip callbacks/spike callbacks/squares
    callbacks/stagnation callbacks/suspicion callbacks/update_ratio callbacks/worries diagnosis/arm
    diagnosis/boundary diagnosis/comparison diagnosis/custom diagnosis/determinism
    diagnosis/diagnose diagnosis/excess diagnosis/fields diagnosis/flipped diagnosis/findings
    diagnosis/fingerprint diagnosis/investigation diagnosis/lone_weight diagnosis/operands
    diagnosis/otherwise diagnosis/passed diagnosis/rehearsal diagnosis/cause diagnosis/data_rules
    diagnosis/remedy diagnosis/replay diagnosis/rules diagnosis/scan diagnosis/self_test
    diagnosis/sighting diagnosis/spiked diagnosis/trace diagnosis/transient diagnosis/update
    diagnosis/verdict integrations/lightning/again integrations/megatron/exchanges
    integrations/megatron/gradients integrations/megatron/host integrations/megatron/places
    integrations/megatron/returns integrations/megatron/search integrations/state_check ranks/blame
    ranks/handover ranks/origin ranks/replicas ranks/testimony ranks/topology state/health
    state/retreat state/ring state/saved_states state/scribe state/together
"""
# Modules that write messages, evidence, remedies, recoveries and notes of incidents.
NO_SENTENCES = {
    # names, numbers and ranges, the same in any language
    *(
        "rank {0}",
        "rank {0}: {1}",
        "{0} of {1}",
        "{0} to {1}",
        "{0} in {1}",
        "{0} is {1}",
        "{0} of the {1}",
        "{0} {1}, before {2}",
    ),
    *("id {0}", "position {0}", "{0} to {1} ({2})", "gradsentinel: {0}", "{0} makes {1}", "the {0} is {1}"),
    # looked for in what torch says
    *("out of bounds", "out of range", "device-side assert"),
    # shown in the terminal while the diagnosis runs
    *("watching every operator", "running micro-batch {0} again", "watching custom Functions"),
    *("computing in float32", "with the weights of step {0}", "with the batch of the last healthy step"),
    *("without the suspicious samples", "running micro-batch {0}, too", "running the compiled code again"),
    *("looking for what else explains it", "with every value of the batch moved a little"),
    *("running micro-batch {0} once more, watched", "looking for what makes it so large"),
    # the end of an error, and of what is too long to be sent
    *(" (is torch.distributed initialised before the Sentinel is made?)", "details of {0} characters"),
    *("the state of step {0}", "the removal of old states", "the known-good states"),
    "the end of the process that writes",
    # parts that are put together here: the whole is in the table
    *("the record(s) with ", "gradient of", " and no ", ", and ", "; it began on ", "one of "),
    # kinds of handovers, and types
    *("in back", "out back", "tuple[Detector, ...]", "Cause | None", "tuple[int, int, int] | None"),
}
ELSEWHERE = re.compile(
    r"(\w*Error|\w*Warning|require|checked|re\.\w+|_?log\w*\.\w+|[\w.]*disk\.\w+|warnings\.\w+|\w*warn\w*)$"
)


def numbered(text):
    """Return a sentence with its holes numbered."""
    holes = iter(range(99))
    return HOLE.sub(lambda _: f"{{{next(holes)}}}", text)


def sentence_of(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return numbered(node.value)
    if isinstance(node, ast.JoinedStr):
        return numbered("".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values))
    return None


def sentences_in(source):
    """Yield what a module writes: strings of several words that are no docstrings, errors or log lines."""

    def walk(node):
        if isinstance(node, ast.Raise) or (
            isinstance(node, ast.Expr) and sentence_of(node.value) is not None
        ):
            return
        if isinstance(node, ast.Call) and ELSEWHERE.fullmatch(ast.unparse(node.func)):
            return
        text = sentence_of(node)
        if text is None:
            for child in ast.iter_child_nodes(node):
                yield from walk(child)
            return
        if " " in text.strip() and len(re.findall("[A-Za-z]", HOLE.sub("", text))) > 1:
            yield text
        for hole in ast.walk(node):
            if isinstance(hole, ast.FormattedValue):
                yield from walk(hole.value)

    yield from walk(ast.parse(source))


def written():
    return {
        name: set(sentences_in((PACKAGE / f"{name}.py").read_text("utf-8"))) - NO_SENTENCES
        for name in WRITERS.split()
    }


def test_every_sentence_has_a_chinese_form():
    missing = {name: sorted(found - TABLE["sentences"].keys()) for name, found in written().items()}
    told = {name: texts for name, texts in missing.items() if texts}
    assert told == {}, "give them a Chinese form in views/assets/phrases.zh.json"


def test_the_modules_that_write_are_all_of_them():
    """A module that makes evidence or a diagnosis is one whose sentences are looked at."""
    outside = {"callbacks/alert", "ranks/testimony", "evidence", "incident"}
    makes = re.compile(r"\bremedy=\(|\bRecovery\(|\.notes \+= ")
    makers = {
        path.relative_to(PACKAGE).with_suffix("").as_posix()
        for folder in ("", "again", "callbacks", "diagnosis", "ranks", "state", "integrations/megatron")
        for path in (PACKAGE / folder).glob("*.py")
        if makes.search(path.read_text("utf-8"))
    }
    assert len(makers) > 20
    assert sorted(makers - set(WRITERS.split()) - outside) == []


def test_holes_are_carried_over():
    wrong = [
        english
        for english, chinese in TABLE["sentences"].items()
        if sorted(HOLE.findall(english)) != sorted(HOLE.findall(chinese)) or not chinese.strip()
    ]
    assert wrong == []


def test_a_sentence_with_its_holes_filled_becomes_chinese_and_loses_nothing():
    wrong = {}
    for english in TABLE["sentences"]:
        holes = [f"name{number}.w" for number in range(len(HOLE.findall(english)))]
        text = english.format(*holes)
        told = said(text, "zh")
        if not CHINESE.search(told) or not all(hole in told for hole in holes) or said(text, "en") != text:
            wrong[english] = told
    assert wrong == {}


SAID = [
    ("the loss is nan (micro-batch 2)", "损失为 nan（微批次 2）"),
    (
        "non-finite gradient in blocks.1.attn.weight and 3 more",
        "blocks.1.attn.weight 及另外 3 个的梯度含 NaN/Inf",
    ),
    ("repair or filter the record(s) with id 13: look at x", "修复或过滤含 id 13 的记录：检查 x"),
    (
        "bad data: x[3] is nan (2 non-finite of 9 values), of the record(s) with id 4; the batch is empty",
        "数据有问题：x[3] 为 nan（9 个值中有 2 个非有限），出自含 id 4 的记录；批次为空",
    ),
    (
        "aten.bmm.default made Inf of finite inputs in the forward pass, in blocks.1.a, m.py:12: s = q @ k",
        "aten.bmm.default 在前向传播中从有限输入得出 Inf，位于 blocks.1.a, m.py:12: s = q @ k",
    ),
    (
        "make the divisor safe: x / (y + eps), or y.clamp(min=eps) (m.py:3)",
        "保证除数安全：x / (y + eps)，或 y.clamp(min=eps)（m.py:3）",
    ),
    (
        "computed again and finite, nothing is lost (2 of 3 retries left)",
        "重新计算后为有限值，没有任何损失（3 次重试还剩 2 次）",
    ),
    (
        "stopped: NanCallback asked for it. The last good state is in /r/snapshots/step-4",
        "已停止：由 NanCallback 要求。最近的完好状态在 /r/snapshots/step-4",
    ),
    (
        "stopped: non-finite gradient in a.w and 3 more; 52 tensors are affected; the worst are listed",
        "已停止：a.w 及另外 3 个的梯度含 NaN/Inf；涉及 52 个张量；此处列出最严重的",
    ),
    ("spread: aten.bmm > aten.sum > a.w, b.w and 7 more", "扩散：aten.bmm > aten.sum > a.w, b.w 及另外 7 个"),
]


@pytest.mark.parametrize(("english", "chinese"), SAID)
def test_sentences_that_are_put_together(english, chinese):
    assert said(english, "zh") == chinese


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing of ours",
        "my own check found 3 things, and said so",
        "<script>alert(1)</script>",
        "w[0], x: y; z",
        "a.b " * 2000,
    ],
)
def test_what_is_not_known_stays_as_it_is(text):
    assert said(text, "zh") == text


@pytest.mark.parametrize("piece", [", in a", " (id 3)", "; look at x", ": look at a and 3 more, of b"])
def test_a_text_made_to_be_ambiguous_is_read_in_bounded_time(piece):
    """The parts looked at are bounded, not the time measured: an unbounded reading would not come back."""
    assert said("the loss is " + piece * 90, "zh")


def test_the_pages_are_chinese_as_a_whole(run_dir):
    train(run_dir, steps=6, bad=[3])
    views = Views(run_dir)
    (row,) = views.incidents(".", "zh")
    page = views.incident(".", row["id"], "zh")
    assert "梯度含 NaN/Inf" in row["message"]
    told = [row["message"], *page["story"], *page["todo"], *page["evidence"]]
    english = re.compile(r"\b(?:the|of|is|was|and|with|or)\b")
    assert [text for text in told if english.search(text)] == []
    assert "梯度含 NaN/Inf" in markdown(run_dir, lang="zh")
    assert "non-finite gradient in" in views.incidents(".", "en")[0]["message"]


def test_what_the_users_own_check_says_is_quoted_beside_chinese(run_dir):
    cause = Diagnosis(cause="math", confidence=0.5, evidence=("my own words about it",), remedy=("ask Ann",))
    incident = write_incident(run_dir, 1, diagnosis=cause, message="tokens per second fell to 3")
    page = Views(run_dir).incident(".", incident.id, "zh")
    assert page["evidence"] == ["my own words about it"]
    assert page["todo"] == ["ask Ann"]
    assert page["row"]["message"] == "tokens per second fell to 3"
