"""The EAGLE-3 head: its shape, the model and its chains, the losses, and the checkpoint that servers load."""
