"""`entrenar finetune`: trains a checkpoint in Hugging Face's format on the available devices."""

NEW_TOKENS = 128  # the most tokens of an answer, by default
