"""Downloads the files that a layer needs from the Hugging Face Hub, and no others."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Iterable
from pathlib import Path

from .directory import CONFIG, INDEX, SINGLE

_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class HubModel:
    """A model of the hub by its name, "org/model". `download` returns the folder of the local cache.

    Raises:
        ValueError: huggingface_hub is not installed (the message names the cure), or the hub does not provide the
            model.
    """

    def __init__(self, name: str):
        if importlib.util.find_spec("huggingface_hub") is None:
            raise ValueError(
                f"from_checkpoint: there is no directory {name}. To read a model of this name from the Hugging Face "
                f"Hub, install huggingface_hub, or download it: hf download {name} --local-dir DIR"
            )
        self.name = name
        self._commit: str | None = None  # all files come from one commit

    @classmethod
    def named(cls, directory: str | os.PathLike[str]) -> HubModel | None:
        """Return the model if the argument has the form "org/model" and is not an existing path, else None."""
        is_name = isinstance(directory, str) and _NAME.fullmatch(directory) and not os.path.exists(directory)
        return cls(str(directory)) if is_name else None

    def download_names(self) -> Path:
        """Download the configuration and the index of the tensors. A model without an index consists of one file."""
        folder = self.download((CONFIG, INDEX))
        return folder if (folder / INDEX).is_file() else self.download((SINGLE,))

    def download(self, files: Iterable[str]) -> Path:
        """Download those of the files that the model has. Return the folder of the local cache."""
        hub = importlib.import_module("huggingface_hub")
        try:
            folder = Path(hub.snapshot_download(self.name, revision=self._commit, allow_patterns=sorted(files)))
        except (OSError, ValueError) as error:  # a failed connection, an invalid name
            raise ValueError(
                f"from_checkpoint: there is no directory {self.name}, and the Hugging Face Hub gives no such model: "
                f"{error}"
            ) from error
        self._commit = folder.name  # the cache has one folder for each commit
        return folder
