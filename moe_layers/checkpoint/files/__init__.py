"""Files of a checkpoint: directories, stored weights, tensor names and layouts, the writer."""
