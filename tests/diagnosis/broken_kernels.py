"""A device that makes a mistake, below all that Python can see: the kernel of an operator is another one."""

import warnings

import torch


class Failing:
    """A device that spoils what an operator makes the n-th time: nothing in the program has a part in it.

    The kernel itself is replaced, below autograd: no mode, no hook, no node and no version tells of it.
    """

    def __init__(self, op, change, *, call=0):
        name, self._overload = op.removeprefix("aten.").rsplit(".", 1)
        self._packet = getattr(torch.ops.aten, name)
        self._name = name if self._overload == "default" else f"{name}.{self._overload}"
        self.change, self.call = change, call
        self.calls = 0
        self._inside = False

    def __enter__(self):
        self._real = None
        if hasattr(torch.library, "get_kernel"):  # torch 2.9
            self._real = torch.library.get_kernel(f"aten::{self._name}", "CPU")
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one is there already
            if self._real is None:
                self._library.impl(
                    self._name, lambda *args, **kwargs: self._kernel(0, *args, **kwargs), "CPU"
                )
            else:
                self._library.impl(self._name, self._kernel, "CPU", with_keyset=True)
        return self

    def __exit__(self, *_):
        self._library._destroy()

    def _kernel(self, keys, *args, **kwargs):
        if self._real is None:
            out = torch.empty(0, dtype=next(a.dtype for a in args if isinstance(a, torch.Tensor)))
            result = self._packet.out(*args, **kwargs, out=out)
        else:
            result = self._real.call_boxed(keys, *args, **kwargs)
        if self.calls == self.call:
            self.change(result[0] if isinstance(result, tuple) else result)
        self.calls += 1
        return result
