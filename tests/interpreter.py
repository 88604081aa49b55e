"""Make Triton's interpreter skip two pieces of repeated work, which take a quarter of its time."""

from types import SimpleNamespace

import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    """Replace two functions of the interpreter by faster ones with the same results."""
    _patch_once()
    _keep_dtypes()


def _patch_once() -> None:
    """Patch triton.language in the launch alone. The interpreter patches it again in each call of a device function."""
    patch_lang, original, unpatched = interpreter._patch_lang, tl.range, SimpleNamespace(restore=lambda: None)

    def patch(function):
        languages = tl, *(tl.core for value in function.__globals__.values() if value is tl.core)
        is_patched = all(language.range is not original for language in languages)
        return unpatched if is_patched else patch_lang(function)

    interpreter._patch_lang = patch


def _keep_dtypes() -> None:
    """Keep each dtype of NumPy that was looked up. The interpreter builds its table anew for every look-up."""
    make, kept = interpreter._get_np_dtype, {}

    def get(dtype):
        if dtype.name not in kept:
            kept[dtype.name] = make(dtype)
        return kept[dtype.name]

    interpreter._get_np_dtype = get
