"""Triton's interpreter without two pieces of work that it repeats, which take a quarter of its time."""

from types import SimpleNamespace

import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    """Replace two functions of the interpreter by faster ones with the same results."""
    _patch_once()
    _keep_dtypes()


def _patch_once() -> None:
    """Every call of a device function patches all of triton.language again, which the launch has patched."""
    patch_lang, original, unpatched = interpreter._patch_lang, tl.range, SimpleNamespace(restore=lambda: None)

    def patch(function):
        languages = tl, *(tl.core for value in function.__globals__.values() if value is tl.core)
        is_patched = all(language.range is not original for language in languages)
        return unpatched if is_patched else patch_lang(function)

    interpreter._patch_lang = patch


def _keep_dtypes() -> None:
    """The dtype of each array is looked up in a table that is made for the look-up."""
    make, kept = interpreter._get_np_dtype, {}

    def get(dtype):
        if dtype.name not in kept:
            kept[dtype.name] = make(dtype)
        return kept[dtype.name]

    interpreter._get_np_dtype = get
