"""The routers of transformers' models: statistics, losses, bias updates and replay."""
