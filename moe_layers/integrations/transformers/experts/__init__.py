"""The experts modules of transformers' models: found, recognised, and computed by `moe_kernels`."""
