"""Triton's interpreter, quicker."""

from __future__ import annotations

from typing import Any


def patch_once_per_launch() -> None:
    """The interpreter replaces the functions of triton.language in every call of a device function
    anew, which takes most of its time. Once for each kind of module in a launch is enough."""
    from triton.runtime import interpreter as triton_interpreter

    interpreter: Any = triton_interpreter
    if getattr(interpreter, "patches_once", False):
        return
    interpreter.patches_once = True
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[frozenset[int]] = set()  # modules, in the launch under way

    def patch_unless_done(function: Any) -> Any:
        modules = frozenset(
            id(value)
            for value in function.__globals__.values()
            if value is interpreter.tl or value is interpreter.tl.core
        )
        if modules and modules in patched:
            return interpreter._LangPatchScope()
        scope = patch(function)
        patched.add(modules)
        return scope

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            patched.clear()

    interpreter._patch_lang = patch_unless_done
    interpreter.GridExecutor.__call__ = launch_anew
