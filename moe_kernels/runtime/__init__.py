"""Code that all ops share: Triton and its versions, dispatch, registered ops, checks, launches."""
