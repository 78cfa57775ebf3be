#!/usr/bin/env python3
"""Writes the C++ callers of every op, ops.h and ops.cc, from the schemas in moxie/torch/schema.cc.

    tools/generate_ops.py moxie/torch/schema.cc <folder>

An argument without a default is a parameter. One or two arguments with defaults are parameters with defaults; three or more are
the fields of a struct, <Op>Options, which overloads with the same fields share. An overload becomes a function op_overload. Ops
that nodes call, with an integer `spec` or `plan` in place of text, are in the namespace `packed`, without the overload's name
and the underscore. A comment above a schema is copied.
"""

import pathlib
import re
import sys

TYPES = {  # type in a schema -> (C++ type of a parameter, C++ type of a field of <Op>Options)
    "Tensor": ("const at::Tensor&", "at::Tensor"),
    "Tensor?": ("const std::optional<at::Tensor>&", "std::optional<at::Tensor>"),
    "Tensor[]?": ("const std::optional<at::ArrayRef<at::Tensor>>&", "std::optional<at::ArrayRef<at::Tensor>>"),
    "int": ("int64_t", "int64_t"),
    "int[]": ("at::IntArrayRef", "at::IntArrayRef"),
    "bool": ("bool", "bool"),
    "float": ("double", "double"),
    "SymInt": ("const c10::SymInt&", "c10::SymInt"),
    "str": ("std::string_view", "std::string_view"),
    "str?": ("std::optional<std::string_view>", "std::optional<std::string_view>"),
    "ScalarType?": ("std::optional<at::ScalarType>", "std::optional<at::ScalarType>"),
}
RESULTS = {"()": "void", "Tensor": "at::Tensor", "Tensor[]": "std::vector<at::Tensor>"}
MOST_DEFAULTS = 2  # with more, defaults become fields of a struct, so that a call names those that it sets
SCHEMA = re.compile(r"(?P<op>\w+)(?:\.(?P<overload>\w+))?\((?P<args>.*)\) -> (?P<result>.+)")


class Argument:
    def __init__(self, text: str):
        kind, rest = text.split(" ", 1)
        self.kind = re.sub(r"\(\w!?\)", "", kind)  # Tensor(a!): written in place; Tensor(a): a result shares its memory
        self.name, _, self.default = rest.partition("=")

    def parameter(self, with_default: bool) -> str:
        text = f"{TYPES[self.kind][0]} {self.name}"
        return f"{text} = {self.value()}" if with_default and self.default else text

    def field(self) -> str:
        return f"  {TYPES[self.kind][1]} {self.name} = {self.value()};\n"

    def value(self) -> str:
        if self.default in ("None", "True", "False"):
            return {"None": "std::nullopt", "True": "true", "False": "false"}[self.default]
        return '"' + self.default.strip("'") + '"' if self.kind == "str" else self.default


class Op:
    def __init__(self, schema: str, comment: str):
        match = SCHEMA.fullmatch(schema)
        if match is None:
            raise SystemExit(f"generate_ops: not a schema: {schema}")
        self.comment = comment
        op, overload = match["op"], match["overload"]
        self.full_name = f"moxie::{op}.{overload}" if overload else f"moxie::{op}"
        parts = [part for part in match["args"].split(", ") if part and part != "*"]
        self.arguments = [Argument(part) for part in parts]
        self.packed = any(argument.name in ("spec", "plan") for argument in self.arguments)
        bare = op.lstrip("_")
        self.name = f"{bare}_{overload}" if overload and not self.packed else bare
        result = match["result"]
        named = result.strip("()").split(", ") if result.startswith("(T") else None
        self.result = "std::tuple<" + ", ".join(["at::Tensor"] * len(named)) + ">" if named else RESULTS[result.split(" ")[0]]
        defaults = [argument for argument in self.arguments if argument.default]
        self.options = defaults if len(defaults) > MOST_DEFAULTS else []
        self.base = op
        self.options_name = "".join(part.capitalize() for part in self.name.split("_")) + "Options"
        self.shares_options = False
        self.parameters = [a for a in self.arguments if not a.default] + ([] if self.options else defaults)

    def fields(self) -> str:
        return "".join(argument.field() for argument in self.options)

    def share_options_with(self, others: "list[Op]") -> None:
        for other in others:
            if self.options and other.base == self.base and other.fields() == self.fields():
                self.options_name, self.shares_options = other.options_name, True
                return

    def signature(self, in_header: bool) -> str:
        parameters = [argument.parameter(in_header) for argument in self.parameters]
        if self.options:
            parameters.append(f"const {self.options_name}& options" + (" = {}" if in_header else ""))
        return f"{self.result} {self.name}({', '.join(parameters)})"

    def declaration(self) -> str:
        has_struct = self.options and not self.shares_options
        struct = f"struct {self.options_name} {{\n{self.fields()}}};\n" if has_struct else ""
        return f"{struct}{self.comment}{self.signature(True)};\n"

    def definition(self) -> str:
        values = [("options." if argument in self.options else "") + argument.name for argument in self.arguments]
        return f'{self.signature(False)} {{\n  return dispatch<"{self.full_name}", {self.result}>({", ".join(values)});\n}}\n'


def ops_of(source: str) -> list[Op]:
    """Reads the ops from the source of schema.cc: its calls of def() and differentiable(), each with the comment above it."""
    call = re.compile(
        r'(?P<comment>(?:^  //[^\n]*\n)*)^  (?:def|differentiable)\(\s*(?P<text>"(?:[^"\\]|\\.|"\s*")*")\s*\);', re.MULTILINE
    )
    ops = []
    for match in call.finditer(source):
        schema = re.sub(r'"\s*"', "", match["text"]).strip('"')
        if "(Tensor" in schema:  # ops without tensors are queries that only tests and Python call
            op = Op(schema, re.sub(r"^  ", "", match["comment"], flags=re.MULTILINE))
            op.share_options_with(ops)
            ops.append(op)
    expected = len(re.findall(r"^  (?:def|differentiable)\(", source, re.MULTILINE))
    if len(call.findall(source)) != expected:
        raise SystemExit(f"generate_ops: {expected} schemas, and could read {len(call.findall(source))} of them")
    names = [op.name for op in ops if not op.packed]
    if len(set(names)) != len(names):
        raise SystemExit(f"generate_ops: two ops would be called {next(n for n in names if names.count(n) > 1)}")
    return ops


HEADER = """// The ops for C++ callers: the functions of torch.ops.moxie, through the dispatcher.
// Generated from moxie/torch/schema.cc by tools/generate_ops.py.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

namespace moxie::ops {

"""
SOURCE = """// Generated from moxie/torch/schema.cc by tools/generate_ops.py.
#include "moxie/torch/ops.h"

#include "moxie/torch/dispatch.h"

namespace moxie::ops {

"""


def write(path: pathlib.Path, opening: str, parts: dict[bool, list[str]]) -> None:
    text = (
        opening
        + "\n".join(parts[False])
        + "\nnamespace packed {\n\n"
        + "\n".join(parts[True])
        + "\n}  // namespace packed\n}  // namespace moxie::ops\n"
    )
    if not path.exists() or path.read_text() != text:  # writing an unchanged file would cause a rebuild
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def main() -> int:
    source, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    ops = ops_of(source.read_text())
    for name, opening, part in (("ops.h", HEADER, Op.declaration), ("ops.cc", SOURCE, Op.definition)):
        write(
            folder / "moxie/torch" / name,
            opening,
            {packed: [part(op) for op in ops if op.packed == packed] for packed in (False, True)},
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
