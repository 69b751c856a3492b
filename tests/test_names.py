"""Which parameter is number 17: the map that a run writes, and the command that reads it."""

import json
import os

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from typer.testing import CliRunner

from gradsentinel import NanCallback, Sentinel, cli, names
from gradsentinel.errors import StoreError


class Zoo(nn.Module):
    """A tied weight, a frozen one, one that no optimizer has, and a scalar."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.lin = nn.Linear(3, 4)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.lin.bias.requires_grad_(False)

    def forward(self, x):
        return (self.head(self.emb(x)) * self.scale).mean() + self.lin(self.emb(x)).mean()


def run_dir_of(tmp_path, model, optimizer, **more):
    with Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=tmp_path / "run", **more):
        pass
    return tmp_path / "run"


def zoo(tmp_path):
    model = Zoo()
    extra = nn.Parameter(torch.zeros(2, 2))
    first = torch.optim.AdamW([{"params": [model.lin.weight, model.scale]}, {"params": [model.emb.weight]}])
    second = torch.optim.SGD([extra, model.scale], lr=0.1)
    return run_dir_of(tmp_path, model, [first, second])


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["params", *map(str, arguments)], env={"COLUMNS": "200"})


def told(*arguments):
    result = invoke(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


def test_every_parameter_is_there_with_all_its_numbers(tmp_path):
    data = names.read_map(zoo(tmp_path), 0)
    assert data["schema"] == 1
    assert data["world_size"] == 1
    assert data["rank"]["rank"] == 0
    assert data["optimizers"] == ["AdamW", "SGD"]
    rows = {entry["name"]: entry for entry in data["parameters"]}
    # the order of Module.named_parameters, which gives a module's own parameters first
    assert list(rows) == ["scale", "emb.weight", "lin.weight", "lin.bias", "optimizer1.group0.0"]
    assert [entry["index"] for entry in rows.values()] == [0, 1, 2, 3, 4]
    assert [entry["offset"] for entry in rows.values()] == [0, 1, 16, 28, 32]
    assert [entry["numel"] for entry in rows.values()] == [1, 15, 12, 4, 4]
    assert [entry["trainable_index"] for entry in rows.values()] == [0, 1, 2, None, None]
    assert rows["emb.weight"]["aliases"] == ["head.weight"]
    assert (rows["emb.weight"]["module"], rows["emb.weight"]["module_type"]) == ("emb", "Embedding")
    assert rows["emb.weight"]["optimizers"] == [
        {"optimizer": 0, "group": 1, "position": 0, "index": 2, "offset": 0}
    ]
    assert rows["scale"]["shape"] == []
    assert rows["scale"]["module"] == ""
    assert rows["scale"]["optimizers"] == [
        {"optimizer": 0, "group": 0, "position": 1, "index": 1, "offset": 12},
        {"optimizer": 1, "group": 0, "position": 1, "index": 1, "offset": 4},
    ]
    assert (rows["lin.bias"]["trainable"], rows["lin.bias"]["optimizers"]) == (False, [])
    assert rows["optimizer1.group0.0"]["module"] is None
    assert rows["optimizer1.group0.0"]["trainable"] is True


def test_the_numbers_are_those_of_the_optimizers_own_state_dict(tmp_path):
    model = Zoo()
    groups = [{"params": [model.lin.weight, model.scale]}, {"params": [model.emb.weight]}]
    optimizer = torch.optim.AdamW(groups)
    data = names.read_map(run_dir_of(tmp_path, model, optimizer), 0)
    model(torch.tensor([1, 2])).backward()
    optimizer.step()
    shapes = {
        number: list(state["exp_avg"].shape) for number, state in optimizer.state_dict()["state"].items()
    }
    for number, shape in shapes.items():
        (match,) = [m for m in names.by_index(data, number) if "optimizer 0" in m.meaning]
        assert match.entry["shape"] == shape


def test_the_offsets_are_those_of_parameters_to_vector(tmp_path):
    model = Zoo()
    data = names.read_map(run_dir_of(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1)), 0)
    with torch.no_grad():
        model.lin.weight[2, 1] = 12345.0
    vector = nn.utils.parameters_to_vector(model.parameters())
    place = int((vector == 12345.0).nonzero())
    matches = names.by_offset(data, place)
    assert [(match.entry["name"], match.element) for match in matches] == [("lin.weight", (2, 1))]
    assert "all parameters" in matches[0].meaning
    assert "group 0 of optimizer 0 (SGD)" in matches[0].meaning


def test_lazy_parameters_get_their_shape_when_they_have_one(tmp_path):
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=tmp_path) as sentinel:
        before = names.read_map(tmp_path, 0)["parameters"]
        for batch in sentinel.steps([torch.randn(2, 3)] * 2):
            sentinel.backward(model(batch).mean())
            sentinel.step()
        after = names.read_map(tmp_path, 0)["parameters"]
    assert [entry["shape"] for entry in before] == [None, None, [1, 4], [1]]
    assert [entry["offset"] for entry in before] == [None] * 4
    assert [entry["shape"] for entry in after] == [[4, 3], [4], [1, 4], [1]]
    assert [entry["offset"] for entry in after] == [0, 12, 16, 20]


def test_a_parameter_that_is_added_later_is_added_to_the_map(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    late = nn.Parameter(torch.ones(3))
    with Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=tmp_path) as sentinel:
        for number, batch in enumerate(sentinel.steps([torch.randn(2, 2)] * 3)):
            if number == 1:
                optimizer.add_param_group({"params": [late]})
            sentinel.backward(model(batch).mean())
            sentinel.step()
    added = names.read_map(tmp_path, 0)["parameters"][-1]
    assert (added["name"], added["shape"]) == ("optimizer0.group1.0", [3])


def test_nothing_is_written_where_there_is_nothing_to_keep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Sentinel(model, optimizer, callbacks=[NanCallback()]) as sentinel:
        assert list(tmp_path.iterdir()) == []
        for batch in sentinel.steps([torch.full((2, 2), torch.nan)]):
            sentinel.backward(model(batch).mean())
            sentinel.step()
    assert names.read_map(sentinel.run_dir, 0)["parameters"][0]["name"] == "weight"


def test_a_disk_that_refuses_does_not_stop_the_run(tmp_path, caplog):
    (tmp_path / "params-rank0.json").mkdir()
    (tmp_path / "params-rank0.json" / "occupied").touch()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=tmp_path) as sentinel:
        for batch in sentinel.steps([torch.randn(2, 2)] * 2):
            sentinel.backward(model(batch).mean())
            sentinel.step()
    assert sentinel.applied_steps == 2
    assert sentinel.incidents == ()
    assert "could not be written" in caplog.text


# -- the command ---------------------------------------------------------------------------------------


def test_a_number_is_told_in_every_way_it_can_be_meant(tmp_path):
    found = told(zoo(tmp_path), "--index", 2)
    assert [(entry["name"], entry["meaning"]) for entry in found] == [
        ("emb.weight", "number 2 of optimizer 0 (AdamW), as its state_dict() counts"),
        ("lin.weight", "number 2 of all parameters; of the trainable ones, as DDP's messages count"),
    ]
    result = invoke(tmp_path / "run", "--index", 2)
    assert result.exit_code == 0
    assert "also      head.weight" in result.stdout
    assert "number 0 in it, offset 0 in the group" in result.stdout  # lin.weight in its own optimizer


def test_an_offset_is_an_element(tmp_path):
    found = told(zoo(tmp_path), "--offset", 13)
    assert [(entry["name"], entry["element"]) for entry in found] == [
        ("emb.weight", [4, 0]),  # 1 + 4 * 3 + 0 in all parameters
        ("emb.weight", [4, 1]),  # 13 = 4 * 3 + 1 in the second group
    ]
    assert "emb.weight[4, 1]" in invoke(tmp_path / "run", "--offset", 13).stdout


def test_names_are_found_by_a_part_and_by_a_pattern(tmp_path):
    run_dir = zoo(tmp_path)
    assert [entry["name"] for entry in told(run_dir, "--name", "lin.")] == ["lin.weight", "lin.bias"]
    assert [entry["name"] for entry in told(run_dir, "--name", "*.weight")] == ["emb.weight", "lin.weight"]
    assert [entry["name"] for entry in told(run_dir, "--name", "head")] == ["emb.weight"]
    table = invoke(run_dir).stdout.splitlines()
    assert table[0].split() == ["index", "name", "shape", "dtype", "offset", "trained", "optimizer", "also"]
    assert len(table) == 7
    assert "head.weight" in table[3]


def test_each_rank_has_its_own(tmp_path):
    run_dir = zoo(tmp_path)
    other = json.loads((run_dir / "params-rank0.json").read_text())
    for entry in other["parameters"]:
        entry["name"] = f"stage2.{entry['name']}"
    (run_dir / "params-rank3.json").write_text(json.dumps(other))
    assert told(run_dir, "--index", 0, "--rank", 3)[0]["name"] == "stage2.scale"
    assert told(run_dir, "--index", 0)[0]["name"] == "scale"
    result = invoke(run_dir, "--index", 0, "--rank", 1)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "ranks 0, 3" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--index", 99], "there are 5"),
        (["--offset", 9999], "36 elements"),
        (["--name", "nobody"], "no name matches 'nobody'"),
        (["--index", 1, "--name", "x"], "give one of"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(tmp_path, arguments, words):
    result = invoke(zoo(tmp_path), *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"schema": 2}', '{"schema": 1}', '{"schema": 1, "parameters": 1}', "[" * 100_000),
        '{"schema": 1, "optimizers": [], "parameters": [{"index": "0"}]}',
        '{"schema": 1, "optimizers": [], "parameters": [{"index": 0, "name": "a", "optimizers": [1]}]}',
    ],
)
def test_a_damaged_map_is_named(tmp_path, text):
    (tmp_path / "params-rank0.json").write_text(text)
    with pytest.raises(StoreError, match=r"params-rank0\.json"):
        names.read_map(tmp_path, 0)
    result = invoke(tmp_path, "--index", 0)
    assert (result.exit_code, result.stdout) == (2, "")


def test_no_run_directory(tmp_path):
    for path in (tmp_path / "missing", tmp_path):
        result = invoke(path)
        assert result.exit_code == 2
        assert str(path) in result.stderr


def test_a_name_cannot_command_the_terminal(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_parameter("a\x1b[31m[red]\nb", nn.Parameter(torch.ones(2)))

        def forward(self, x):
            return x

    model = Odd()
    run_dir = run_dir_of(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    for arguments in ([], ["--index", 0]):
        shown = invoke(run_dir, *arguments)
        assert shown.exit_code == 0
        assert "\x1b" not in shown.stdout
        assert "a\\x1b[31m[red] b" in shown.stdout


def test_a_file_may_be_read_only_for_others(tmp_path):
    run_dir = zoo(tmp_path)
    assert os.stat(run_dir / "params-rank0.json").st_mode & 0o400  # noqa: PTH116 - the mode is what matters


def test_names_are_those_of_the_authors_not_of_wrappers(tmp_path):
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    data = names.read_map(run_dir_of(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1)), 0)
    rows = [(e["name"], e["aliases"], e["module"], e["module_type"]) for e in data["parameters"]]
    assert rows == [("0.weight", [], "0", "Linear"), ("0.bias", [], "0", "Linear")]
