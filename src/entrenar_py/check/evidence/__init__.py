"""What traces say: reading them, and comparing their tensors. Judges nothing."""
