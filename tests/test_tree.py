"""Round trips of nested states, and walks over nested structures."""

import collections
import enum
import functools
import json
import math
import random
import struct
import subprocess
import sys
import threading
import types
import warnings
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsentinel.state.tree import (
    NATIVE_DTYPES,
    UnsupportedStateError,
    clone_tree,
    flatten,
    format_path,
    map_tensors,
    tensors_in,
    unflatten,
)


def through_disk(state, prefix=""):
    tensors, skeleton = flatten(state, prefix)
    assert all(tensor.is_contiguous() and tensor.dtype in NATIVE_DTYPES for tensor in tensors.values())
    stored = safetensors.torch.load(safetensors.torch.save(tensors))
    return unflatten(stored, json.loads(json.dumps(skeleton, allow_nan=False)))


def same(one, two):
    """Equal in type, order and every bit."""
    return typed(one) == typed(two)


def typed(value):
    return type(value), bits(value)


@functools.singledispatch
def bits(value):
    return value


@bits.register
def _(value: torch.Tensor):
    flat = value.detach().resolve_conj().contiguous().reshape(-1)
    return value.dtype, value.shape, flat.view(torch.uint8).tolist() if value.numel() else []


@bits.register(np.ndarray)
@bits.register(np.generic)
def _(value):
    return value.dtype, value.shape, value.tobytes()


@bits.register
def _(value: dict):
    return [(typed(key), typed(item)) for key, item in value.items()]


@bits.register(list)
@bits.register(tuple)
def _(value):
    return [typed(item) for item in value]


@bits.register
def _(value: float):
    return struct.pack("d", value)


@bits.register
def _(value: complex):
    return struct.pack("dd", value.real, value.imag)


# Of the bit patterns of NaN, one that no arithmetic makes.
odd_nan = struct.unpack("d", struct.pack("Q", 0xFFF8000000000123))[0]
floats = st.floats(allow_nan=True) | st.just(odd_nan) | st.just(-0.0)
text = st.text(st.characters(exclude_categories=())) | st.text("$#.\ud800\udc00a", max_size=4)
hashables = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
dtypes = [
    *NATIVE_DTYPES,
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=count, max_size=count))
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    flat = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()
        if data
        else torch.empty(0, dtype=torch.uint8)
    )
    tensor = flat.view(dtype).reshape(shape)
    return tensor.transpose(0, -1) if shape and draw(st.booleans()) else tensor


@st.composite
def arrays(draw):
    dtype = np.dtype(
        draw(
            st.sampled_from(
                [
                    "?",
                    "i1",
                    "<u2",
                    ">i4",
                    "<u8",
                    "<f2",
                    "<f4",
                    ">f8",
                    "<c8",
                    "<c16",
                    "<M8[s]",
                    "<U2",
                    "S3",
                    "V4",
                ]
            )
        )
    )
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    data = draw(
        st.binary(min_size=math.prod(shape) * dtype.itemsize, max_size=math.prod(shape) * dtype.itemsize)
    )
    if dtype.kind in "?bU":
        data = bytes(len(data))
    array = np.frombuffer(data, dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | floats
    | st.complex_numbers()
    | text
    | st.binary()
    | st.sampled_from(
        [torch.float16, torch.complex128, torch.device("cpu"), torch.device("cuda:3"), torch.Size([2, 0])]
    )
    | st.sampled_from([Path("a/b.c"), Path("/")])
    | tensors()
    | arrays()
    | hashables
)
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(hashables, max_size=3)
        | st.dictionaries(hashables, inner, max_size=4)
        | st.dictionaries(text, inner, max_size=4)
    ),
    max_leaves=10,
)


class TestRoundTrip:
    @given(states)
    def test_any_state_comes_back_exactly(self, state):
        assert same(through_disk(state), state)

    @pytest.mark.filterwarnings("ignore:ComplexHalf")
    @given(states)
    def test_a_clone_is_the_same(self, state):
        assert same(clone_tree(state), state)

    def test_optimizer_state_with_its_integer_keys(self):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        names, _ = flatten(optimizer.state_dict(), "optimizer")
        assert "optimizer.state.0.exp_avg" in names
        assert same(through_disk(optimizer.state_dict()), optimizer.state_dict())

    def test_random_states(self):
        state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}  # noqa: NPY002
        assert same(through_disk(state), state)

    def test_keys_of_equal_text_stay_apart(self):
        state = {
            1: "a",
            "1": "b",
            1.5: "c",
            "1.5": torch.ones(1),
            None: torch.zeros(1),
            "None": 1,
            True + 1: 2,
        }
        assert same(through_disk(state), state)

    def test_tensor_names_that_collide(self):
        state = {
            "a.b": torch.ones(1),
            "a": {"b": torch.zeros(1)},
            "__metadata__": torch.ones(2),
            "": torch.ones(3),
        }
        assert same(through_disk(state), state)

    def test_keys_that_look_like_tags(self):
        state = {"$tensor": 1, "x": {"$set": [2]}}
        assert same(through_disk(state), state)

    def test_subclasses_come_back_as_their_base(self):
        class Pair(NamedTuple):
            a: int
            b: torch.Tensor

        class Text(str):
            __slots__ = ()

        state = {
            "pair": Pair(1, torch.ones(1)),
            "ordered": collections.OrderedDict(b=1, a=2),
            "default": collections.defaultdict(list, a=[1]),
            "user": collections.UserDict(a=1),
            "text": Text("t"),
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "pure": PurePosixPath("p"),
        }
        back = through_disk(state)
        assert same(
            back,
            {
                "pair": (1, torch.ones(1)),
                "ordered": {"b": 1, "a": 2},
                "default": {"a": [1]},
                "user": {"a": 1},
                "text": "t",
                "parameter": torch.ones(2),
                "pure": Path("p"),
            },
        )
        assert not back["parameter"].requires_grad

    def test_an_integer_beyond_the_limit_on_digits(self):
        assert through_disk(-(10**5000)) == -(10**5000)

    @pytest.mark.parametrize("coalesced", [True, False])
    def test_sparse_tensors(self, coalesced):
        sparse = torch.sparse_coo_tensor([[0, 2, 2]], [1.0, 2.0, 3.0], (4,), check_invariants=True)
        sparse = sparse.coalesce() if coalesced else sparse
        back = through_disk({"s": sparse})["s"]
        assert back.is_coalesced() == coalesced
        assert same(back._indices(), sparse._indices())
        assert same(back._values(), sparse._values())
        assert back.shape == (4,)

    def test_conjugate_and_negative_views(self):
        number = torch.tensor([1 + 2j])
        assert same(
            through_disk([number.conj(), number.conj().imag]),
            [number.conj().resolve_conj(), torch.tensor([-2.0])],
        )

    @pytest.mark.parametrize("name", ["float8_e8m0fnu", "float4_e2m1fn_x2"])
    def test_new_small_floats(self, name):
        dtype = getattr(torch, name, None)
        if dtype is None:
            pytest.skip(f"this torch has no {name}")
        tensor = torch.tensor([1, 200, 7], dtype=torch.uint8).view(dtype)
        assert same(through_disk(tensor).view(torch.uint8), tensor.view(torch.uint8))

    def test_numpy_oddities(self):
        structured = np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8", (2,))])
        state = [
            structured,
            structured[0],
            np.float32("nan"),
            np.longdouble(1) / 3,
            np.str_(""),
            np.str_("é"),
            np.bytes_(b"x"),
        ]
        state += [
            np.datetime64("2026-01-31"),
            np.bool_(True),
            np.array("text"),
            np.array([], dtype="U"),
            np.float64(2),
        ]
        assert same(through_disk(state), state)
        assert same(through_disk({np.int64(3): 1}), {np.int64(3): 1})

    def test_a_read_only_array_comes_back_writable(self):
        array = np.arange(3)
        array.flags.writeable = False
        back = through_disk(array)
        back[0] = 7
        assert back[0] == 7


class TestMemory:
    def test_views_are_copied_and_wholes_are_not(self):
        whole, base = torch.arange(4.0), torch.arange(6.0)
        flat, _ = flatten({"whole": whole, "left": base[:3], "right": base[3:]})
        assert flat["whole"].data_ptr() == whole.data_ptr()
        assert flat["left"].untyped_storage().nbytes() == 12
        safetensors.torch.save(flat)

    def test_a_view_of_the_whole_is_copied_too(self):
        base = torch.arange(6.0)
        flat, _ = flatten({"a": base, "b": base.view(2, 3)})
        safetensors.torch.save(flat)

    def test_views_stay_views_if_asked(self):
        base = torch.arange(6.0)
        flat, _ = flatten({"left": base[:3], "right": base[3:]}, copy_views=False)
        assert flat["right"].untyped_storage().data_ptr() == base.data_ptr()

    def test_a_tied_weight_is_stored_once(self):
        tied = torch.nn.Parameter(torch.ones(3))
        flat, skeleton = flatten({"embed": tied, "head": tied.data})
        assert list(flat) == ["embed"]
        back = unflatten(flat, skeleton)
        assert back["embed"] is back["head"]

    def test_empty_tensors_are_not_taken_for_one(self):
        state = [torch.empty(0), torch.empty(0, 2), torch.empty(0, dtype=torch.int8)]
        assert same(through_disk(state), state)


class Colour(enum.IntEnum):
    RED = 1


@dataclass
class Config:
    x: int = 1


class TestRefusal:
    @pytest.mark.parametrize(
        ("thing", "name"),
        [
            (object(), "object"),
            (lambda: 1, "function"),
            ((i for i in ()), "generator"),
            (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
            (threading.Lock(), "lock"),
            (Config(), "Config"),
            (torch, "module"),
            (int, "type"),
            (bytearray(b"x"), "bytearray"),
            (range(3), "range"),
            (torch.Generator(), "torch._C.Generator"),
            (Colour.RED, "Colour"),
            (np.array([object()]), "numpy.ndarray"),
            (np.ma.array([1]), "numpy.ma.MaskedArray"),
            (torch.empty(1, device="meta"), "torch.Tensor"),
            (torch.nn.UninitializedBuffer(), "torch.nn.parameter.UninitializedBuffer"),
        ],
    )  # fmt: skip
    def test_names_the_place_and_the_type(self, thing, name):
        with pytest.raises(UnsupportedStateError) as caught:
            flatten({"optimizer": {"state": {3: {"foo": [thing]}}}})
        message = str(caught.value)
        assert message.startswith("optimizer.state[3].foo[0]: object of type ")
        assert name in message
        assert "cannot be stored; " in message
        assert isinstance(caught.value, TypeError)

    def test_says_what_to_give(self):
        with pytest.raises(
            UnsupportedStateError,
            match=r"^state\[3\]: object of type object cannot be stored; give tensors, numbers, strings",
        ):
            flatten([0, 0, 0, object()], "state")

    def test_compressed_sparse_tensors(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of their beta state, once per process
            compressed = torch.eye(2).to_sparse_csr()
        with pytest.raises(UnsupportedStateError, match=r"the state: .*dense or sparse COO"):
            flatten(compressed)

    def test_containers_that_contain_themselves(self):
        state = {"a": []}
        state["a"].append(state)
        with pytest.raises(UnsupportedStateError, match=r"a\[0\]: .*contains itself"):
            flatten(state)

    def test_bottomless_nests(self):
        state, key = [], ()
        for _ in range(150):
            state, key = [state], (key,)
        for nest in (state, {key: 1}, {key}):
            with pytest.raises(UnsupportedStateError, match="nested too deeply"):
                flatten(nest)

    @pytest.mark.parametrize("key", [torch.ones(1), torch.nn.Parameter(torch.ones(1)), Colour.RED, object()])
    def test_keys(self, key):
        with pytest.raises(UnsupportedStateError):
            flatten({key: 1})
        with pytest.raises(UnsupportedStateError):
            flatten({key, 1})


class TestDamage:
    @pytest.mark.parametrize(
        "skeleton",
        [
            {"$tensor": "absent"},
            {"$tensor": ["t"]},
            {"$tensor": "t", "dtype": "nn"},
            {"$tensor": "t", "dtype": "torch.complex64"},
            {"$unknown": 1},
            {"$dtype": "nn"},
            {"$dict": [1]},
            {"$dict": [[[], 1]]},
            {"$set": [[]]},
            {"$bytes": "?"},
            {"$int": "x"},
            {"$float": ["nan", "00"]},
            {"$device": "nowhere"},
            {"$numpy": {"$bytes": "AAAAAAAAAAA="}, "dtype": "|O", "shape": [1]},
            {"$numpy": 1, "dtype": "builtins.exit"},
            {"$sparse": [{"$tensor": "t"}], "size": [1], "coalesced": True},
        ],
    )
    def test_is_one_kind_of_error(self, skeleton):
        with pytest.raises(ValueError):  # noqa: PT011
            unflatten({"t": torch.ones(3)}, skeleton)

    def test_without_numpy_arrays_are_tensors(self):
        state = {"a": np.arange(3), "s": np.float32(0.5), "other": 1}
        tensors, skeleton = flatten(state)
        code = (
            "import sys, json, warnings; warnings.simplefilter('ignore'); sys.modules['numpy'] = None\n"
            "import torch\nfrom gradsentinel.state.tree import flatten, unflatten\n"
            f"back = unflatten({{'a': torch.arange(3)}}, json.loads({json.dumps(skeleton)!r}))\n"
            "assert torch.equal(back['a'], torch.arange(3)) and back['s'] == 0.5\n"
            "assert flatten(back)[1]['other'] == 1\n"
        )
        assert list(tensors) == ["a"]
        subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603


class Output(collections.OrderedDict):
    """Like the model outputs of Hugging Face: items are attributes too."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Graph:
    """Like the data of PyTorch Geometric: keys and items, but no Mapping."""

    def __init__(self, **items):
        self.items_ = items

    def keys(self):
        return self.items_.keys()

    def __getitem__(self, key):
        return self.items_[key]


class Point(NamedTuple):
    x: torch.Tensor
    y: int


@dataclass(frozen=True)
class Frozen:
    inputs: torch.Tensor
    more: list = field(default_factory=list)
    later: int = field(init=False, repr=False)


class TestWalk:
    def test_finds_tensors_in_every_container(self):
        t = torch.ones(1)
        batch = {
            "ids": t,
            "more": [Point(t, 1), {0: t}],
            "frozen": Frozen(t, [t]),
            "encoding": collections.UserDict(mask=t),
            "graph": Graph(edge_index=t),
            "set": {t},
            "deque": collections.deque([t]),
            "text": "abc",
            "module": torch.nn.Linear(1, 1),
        }
        assert [path for path, _ in tensors_in(batch)] == [
            *("ids", "more[0].x", "more[1][0]", "frozen.inputs", "frozen.more[0]"),
            *("encoding.mask", "graph.edge_index", "set[0]", "deque[0]"),
        ]
        assert all(tensor is t for _, tensor in tensors_in(batch))

    def test_a_bare_tensor_has_no_path(self):
        assert [path for path, _ in tensors_in(torch.ones(1))] == [""]

    def test_cycles_end(self):
        loop = [torch.ones(1)]
        loop.append({"again": loop})
        assert [path for path, _ in tensors_in(loop)] == ["[0]"]

    def test_stops_at_the_depth(self):
        assert [path for path, _ in tensors_in([torch.ones(1), [torch.ones(1)]], max_depth=1)] == ["[0]"]

    def test_writes_paths_as_in_python(self):
        assert format_path(("a b", "c", 0, ("x", 1), "d.e")) == "a b.c[0][('x', 1)]['d.e']"


class TestMap:
    def test_keeps_the_types(self):
        t = torch.ones(1)
        output = Output(loss=t, other=None)
        batch = {
            "point": Point(t, 1),
            "frozen": Frozen(t, [t, "a"]),
            "ordered": collections.OrderedDict(a=t),
            "default": collections.defaultdict(list, a=t),
            "output": output,
            "encoding": collections.UserDict(mask=t),
            "proxy": types.MappingProxyType({"a": t}),
            "deque": collections.deque([t], maxlen=3),
            "max": torch.max(torch.ones(1, 2), dim=1),
            "size": t.shape,
            "graph": Graph(x=t),
        }
        doubled = map_tensors(lambda tensor: tensor * 2, batch)
        assert {key: type(value) for key, value in doubled.items()} == {
            key: type(value) for key, value in batch.items()
        }
        assert doubled["point"].x == doubled["frozen"].inputs == doubled["frozen"].more[0] == 2
        assert doubled["output"].loss == doubled["output"]["loss"] == 2
        assert doubled["default"]["new"] == []
        assert doubled["deque"].maxlen == 3
        assert doubled["proxy"]["a"] == doubled["encoding"]["mask"] == doubled["max"].values == 2
        assert doubled["graph"] is batch["graph"]
        assert output["loss"] is t
        assert batch["frozen"].more[0] is t

    def test_does_not_write_through_a_mapping_that_shares_its_items(self):
        class View(collections.abc.Mapping):
            def __init__(self, items, *, strict=True):
                self._items = items

            def __getitem__(self, key):
                return self._items[key]

            def __iter__(self):
                return iter(self._items)

            def __len__(self):
                return len(self._items)

        class Odd(View):
            def __init__(self, *, items):
                super().__init__(items)

        items = {"a": torch.ones(1)}
        assert map_tensors(lambda t: t * 2, View(items))["a"] == 2
        assert type(map_tensors(lambda t: t * 2, Odd(items=items))) is dict
        assert items["a"] == 1

    def test_cycles_and_repeats_stay(self):
        t = torch.ones(1)
        loop = [t, t]
        loop.append(loop)
        mapped = map_tensors(torch.clone, loop)
        assert mapped[2] is mapped
        assert mapped[0] is mapped[1] is not t

    def test_errors_of_the_function_come_through(self):
        def fail(tensor):
            raise LookupError("mine")

        with pytest.raises(LookupError, match="mine"):
            map_tensors(fail, types.MappingProxyType({"a": torch.ones(1)}))


class TestClone:
    def test_shares_nothing(self):
        state = {"w": torch.ones(2, requires_grad=True) * 1, "l": [bytearray(b"a"), np.ones(2)], "s": {1}}
        copied = clone_tree(state)
        state["w"].data.zero_()
        state["l"][0][0] = 0
        state["l"][1][:] = 0
        state["s"].add(2)
        assert copied["w"].sum() == 2
        assert not copied["w"].requires_grad
        assert copied["l"][0] == b"a"
        assert copied["l"][1].sum() == 2
        assert copied["s"] == {1}

    def test_tied_tensors_stay_tied(self):
        tied = torch.nn.Parameter(torch.ones(3))
        copied = clone_tree({"a": tied, "b": tied.data, "c": tied.data[1:]})
        assert copied["a"] is copied["b"]
        assert copied["c"].shape == (2,)
        assert copied["c"].untyped_storage().nbytes() == 8

    def test_moves(self):
        assert clone_tree([torch.ones(1)], "meta")[0].is_meta
        t = torch.ones(1)
        assert clone_tree(t, "cpu").data_ptr() != t.data_ptr()

    def test_keeps_what_cannot_be_copied(self):
        lock, module = threading.Lock(), torch.nn.Linear(1, 1)
        copied = clone_tree([lock, module, torch.nn.UninitializedBuffer(), torch.float16])
        assert copied[0] is lock
        assert copied[1] is module
        assert copied[3] is torch.float16
