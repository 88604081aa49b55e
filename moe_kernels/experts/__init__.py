"""The expert feed-forward as one differentiable op."""
