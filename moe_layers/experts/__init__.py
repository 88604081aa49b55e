"""The experts of a layer and the dispatcher of one process."""
