"""Expert parallelism for transformers' models: shards the experts over ranks."""
