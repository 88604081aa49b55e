"""Base of every op: Triton and its versions, dispatch, registered ops, checks, launches."""
