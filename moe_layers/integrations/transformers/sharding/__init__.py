"""Expert parallelism for transformers' models: ranks share the experts."""
