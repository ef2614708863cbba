"""The tables of docs/plugin.md, from the contract: `python tests/plugin_tables.py` prints them."""

from __future__ import annotations

from trtllm_treewy.plugin_contract import PLUGINS, FieldSpec, PluginSpec, TensorSpec


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _tensor(position: int, tensor: TensorSpec) -> str:
    notes = f"with `{tensor.when[0]}` {tensor.when[1]}" if tensor.when else ""
    if tensor.in_place:
        notes = ", ".join(filter(None, (notes, f"in place of input `{tensor.in_place}`")))
    return _row(
        str(position), f"`{tensor.name}`", f"[{', '.join(tensor.shape)}]", tensor.kind, notes
    )


def _field(field: FieldSpec) -> str:
    need = "required" if field.required else f"default {field.default}"
    choices = " or ".join(str(choice) for choice in field.choices)
    return _row(f"`{field.name}`", field.type, choices, need, field.meaning)


def section(plugin: PluginSpec) -> str:
    """The tables of one plugin."""
    lines = [f"### {plugin.name}", "", f"{plugin.meaning} Operator: `treewy::{plugin.operator}`."]
    if plugin.fields:
        lines += ["", _row("field", "type", "values", "", "meaning"), "|---|---|---|---|---|"]
        lines += [_field(field) for field in plugin.fields]
    else:
        lines += ["", "No fields: the shapes say all."]
    for title, tensors in (("input", plugin.inputs), ("output", plugin.outputs)):
        lines += ["", _row("", title, "shape", "type", ""), "|---|---|---|---|---|"]
        lines += [_tensor(i, tensor) for i, tensor in enumerate(tensors)]
    return "\n".join(lines)


def tables() -> str:
    """The tables of all plugins."""
    return "\n\n".join(section(plugin) for plugin in PLUGINS.values())


if __name__ == "__main__":
    print(tables())
