"""`entrenar finetune`: a checkpoint in Hugging Face's format, trained on the devices there are."""

NEW_TOKENS = 128  # of an answer, at most, unless it is said
