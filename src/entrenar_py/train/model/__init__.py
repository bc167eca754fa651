"""A checkpoint in Hugging Face's format and a user's rows, as a workload of our trainers."""

PRECISIONS = ("float32", "bfloat16")
