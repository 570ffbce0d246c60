"""`opslot-train`: the main job. Build or load a model, bind its kernels, train it, save it, reload it elsewhere."""
