"""`entrenar finetune`: a checkpoint in Hugging Face's format, trained on the devices there are."""
