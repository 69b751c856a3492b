"""The program that becomes repro.py, with places for what differs from incident to incident."""

PROGRAM = '''\
#!/usr/bin/env python3
# Reproduces one bad operator. Needs torch and safetensors, nothing else, and the directory beside this file.
#
#@header@#
#
#     python repro.py [--device cpu] [--dtype float32] [--import NAME]
#
# Exit code 0: the bad value is there again. 1: it is not, as with a fixed operator. 2: it cannot be run here.

import argparse
import importlib
import os
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

#@values@#


def operator_arguments(saved, wanted, DEVICE):
    """What the operator was given."""
    return #@arguments@#


def function_arguments(saved, wanted, DEVICE):
    """What the custom autograd.Function was given, and the gradients of its outputs."""
    return #@function@#


def lost_arguments(saved, wanted, DEVICE):
    """What the operator of a narrow type was given that lost what the other one stumbles over."""
    return #@lost@#


def main():
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--device", default=RAN_ON if is_here(RAN_ON) else "cpu", help="where to run it")
    parser.add_argument("--dtype", help="run it in this floating dtype instead, such as float32")
    parser.add_argument(
        "--import", dest="modules", action="append", default=[], metavar="NAME", help="import this first"
    )
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    sys.path.insert(0, os.getcwd())
    for name in [*options.modules, *MODULES]:
        load(name)
    for name in LIBRARIES:
        load_library(name)

    tensors = load_file(Path(__file__).resolve().parent / FOLDER / "state.safetensors")
    saved, wanted = reader(tensors, device, dtype)
    print(f"{TITLE}; torch {torch.__version__}, {device}" + (f", {options.dtype}" if dtype else ""))
    if FUNCTION is not None:
        function = find_function(options.modules)
        if function is not None:
            return report(run_function(function, *function_arguments(saved, wanted, device)), [], None)
    args, kwargs = operator_arguments(saved, wanted, device)
    if LOST is not None:
        wide = reader(tensors, device, torch.float32)
        if not run_lost(lost_arguments(saved, wanted, device), lost_arguments(*wide, device)):
            print("NOT REPRODUCED: nothing is lost here")
            return 1
        print(f"{TITLE.partition(',')[0]}, later, of what came of it:")
    operator = find_operator(OPERATOR)
    if operator is None:
        print(f"{OPERATOR} is not known here. Import the module that makes it: --import {SCRIPT or 'NAME'}")
        return 2
    inputs = leaves([args, kwargs])
    inputs = [tensor.clone() for tensor in inputs] if WRITTEN or STATISTICS else inputs  # it overwrites some
    describe("input", inputs)
    with memory_filled(FILL), torch.no_grad():
        result = operator(*args, **kwargs)
    outputs = leaves(result) or leaves([args[number] for number in WRITTEN])
    outputs += leaves([args[number] for number in STATISTICS])
    return report(outputs, inputs, EXPECTED)


def reader(tensors, device, dtype):
    """Return what reads stored tensors and dtype arguments; floating ones in the dtype asked for, if any."""

    def saved(name, kind=None):
        """One stored tensor; what safetensors has no name for is stored as bits."""
        tensor = tensors[name].clone()
        if kind is not None:
            tensor = torch.view_as_complex(tensor) if kind.is_complex else tensor.view(kind)
        tensor = tensor.to(device)
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    def wanted(kind):
        """A dtype argument, under --dtype the one asked for."""
        return dtype if dtype is not None and kind.is_floating_point else kind

    return saved, wanted


# -- what is needed ------------------------------------------------------------------------------------


def load(name):
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"needs: import {name} ({error})")


def load_library(name):
    try:
        torch.ops.load_library(name)
    except OSError as error:
        print(f"needs: torch.ops.load_library({name!r}) ({error})")


def is_here(device):
    backend = getattr(torch, device.partition(":")[0], None)
    return backend is not None and hasattr(backend, "is_available") and backend.is_available()


def find_operator(full_name):
    namespace, _, rest = full_name.partition("::")
    name, _, overload = rest.rpartition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError:
        return None


def find_function(allowed):
    module, name = FUNCTION
    try:
        if IN_SCRIPT and module not in allowed:
            raise ImportError(f"{module} is a training script, imported only on --import {module}")
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        print(f"needs: from {module} import {name} ({error}); without it the operator inside is run alone")
        return None
    return found


def run_lost(narrow, wide):
    """Run the operator of a narrow type as it ran, and in float32; say if it still loses that element."""
    name, index, was = LOST
    print(f"{name.replace('::', '.')}, as it ran:")
    operator = find_operator(name)
    if operator is None:
        print(f"  {name} is not known here")
        return False
    describe("input", leaves(list(narrow)))
    with torch.no_grad():
        output = leaves(operator(*narrow[0], **narrow[1]))[0]
        try:
            should = leaves(operator(*wide[0], **wide[1]))[0][index].item()
        except (RuntimeError, TypeError):  # it has no form in float32
            should = "?"
    describe("output", [output])
    now = output[index].item()
    print(f"  output 0{list(index) if index else ''}: {was} then, {now} now, {should} in float32")
    return should != now and (now == 0 if was == "0" else now - now != 0)


def run_function(function, args, grads):
    print(f"{FUNCTION[1]}.apply, then its backward" if BACKWARD else f"{FUNCTION[1]}.apply")
    args = [value.requires_grad_() if trainable(value) else value for value in args]
    inputs = [value for value in args if torch.is_tensor(value) and value.requires_grad]
    describe("input", inputs)
    with memory_filled(FILL):
        with ExitStack() as stack:  # the operators inside run in the dtypes that they ran in
            for kind, name in AUTOCAST:
                stack.enter_context(torch.autocast(kind, getattr(torch, name)))
            result = function.apply(*args)
        outputs = list(result) if isinstance(result, (list, tuple)) else [result]
        if BACKWARD:
            pairs = [(o, g) for o, g in zip(outputs, grads) if torch.is_tensor(o) and o.requires_grad]
            describe("gradient of an output", [gradient for _, gradient in pairs if gradient is not None])
            starts, gradients = [output for output, _ in pairs], [gradient for _, gradient in pairs]
            made = torch.autograd.grad(starts, inputs, gradients, allow_unused=True)
            outputs = [gradient for gradient in made if gradient is not None]
    return leaves(outputs)


def trainable(value):
    return torch.is_tensor(value) and (value.is_floating_point() or value.is_complex())


@contextmanager
def memory_filled(wanted):
    """Torch fills fresh memory with NaN, so that what nobody writes shows."""
    if wanted:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
    yield


# -- what comes out ------------------------------------------------------------------------------------


def leaves(value):
    if torch.is_tensor(value):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [leaf for item in items for leaf in leaves(item)]


def numbers(tensor):
    """The values as real, dense floating numbers; None if they are none."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = (values.coalesce() if values.layout is torch.sparse_coo else values).values()
    values = values.float() if values.dtype.itemsize == 1 else values
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def kind_of(tensor):
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def describe(what, tensors, first=0):
    for number, tensor in enumerate(tensors, first):
        text = kind_of(tensor)
        values = numbers(tensor)
        if values is not None:
            finite = values[torch.isfinite(values)].double()
            nan, inf = int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
            text += f", {nan} NaN, {inf} Inf"
            if finite.numel():
                text += f", else from {float(finite.min()):.6g} to {float(finite.max()):.6g}"
                zeros = int((finite == 0).sum())
                text += f", {zeros} exact zero{'s' if zeros > 1 else ''}" if zeros else ""
        print(f"  {what} {number}: {text}")


def report(outputs, inputs, expected):
    """Say what came out; the exit code of the program."""
    shown = range(len(outputs)) if expected is None else expected[:1]
    for number, output in enumerate(outputs):
        if number in shown:
            describe("output", [output], number)
        else:  # it may hold scratch memory, which is never the same
            print(f"  output {number}: {kind_of(output)}")
    flags = [None if (values := numbers(output)) is None else ~torch.isfinite(values) for output in outputs]
    again = any(bool(flag.any()) for flag in flags if flag is not None)
    if expected is not None and expected[0] < len(outputs) and flags[expected[0]] is not None:
        number, index, value = expected
        place = f"output {number}{list(index) if index else ''}"
        flag, output = flags[number], outputs[number]
        try:
            again = bool(flag[index].any())
            now = output[index].item() if output.layout is torch.strided else ""
        except IndexError:
            now = "not there"
        print(f"  {place}: {value} then, {now} now{operands(inputs, output, index)}")
    print("REPRODUCED: bad values are there again" if again else "NOT REPRODUCED: all is finite here")
    return 0 if again else 1


def operands(inputs, output, index):
    """The numbers that an elementwise operator had for one element."""
    if not POINTWISE or output.layout is not torch.strided:
        return ""
    values = []
    for tensor in inputs:
        try:
            values.append(str(tensor.expand(output.shape)[index].item()))
        except (RuntimeError, IndexError):
            return ""
    return f", from {' and '.join(values)}" if values else ""


if __name__ == "__main__":
    try:
        code = main()
    except (RuntimeError, TypeError, NotImplementedError, OSError, AttributeError) as error:
        print(f"it cannot be run here: {type(error).__name__}: {error}")
        code = 2
    sys.exit(code)
'''
