"""Token order to expert order and back."""
