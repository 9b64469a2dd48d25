"""The parts of a training run: its settings, packed rows, initial weights, the loss of a row, and what survives a kill."""
