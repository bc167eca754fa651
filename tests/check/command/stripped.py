"""Take the line for entrenar-check out of a script, or all that belongs to it but the line."""

from __future__ import annotations

import ast

_PACKAGE = "entrenar_py"
_MAKERS = ("observe", "ObserveCallback")


def stripped(text: str) -> str:
    """Return a script without imports of entrenar_py, `observe` and the calls of its result."""
    return _changed(text, _Stripper)


def bare(text: str) -> str:
    """Return a script whose line is `observe(model, optimizer)`, and says nothing more."""
    return _changed(text, _Barer)


def _changed(text: str, change: type[_Stripper]) -> str:
    tree = ast.parse(text)
    names = {
        ast.unparse(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _makes(node.value)
        for target in node.targets
    }
    change(names).generic_visit(tree)
    return ast.unparse(ast.fix_missing_locations(tree))


def _makes(value: ast.expr) -> bool:
    """Return whether an expression is `entrenar_py.observe(...)` or makes a callback."""
    called = value.func if isinstance(value, ast.Call) else None
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in _MAKERS


class _Stripper(ast.NodeTransformer):
    def __init__(self, names: set[str]) -> None:
        self._names = names

    def visit(self, node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.stmt) and self._belongs(node):
            return None
        node = super().visit(node)
        if isinstance(node, ast.stmt) and getattr(node, "body", None) == []:
            node.body = [ast.Pass()]  # type: ignore[attr-defined]
        return node

    def visit_List(self, node: ast.List) -> ast.AST:
        node.elts = [one for one in node.elts if not self._is_ours(one)]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.args = [one for one in node.args if not self._is_ours(one)]
        node.keywords = [one for one in node.keywords if not self._is_ours(one.value)]
        return self.generic_visit(node)

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        node.args = [one for one in node.args if one.arg not in self._names]
        return node

    def _belongs(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Import):
            return all(alias.name.startswith(_PACKAGE) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            return (node.module or "").startswith(_PACKAGE)
        if isinstance(node, ast.Assign | ast.Expr) and isinstance(node.value, ast.Call):
            return _makes(node.value) or self._is_ours(node.value.func)
        return False

    def _is_ours(self, node: ast.expr) -> bool:
        """Return whether an expression is the observer, or a part of it: `obs.loss`, `t.obs`."""
        if ast.unparse(node) in self._names:
            return True
        return isinstance(node, ast.Attribute) and (
            f"self.{node.attr}" in self._names or self._is_ours(node.value)
        )


class _Barer(_Stripper):
    visit_Call = visit_arguments = _Stripper.generic_visit  # noqa: N815 - ast's names

    def _belongs(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Assign | ast.Expr) and _makes(node.value):
            assert isinstance(node.value, ast.Call)
            node.value.keywords = []
            return False
        return not isinstance(node, ast.Import | ast.ImportFrom) and super()._belongs(node)
