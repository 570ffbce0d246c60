"""What opslot-patchgen splices into each model family: one module of data per family, read at development time only."""
