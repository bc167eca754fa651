"""Launch a user's own trainer, read the files of its ranks, and judge its runs."""
