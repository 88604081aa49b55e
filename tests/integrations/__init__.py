"""Tests that need transformers."""

import pytest

pytest.importorskip("transformers", minversion="5.7", reason="transformers 5.7 or later is not installed")
