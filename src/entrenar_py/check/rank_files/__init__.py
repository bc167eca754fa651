"""The files in which ranks record a run: written by `observing`, read here without torch."""
