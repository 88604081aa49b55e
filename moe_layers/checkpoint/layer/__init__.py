"""One layer from a checkpoint, and back."""
