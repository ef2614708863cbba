"""Double of Module and ModuleList: names of parameters, and calls to forward."""

from __future__ import annotations


class Module:
    def __init__(self):
        self._modules, self._parameters = {}, {}

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def __getattr__(self, name):
        for place in ("_parameters", "_modules"):
            found = self.__dict__.get(place)
            if found is not None and name in found:
                return found[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name, value):
        from .parameter import Parameter

        if isinstance(value, Parameter):
            self._parameters[name] = value
        elif isinstance(value, Module):
            self._modules[name] = value
        else:
            super().__setattr__(name, value)

    def register_parameter(self, name, param):
        self._parameters[name] = param

    def named_modules(self, prefix=""):
        yield prefix, self
        for name, module in self._modules.items():
            if module is not None:
                yield from module.named_modules(f"{prefix}.{name}" if prefix else name)

    def named_parameters(self):
        for prefix, module in self.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield (f"{prefix}.{name}" if prefix else name), parameter


class ModuleList(Module):
    def __init__(self, modules):
        super().__init__()
        for index, module in enumerate(modules):
            self._modules[str(index)] = module

    def __getitem__(self, index):
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._modules[str(index % len(self))]

    def __len__(self):
        return len(self._modules)
