"""Nothing in here can be imported without transformers."""

import pytest

pytest.importorskip("transformers", minversion="5.7", reason="transformers 5.7 or later is not installed")
